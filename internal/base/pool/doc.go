// Package pool holds the rules of warm pools: what a revision is, which sandboxes are members, which
// can be claimed, and what adoption writes. It does no I/O.
//
// A pool's member is a Sandbox controlled by its SandboxWarmPool, labelled with the pool's UID
// ([agents.LabelWarmPoolSandbox]) and the template's revision ([agents.LabelTemplateHash]).
// [Adopt] turns it, by one conditional write of its caller, into the sandbox of one owner: the
// membership label and the pool's owner reference go, and it never comes back.
//
// Every path to a sandbox checks [Fits]: the first try, the retry, a slow cold start, and the
// continuation after a crash.
package pool
