// Package warmup has a template's warm-up run once and not in every sandbox. For each revision of a
// template with a warm-up, and each namespace with a pool of it that wants members, it makes a seed: a
// sandbox that nobody gets, in which the node runs the warm-up. When that is ready, a checkpoint is
// taken of it, and the seed goes. Members and cold starts are restored from the checkpoint
// ([pool.WarmCheckpoint]); this package makes none of them.
//
// Seed and checkpoint have one name, made of the template's and the revision, so that there are never
// two of a revision, whatever a crash or a lagging cache leads to.
//
// A warm-up that fails is tried again after a pause that doubles; until then the seed stays to be looked
// at. A checkpoint that members cannot be started from is given up, and made anew. What is of an older
// revision, or of a template that has no pools or no warm-up any more, is deleted; a checkpoint goes
// when the members that were made from it have started.
package warmup
