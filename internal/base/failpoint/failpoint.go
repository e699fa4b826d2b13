// Package failpoint names the points of the program at which a test may kill the process, as a power
// failure would, or block it, or make it fail.
//
// Releases are built without the tag failpoints: [Reach] and [Err] are empty, and the compiler drops
// the calls.
//
// With the tag, the environment variable [Variable] arms a point:
//
//	NAME[:N][=ACTION]   at the Nth time that the point is reached, from when it was armed; 1 if left out
//	@FILE               a file that has such a line; none there: nothing is armed
//
// The actions are kill (SIGKILL to the own process; the default), error (Err returns one; Reach
// continues), and wait (until another or no point is armed). A file may be written, replaced and
// removed while the process runs.
package failpoint

import "slices"

// Variable is the environment variable that arms a point.
const Variable = "BARCHAN_FAILPOINT"

// names lists all points, in execution order. A test compares it with the calls in the source: each
// point has exactly one.
var names = []string{
	// An object is written: by the REST API, or by a controller.
	"create/written", "create/timed", "create/routed",
	"claim/held", "claim/written", "claim/bound",
	"pause/written", "connect/written", "delete/written",
	"snapshot/written", "snapshot/deleted", "fork/captured", "fork/started",
	"pool/made", "pool/unmade",
	"claimobject/made", "claimobject/status", "claimobject/unmade",

	"checkpointobject/suspended", "checkpointobject/intended", "checkpointobject/captured", "checkpointobject/finished",
	"checkpointobject/dropped", "checkpointobject/released",
	"warmup/seeded", "warmup/checkpointed", "warmup/unseeded",
	"volume/written", "volume/key", "volume/made", "volume/mounted", "volume/served", "volumeobject/status", "volume/uploaded", "volume/detached", "volume/unlinked", "volume/removed", "volumeobject/released",
	"templatebuild/credentials", "templatebuild/status", "templatebuild/sandbox", "templatebuild/packed", "templatebuild/checkpoint", "templatebuild/template",
	"tag/used", "tag/assigned", "tag/removed",

	// A webhook is written; its receiver has answered and the cursor is not written; events are in the log.
	"webhook/written", "webhook/delivered", "event/recorded",

	// The key of Secrets: the file has both, all are written again, the file has the new one.
	"secrets/key_added", "secrets/rewritten", "secrets/key_removed",

	// The controller of sandboxes.
	"sandbox/seen", "sandbox/driven", "sandbox/status", "sandbox/removed", "sandbox/released",

	// A row of the node's journal has reached the disk, by its stage; or it is gone.
	"row/making", "row/live", "row/pausing", "row/paused", "row/resuming", "row/storing", "row/stored", "row/waking",
	"row/restarting", "row/capturing", "row/ended", "row/removing", "row/gone",

	// A part of the data directory has its new owner, and its new place.
	"apart/owned", "apart/moved",

	// A migration begins, and is done but not in the ledger.
	"migrate/leases", "migrate/moved",

	// The image of a disk has its name.
	"disk/made",

	// A step of the node is done.
	"node/address", "node/network", "node/snapshot", "node/mount", "node/bundle", "node/sidecar_files", "node/record", "node/init_started", "node/init", "node/projected", "node/start", "node/agent", "node/sidecars", "node/limit", "node/hold",
	"node/checkpoint", "node/flush", "node/keep", "node/stop", "node/unmount", "node/detach", "node/stored",
	"node/restore", "node/running", "node/forgotten", "node/frozen", "node/thawed",
	"node/bind_config", "node/bind_agent",
	"node/verify", "node/warmup",
	"node/sync", "node/decided", "node/discard", "node/released", "node/readdress", "node/tell",

	// The record of an image is written, or removed.
	"images/pulled", "images/grant", "images/removed",

	// A step of a checkpoint is done, or its row has reached the disk.
	"checkpoint/writing", "node/capture_row", "node/capture_ahead", "node/capture_held", "node/capture_copied", "node/capture_memory",
	"node/capture_files", "checkpoint/ready", "node/capture_ready", "checkpoint/dropping", "checkpoint/removed", "checkpoint/gone",
	"import/made", "import/writing", "import/base", "import/data", "import/ready", "import/noted",

	// A step of the node is undone.
	"undo/start", "undo/init", "undo/sidecar_files", "undo/record", "undo/mount", "undo/bundle", "undo/snapshot", "undo/network", "undo/address",
}

// Names lists all points, in execution order. The caller owns the list.
func Names() []string { return slices.Clone(names) }
