// Package daemon makes one server of the parts: it wires them and boots them in named phases. It has no rules about sandboxes.
//
// Phases of a server, each done before the next begins (a test compares this list with the code):
//
//	disk             the data directory can be written, and has enough free space to start
//	lock             this process holds the data directory
//	bind             the listeners are open; they answer /healthz and /readyz from here on
//	migrate          files and databases have the form of this version
//	open-node        the files of the node are open and being read
//	api              storage is open, the API server answers
//	migrate-objects  objects have the form of this version
//	defaults         base template, its pool and the local key exist
//	caches           every kind has been listed, with its indexes
//	node             containerd answers; running sandboxes are adopted
//	routes           routes, pool members and quotas are complete
//	peers            the other replicas receive our pushes
//	manager          the APIs can be served
//	controllers      objects are reconciled
//	serve            the listeners serve the APIs and the sandboxes
//
// A replica has another server's API in place of its own:
//
//	disk, lock, bind, connect, caches, routes, peers, manager, serve
//
// A controller of a cluster has no sandboxes of its own and serves none:
//
//	disk, lock, bind, connect, caches, pools, election
//
// Its controllers run while it holds the cluster's Lease. One that loses the Lease ends.
//
// A node in a process of its own runs the sandboxes of a server on the same machine, by the server's API:
//
//	disk, lock, bind, migrate, open-node, connect, caches, node, claims, controllers, serve
//
// That server's own phase node only connects to the node's socket, and reports what the node refuses.
//
// Sandboxes keep running when the process ends; the next boot adopts them.
package daemon
