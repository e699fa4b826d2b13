// Package peers pushes this replica's routes to the other replicas of manager and gateway, and
// receives theirs. Members find each other by gossip, encrypted with a shared key; routes are sent
// over mutual TLS with certificates of the replicas' own CA, each member for itself alone.
//
// A received route is a hint: it may be late, duplicated, out of order or missing, and this package
// guarantees only its sender. The receiver orders hints by resourceVersion and confirms them by the
// watch. No payload carries a secret.
//
// Push does not block: it puts a route into one bounded queue per member and returns. A queue holds
// the newest version of each sandbox's route, and when it is full it drops the oldest. Each member has
// its own goroutine and connection, so that an unresponsive one does not delay the others.
//
// A batch names the boot IDs of the sending and the receiving process, and has a number that only
// grows between the two. It is accepted once, by one process, independent of any clock: batches from
// before a restart of either side and duplicates are rejected.
//
// The package makes no decisions about routes, does not store them, and does not send a new member
// earlier ones: its own watch has those.
package peers
