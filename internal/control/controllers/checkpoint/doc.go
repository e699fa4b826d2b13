// Package checkpoint reconciles Checkpoint objects: a node captures, keeps and deletes their data. The
// controller itself reads and writes no data.
//
// # Taking
//
// A checkpoint has one source sandbox, by UID. The controller writes the source and its template to the
// checkpoint's status before it calls the node, so that a crash or a new sandbox of the same name cannot
// mix two sources. It reads the source from the API server in each reconcile. A source that must not
// continue running is first suspended by its spec, and captured when it is paused. If the source cannot
// be captured yet, the controller retries on its events and with backoff. An error that only a user can
// fix is final: the checkpoint has failed and has no data.
//
// # Imports
//
// `barchan snapshot import` copies the data to the node and then changes the object's annotation
// [barchan.AnnotationImport]. The controller queries the node after each change.
//
// # Keeping
//
// A ready checkpoint fails if the node has lost its data. A deleted one keeps its finalizer while a template
// of its namespace, or a sandbox that has not run yet, refers to it. A periodic scan finds data without
// an object, such as after a forced removal of the finalizer. The controller deletes such data only after the
// API server has returned NotFound for the object.
//
// # Clusters
//
// Where sandboxes are Pods there is no node, and nothing to capture. The controller fails each checkpoint with
// the reason, and removes the finalizer of a deleted one.
package checkpoint
