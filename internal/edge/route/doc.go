// Package route is the one table that says where a sandbox's traffic goes. Manager and gateway
// use the same type, and every writer (the watch, a local writer, a peer) goes through the same
// predicate, [FromSandbox]: a route is deleted only when its sandbox is dead for good. One that is
// a spare member of a pool has none.
//
// Writes are ordered by resourceVersion alone, never by clock or arrival: what is not newer than
// the record or its tombstone changes nothing. Reads take no lock: they look into an immutable
// snapshot, of which a writer replaces only the path to one entry.
//
// Each time that a route becomes reachable begins a [Life]; pausing, dying and moving end it.
// Streams and connection pools hang on a life, so that none outlives the sandbox that it was made
// for, even where another gets the same address. An address leads to one sandbox at most: the
// newest version that claims it has it, and whoever had it before is not reachable by it any more.
//
// # Truth and hints
//
// What the watch and local writers say is the truth. What a peer says ([Table.Hint],
// [Table.HintDelete]) runs ahead of it: lookups see it at once, but it lies over the truth, which
// stays as it is. A hint ends when the truth has a version of that sandbox as new as the hint's,
// when the watch has passed the hint's version ([Table.Progress]), or after [HintTTL], whatever
// version it claims and however often it is told. One that ends by time alone costs its sandbox
// hints for a while: until then the watch decides.
//
// A hint may be late, doubled, out of order or wrong. What it can do at worst is bounded:
//
//   - It never cuts what flows. Sending new requests to a sandbox that has just died costs them an
//     honest error; ending the connections of a living one costs work that cannot be had again. So a
//     hint that a sandbox died or sleeps turns new requests away, for HintTTL at most, and only the
//     truth ends a life.
//   - It never leads to another's sandbox. It is refused where the truth holds its address for
//     another sandbox, and ends where the truth comes to do so; two hints that claim one address
//     void each other. Names that the truth knows stay with their owners.
//   - It never opens a door: where the truth knows a sandbox, a hint may narrow its access, not widen
//     it, and does not say whether traffic may wake it.
//   - It takes bounded memory: beyond that, the oldest hints go early.
//
// # Trust
//
// A table whose watch is cut off goes on with what it knew, and an address that its sandbox has
// lost may be another's by then. Whoever feeds it says until when it can be trusted
// ([Table.TrustUntil]); after that lookups find nothing, as before the first list.
//
// The table does no I/O, starts no goroutine and dials nothing. Its writers sweep it.
package route
