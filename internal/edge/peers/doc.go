// Package peers tells the other replicas of manager and gateway what this one knows about routes,
// and hears what they know. Members find each other by gossip, encrypted with a key that all of
// them hold; routes go from one to another over TLS in which both sides show a certificate of the
// replicas' own authority, and each speaks for itself alone.
//
// What is heard is a hint: it may be late, doubled, out of order or missing, and this package
// promises nothing about it except who said it. Whoever takes it orders it by resourceVersion and
// holds it against the truth, which is the watch. No payload carries a secret.
//
// Telling is off the caller's path: Push puts a route into one bounded queue per member and
// returns. A queue holds the newest version of each sandbox's route, and when it is full it loses
// the oldest. Each member has a goroutine and a connection of its own, so that one that does not
// answer costs the others nothing.
//
// A batch names the life of the process that sends it and that of the process it is for, and has
// a number that only grows between the two. It can be taken once, by one process, without trust in
// any clock: what was heard before a restart of either side is refused, and so is a second copy.
//
// The package decides nothing about routes, it does not keep them, and it does not send a new
// member those from before its time: its own watch does that.
package peers
