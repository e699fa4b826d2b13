// Package quota bounds what the sandboxes of a namespace use: their number, their cores and
// their memory. It reads no list: it counts by the events of the cache ([Quotas.Observe]), and
// writes nothing.
//
// Spare members of pools, and sandboxes that are dead or on their way out, use nothing. Paused
// ones count only where the namespace says so.
//
// Within one process the decision has no race: a [Reservation] is counted from before the write
// that makes or claims a sandbox until the cache shows what was written, and neither twice nor
// not at all in between. Each replica counts by its own cache and knows its own reservations
// alone. So several may together exceed a quota, by no more than what they grant within the
// time in which one's write reaches the others' caches. They do not grant more after that.
package quota
