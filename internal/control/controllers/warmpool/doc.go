// Package warmpool keeps warm pools at their desired size and revision. It claims no member: a claim takes one with a
// conditional write, and the pool then creates another.
//
// A pass reads the pool and its template from the API server and the members from the cache, applies this process's
// writes that the cache lacks (expectations), decides without acting (plan), acts, and writes a changed status.
//
// # How many
//
// The desired size is spec.replicas. With autoscale, the spare members are the specified share of spare and claimed ones
// together: at least one until idleSeconds after the last claim, warm or cold; minReplicas from then on. The size
// always stays between min and max.
//
// # Terminating members count
//
// A member under deletion still uses its machine. So none is created while the desired number exists, plus maxSurge under
// Recreate, those under deletion included. A deletion that takes longer than Config.GoneAfter no longer counts, so that it
// cannot block the pool; but at most the desired number of them: in the worst case the pool exists twice.
//
// # Refills wait for claims
//
// While claims arrive and at least half of the desired members are ready, a pass creates none: not before a pause of 100 ms, or
// after two seconds of delay. Refill and claims write to the same API server, and clients wait for claims.
//
// # Order of deletion
//
// Failed members, then members of an older revision, then unready ones, then the newest. Every deletion is conditional on
// the version of the decision, so that a member claimed meanwhile stays.
//
// # A changed template
//
// Recreate deletes stale members: unready ones at once, ready ones within maxUnavailable, by default at once too.
// OnReplenish keeps them and creates current ones in free places: when the pool grows, and when a member is claimed or
// lost. It also replaces one stale member for each running sandbox of the current revision that was claimed through the
// pool, up to the desired number. Claims never get a stale member, so the first one starts cold and causes the first
// current member. An unused pool stays unchanged, and is useful again when the template is changed back.
//
// # Members that fail
//
// A member that ended, or is not ready after Config.StuckAfter, is replaced: after a second at first, then after twice as
// long each time, up to five minutes; one at a time, until one is ready. Until then it stays for inspection. A member that
// waits for room on a node is not replaced, nor one that may not start from its checkpoint, because its successor could
// not either: the pool's condition has the reason. The latter is deleted when the template changes.
//
// # Without a template
//
// A pool whose template is missing, private to another namespace or unfit has a condition with the reason, and keeps its
// members, which no claim gets, unless its desired size shrinks.
//
// Only expectations has a mutex; it is never held over a call.
package warmpool
