// Package claim gives each SandboxClaim one sandbox: a ready member of its pool, or one started
// for it where the pool has none.
//
// A claim without a sandbox is refused, waits, or takes one; it names its sandbox in its status
// only once that is of the template's revision as it is now, and has got all that the claim
// brings. From then on the sandbox is the claim's for life, whatever becomes of the template and
// the pool. Taking is one conditional write of the Sandbox, which makes the claim its owner; what
// a crash left between that write and the status is found by its owner reference and asked the
// same question again ([pool.Fits]): it is named, or deleted and another one taken.
//
// Variables (spec.env) go into a running member: into its object by the write that takes it, and
// to its agent before the claim is answered. Three things cannot be brought to what runs already,
// so that a claim with one of them starts its sandbox cold and says so: volumeClaimTemplates,
// variables for a container other than the first, and values with a $(reference), which only the
// start of a container expands.
//
// What a claim's lifecycle says is kept on the claim alone: nothing of it is written on the
// sandbox, so that there is one clock, and a changed shutdownTime needs no second write.
//
// A fault of the user's is a condition that names the field, looked at again when the claim, its
// pool or its template changes. No claim has a finalizer: the garbage collection by owner
// references deletes the sandbox of a claim that is gone.
package claim
