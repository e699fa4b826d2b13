// Package daemon makes one server of the parts: it wires them and boots them in named phases,
// in the order that promise 1 of the design wants. It has no logic of its own about sandboxes.
//
// Phases, each done before the next begins:
//
//	disk       the data directory can be written, with room to start
//	lock       the data directory is ours
//	bind       the listeners are ours; they answer /healthz and /readyz from here on
//	api        storage is open, the API server answers
//	defaults   namespace, base template and the local key exist
//	caches     every kind has been listed, with its indexes
//	node       containerd answers; what already runs is adopted
//	routes     every sandbox has its route
//	serve      controllers work, the listeners are opened
//
// At the end of the process sandboxes run on; the next boot adopts them.
package daemon
