// Package pool holds the rules of warm pools: what a revision is, who is a member, who may be
// handed out, and what adoption writes. It does no I/O.
//
// A pool's member is a Sandbox controlled by its SandboxWarmPool, labelled with the pool's UID
// ([agents.LabelWarmPoolSandbox]) and the template's revision ([agents.LabelTemplateHash]).
// [Adopt] turns it, by one conditional write of its caller, into the sandbox of one owner: the
// membership label and the pool's owner reference go, and it never comes back.
//
// Every way to a sandbox asks [Fits]: the first try, the retry, a cold start that took long,
// and the resumption of what a crash left half done.
package pool
