// Package manager is what the APIs mean: it creates, finds, wakes, pauses and ends sandboxes on
// behalf of a tenant, and keeps the tenants' keys. A tenant is a namespace. It speaks no wire
// format, runs no sandbox and starts no goroutine that outlives a call: it writes wishes into
// objects, one conditional write at a time, and waits for the controllers to fulfil them.
//
// Every error that a user may see carries a public message ([errs.PublicMessage]). What belongs
// to another tenant, or is dead, does not exist: the error is the same as for what never was.
//
// A change made here is visible to reads through the same cache as soon as the call returns,
// and the route table hears of it before that.
package manager
