// Package route is the table of where each sandbox's traffic goes. Manager and gateway use the same
// type, and every writer (the watch, a local writer, a peer) uses the same predicate, [FromSandbox]:
// a route is deleted only when its sandbox is dead for good. An unclaimed member of a pool has none.
//
// Writes are ordered by resourceVersion alone, never by clock or arrival: a version that is not newer
// than the record or its tombstone changes nothing. Reads take no lock: they use an immutable
// snapshot, of which a writer replaces only the path to one entry.
//
// An [Epoch] begins each time a route becomes reachable; pausing, dying and moving end it. Streams
// and connection pools belong to an epoch, so that none outlives its sandbox, even if another gets
// the same address. An address leads to one sandbox at most: the newest version that claims it has
// it, and the previous holder is no longer reachable by it.
//
// # Base records and hints
//
// The watch and local writers make base records. A peer's hint ([Table.Hint], [Table.HintDelete]) is
// ahead of them: lookups see it at once, as an overlay over the base record, which is not changed. A
// hint ends when the base record has a version as new as the hint's, when the watch has passed the
// hint's version ([Table.Progress]), or after [HintTTL], whatever its version and however often it is
// repeated. After one that ended by time alone, further hints about its sandbox are rejected for a
// while: until then the watch decides.
//
// A hint may be late, duplicated, out of order or wrong. Its worst effects are bounded:
//
//   - It never closes connections. A new request to a dead sandbox gets an error; closing the
//     connections of a live one loses work. So a hint that a sandbox is dead or paused only rejects
//     new requests, for at most HintTTL; only a base record ends an epoch.
//   - It never leads to another's sandbox. It is rejected if a base record has its address for another
//     sandbox, and ends when one gets it; two hints that claim one address void each other. Names
//     in base records stay with their owners.
//   - It never widens access: over a base record, a hint may narrow a sandbox's access, and does not
//     decide whether traffic may wake it.
//   - It takes bounded memory: beyond that, the oldest hints are dropped early.
//
// # Trust
//
// A table whose watch is cut off continues with its routes, and the address that a sandbox has lost
// may get a new owner. The writer sets until when the table can be trusted ([Table.TrustUntil]);
// after that lookups find nothing, as before the first list.
//
// The table does no I/O, starts no goroutine and dials nothing. Its writers sweep it.
package route
