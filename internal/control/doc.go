// Package control describes the control plane: the objects, who may change them, and the
// controllers that make them true. It holds no code itself.
//
//	apiserver    the Kubernetes API of this server, on an embedded etcd
//	cache        informers: what all reads below are answered from
//	assumecache  objects that this process has written and that its cache does not show yet
//	manager      the API's operations on sandboxes, templates, snapshots and keys
//	claiming     how a claim gets its sandbox, by the API or by a SandboxClaim
//	picker       which member of a warm pool a claim gets
//	quota        what a namespace may use
//	controllers  reconcilers: sandboxes, claims, pools, warm-up, checkpoints
//	agentclient  connections to the agents of sandboxes
//	podlogs      logs of sandboxes that are Pods
//	builds       archives and logs of template builds
//	events       the database of sandboxes' events
//	webhooks     delivers events to the webhooks of namespaces
//	kubeauth     clients with tokens of a Kubernetes cluster
//	paging       cuts lists into pages
//	apistatus    kinds of errors for those of the API server
//
// # Truth
//
// An object in etcd is the only truth about what should be. A spec is written by users, or by the
// manager on behalf of a user; a status has one writer. All that a package here keeps in memory is
// derived, and is rebuilt after a restart.
//
// A read from the cache may be old. So a decision that cannot be taken back is a write on condition of the
// version that was read, or follows a read from the API server. Nothing is deleted because the cache lacks it.
//
// # How a sandbox comes to be
//
// The manager, or the SandboxClaim controller, checks the quota, resolves the template and takes a warm member from the picker.
// If there is none it writes a new Sandbox. The sandbox controller sees it and calls the
// node, which starts it; the controller writes what the node reports into the status, and the
// manager's wait ends. See the packages for pause, resume, checkpoints and forks, which go the same way.
//
// # Imports
//
// This plane imports base, and of guest the wire format of the agent. It does not import the node plane: controllers
// declare the interface that they need of a node (controllers.Runner), and the daemon hands
// one in. It does not import the edge: the manager declares what it needs of the route table (manager.Routes).
//
// # Failure
//
// If the process ends at any instant, the next one continues from the objects. Controllers retry
// with backoff and write why into conditions and events.
package control
