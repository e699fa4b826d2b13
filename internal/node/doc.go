// Package node is the front of the node plane: it runs sandboxes on one host. It adopts what runs after a restart,
// acts on requests and on what ends by itself, and removes orphans. It knows no API server; its caller decides what
// should run.
//
//	plan        what an object means for the node: class, limits, volumes, environment, probes
//	journal     one row for each sandbox, and the table of allowed stage transitions
//	registry    one handle for each sandbox: lock, row, status; background tasks
//	references  the values that a plan takes from Secrets and ConfigMaps
//	projection  their files, which change as a whole
//	agentconn   reaches the agents of sandboxes
//	operation   ordered lists of steps with do and undo: create, save, release, bring up, restart
//	recovery    adoption after a restart, sweeps of the host, and removal
//	suspend     pause, store and resume, with and without memory
//	supervise   watches, probes, restarts and ends of running sandboxes
//	oom         kills processes of a sandbox at its memory limit
//	cpushare    lowers the priority of sandboxes that use more than their share of processors
//	disk        images with a file system that bound what a sandbox writes
//	memstore    directories of stored memory, which may be encrypted
//	capture     the making of checkpoints
//	checkpoint  the store of checkpoints: rows, data, verification, removal
//	transfer    export and import of checkpoints as artifacts
//	inventory   the scan of the host: what exists there, and what belongs to no sandbox
//	programs    kept copies of the agent and of each build of runsc that is needed
//	probe       startup, readiness and liveness probes
//	ctrd, oci, netdev, ipam, volumes, egress, resolver, baseimage, toolchain
//	            owners of containerd, runtimes, network, addresses, shared directories, DNS and images
//
// This package itself connects them: Ensure (ensure.go), Suspend and Resume (suspend.go), Bind (bind.go), egress and DNS (egress.go).
//
// # How a sandbox is made
//
// Ensure takes the lock of the sandbox, makes a plan of the object, finds the image or checkpoint, and writes a row in
// stage making, synced to disk. Then operation does the steps, the row becomes live, and a watch begins. All
// names on the host derive from the UID in the row. So wherever the process ends, the next one finds the row: it undoes a
// sandbox that was being made, and adopts one that is live. The row is deleted last.
//
// # Pause and resume
//
// Suspend freezes a sandbox. Later its memory moves to disk and its container is removed. Resume thaws it, or
// restores the memory. The journal decides what counts: until a row is in stage storing, the frozen
// processes are the sandbox, and files on disk are garbage; until it is live again, the memory on disk is the sandbox, and any
// part of a container is garbage. See package journal for the stages.
//
// # Addresses of stored sandboxes
//
// A sandbox on disk keeps its address, unless Config.ReleaseAddresses is set or only its volume claims are kept. The release
// removes the address in this order
//
//	label of the container record → row of the journal → lease
//
// so that an address without a lease is in no row. After a crash in between, the next start releases the lease
// ([suspend.Suspender.AtRest]). A resume takes an address as a create does: until the row is live, only the lease has it.
//
// # Imports
//
// This plane imports base, and of guest the wire format of the agent. Nothing of the control plane imports it: controllers
// declare what they need of a node (Runner, CheckpointRunner and Origins of internal/control/controllers), and the daemon
// passes a Node. That interface is the only door. To be a process of its own the node needs a transport for it,
// a stream in place of Changes, and remote answers for Config.Exists, Refuse and CheckSpace.
//
// # Failure
//
// A failed step undoes the operation, or retries in the background with growing pauses. A failed removal keeps the row and the
// address. Nothing is removed because a cache or an index lacks it: only the source of truth (Config.Exists) decides, after
// two scans.
//
// # Lock order
//
// The lock of a checkpoint, then that of a sandbox, then Registry.mu or a handle's mu, never both. No mutex is held
// for a call out of its package.
package node
