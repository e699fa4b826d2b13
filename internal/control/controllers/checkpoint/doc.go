// Package checkpoint has a node take, keep and drop what Checkpoint objects ask for. It touches no data
// by itself.
//
// # Taking
//
// A checkpoint is of one sandbox, by UID: which, and what it was made of, is in the checkpoint's status
// before the node is asked, so that a crash, or another sandbox of the name, never mixes two. The
// source is read from the API server each time. One that is not to run on is suspended first, by its
// specification, and captured when it sleeps. What it cannot be taken of now is waited for, by the
// source's events and with growing pauses; what only a user can mend fails for good, and a checkpoint
// that has failed has no data.
//
// # Imports
//
// `barchan snapshot import` brings the data of an import to the node by itself, and changes the
// object's annotation [AnnotationImport] then; the node is asked at each change.
//
// # Keeping
//
// A ready checkpoint whose data the node lost has failed. A deleted one stays while a template of its
// namespace names it, or a sandbox that has not run yet. Data without an object, which a finalizer taken
// away by force leaves, are found by a sweep, and dropped once the API server has said by name that
// there is no such object.
package checkpoint
