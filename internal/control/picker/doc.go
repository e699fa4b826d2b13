// Package picker leases the ready members of warm pools, each to one claim. Events feed it; it
// reads an object itself only to find the outcome of a write. It starts no sandbox: a claim that
// gets [ErrNone] does.
//
// For each pool, template and revision there are queues of ready members, one for each node, and a count
// of the members that are being created. A claim leases the longest-ready member of the node that
// has most: no other claim of this picker tries that one. Where other processes claim too, each first takes
// those members that rendezvous hashing gives it. [Lease.Commit] makes it the claim's by one
// write, conditional on the version last seen, which alone decides between pickers of different
// processes; a lease ends with its process. [Lease.Release] returns the member, as does the end of
// the claim's context, or of the lease's own time. A claim that finds no member ready waits if one
// that is being created is left for it, and gets [ErrNone] otherwise. Claims are served in order;
// when members fail before they are ready, the newest claims go without.
//
// A member is in one place at a time:
//
//	      ┌─────────> idle <────────┐
//	event │                         │ event
//	      v                         v
//	   making ──── event ───────> ready <── event, or a live read ── outdated
//	                                │ ^                                ^
//	                       Reserve  │ │ Release                        │ conflict
//	                                v │                                │
//	                               held ───────────────────────────────┘
//	                                │ Commit
//	                                v
//	                               past ── the event that shows it ──> forgotten
//
// The picker calls no caller, and holds no lock over a request to the API server.
package picker
