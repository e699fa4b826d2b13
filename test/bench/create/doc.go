// Package create measures how soon a client has a sandbox and the output of a command in it: cold creates by step, commands over a
// connection that is kept, and claims of warm sandboxes from pools. Their floors are a container of the bare runtime, a request that
// starts nothing, and one durable write.
package create
