// Package warmpool keeps warm pools as large and as new as they want to be. It never hands a
// member out: claims take them by themselves, with one conditional write each, and the pool
// sees that in the cache and makes another.
//
// A pass reads the pool and its template from the API server and the members from the cache,
// lays over those what this process has done and the cache has not seen yet (ledger), decides
// without doing (plan), does it, and writes status if it differs.
//
// # How many
//
// Wanted are spec.replicas, or with autoscale so many that the spare members are the wanted
// share of spare and claimed ones together; at least one until idleSeconds after the last
// claim, warm or cold; minReplicas from then on. The size stays between min and max always.
//
// # Terminating members count
//
// A member that is being deleted still weighs on its machine. So none is made while as many
// exist as are wanted, plus maxSurge under Recreate, those being deleted among them. One whose
// deletion takes longer than Config.GoneAfter is not counted any more, lest it block the pool
// for ever; but never more of them than are wanted: at the very worst twice the pool exists.
//
// # Who goes first
//
// What has failed, then members of an older revision, then unready ones, then the newest.
// Every deletion is conditional on the version that was decided upon, so that what was claimed
// meanwhile lives.
//
// # A changed template
//
// Recreate deletes stale members: unready ones at once, ready ones as long as maxUnavailable
// allows, which by default is at once too. OnReplenish leaves them, and makes current ones in
// the places that become free: as ever when the pool grows, when a member is taken or lost, and
// besides one for each living sandbox of the current revision that was claimed through the
// pool, up to the wanted number, for which stale members make room. As claims never get a stale
// one, the first of them starts cold, and is what brings the first current member. A pool that
// nobody uses is left alone, and so is useful again when the template is changed back.
//
// # Members that fail
//
// What ended, and what is not ready after Config.StuckAfter, is replaced: after a second at
// first, then after twice as long each time, up to five minutes; and by one at a time, until one
// is ready. It stays to be looked at until then. What waits for room on a node is not replaced, nor
// what is not allowed to start from its checkpoint, since its successor would not be either: the
// pool's condition tells of it. The latter goes when the template says something else.
//
// # Without a template
//
// A pool whose template is missing, private to another namespace or unfit says so, and keeps
// its members, which nobody gets, unless it wants fewer.
package warmpool
