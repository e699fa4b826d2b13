// Package route is the one table that says where a sandbox's traffic goes. Manager and gateway
// use the same type, and every writer (the watch, a local writer, later a peer) goes through the
// same predicate, [FromSandbox]: a route is deleted only when its sandbox is dead for good. One
// that is a spare member of a pool has none.
//
// Writes are ordered by resourceVersion alone, never by clock or arrival: what is not newer than
// the record or its tombstone changes nothing. Reads take no lock: they look into an immutable
// snapshot, of which a writer replaces only the path to one entry.
//
// Each time that a route becomes reachable begins a [Life]; pausing, dying and moving end it.
// Streams and connection pools hang on a life, so that none outlives the sandbox that it was made
// for, even where another gets the same address.
//
// The table does no I/O, starts no goroutine and dials nothing.
package route
