// Package quota limits the number, the CPU cores and the memory of the sandboxes of a namespace.
// It counts from cache events ([Quotas.Observe]); it lists and writes nothing.
//
// Spare pool members and dead or terminating sandboxes do not count. Paused sandboxes count only
// if an annotation of the namespace enables it.
//
// Beside sandboxes it bounds what a namespace has on disk ([Quotas.CheckStored]) and the numbers of other objects ([Kind]).
//
// A request may wait for room ([Quotas.Await]). The queue of a namespace is fair, and in the memory of
// one process: it ends with the requests in it.
//
// Decisions within one process do not race: a [Reservation] counts from before the write that
// creates or claims a sandbox until the cache shows that write, exactly once at any time. Each
// replica counts from its own cache and its own reservations. So several replicas can together
// exceed a quota, by at most what they grant before their writes reach each other's caches.
package quota
