// Package picker hands out the ready members of warm pools, each to one claim. It learns of
// members from events alone and reads an object itself only to find out what became of a
// write. It starts nothing cold: who gets [ErrNone] does that.
//
// For each pool and revision there are queues of ready members, one for each node, and a
// count of the members in the making. A claim takes the longest-ready member of the fullest
// node: nobody else here tries that one. One write, conditional on the version last seen,
// decides; the reservation dies with the process, and no other process heeds it. A claim that
// finds nothing ready waits if a member in the making is left for it, and gets [ErrNone]
// otherwise. Who came first is served first; when members in the making fail, who came last
// goes without.
//
// A member is in one place at a time:
//
//	      ┌─────────> idle <────────┐
//	event │                         │ event
//	      v                         v
//	   making ──── event ───────> ready <── event, or a live read ── behind
//	                                │ ^                                ^
//	                          taken │ │ put back                      │ conflict
//	                                v │                               │
//	                               held ──────────────────────────────┘
//	                                │ written
//	                                v
//	                               past ── the event that says so ──> forgotten
//
// Nothing is locked while anything is asked of the API server or of a caller.
package picker
