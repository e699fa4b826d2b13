// Package claim assigns one sandbox to each SandboxClaim: a ready member of its pool, or a cold start
// if the pool has none.
//
// The controller writes the sandbox to the claim's status only when the sandbox has the current revision
// of the template and everything that the claim adds. From then on the sandbox belongs to the claim,
// independent of later changes to template and pool. One conditional write of the Sandbox takes a member
// and makes the claim its owner. After a crash between that write and the status, the controller finds
// the sandbox by its owner reference and checks it again ([pool.Fits]): it assigns the sandbox, or
// deletes it and takes another one.
//
// Variables (spec.env) of a warm claim go into the object by the write that takes the member, and to its
// agent before the claim is ready. Three things cannot be applied to a running member, so a claim with
// one of them starts cold and reports that: volumeClaimTemplates, variables for a container other than
// the first, and values with a $(reference), which are expanded only at container start.
//
// The lifecycle stays on the claim alone and is not copied to the sandbox: so there is one clock, and a
// changed shutdownTime needs no second write.
//
// An invalid claim gets a condition that names the field, and is checked again when the claim, its pool
// or its template changes. Claims have no finalizer: garbage collection by owner references deletes the
// sandbox of a deleted claim.
package claim
