// Package warmup runs a template's warm-up once instead of in every sandbox. For each revision of a
// template with a warm-up, and each namespace with a pool of it that needs members, it creates a seed: a sandbox
// that no claim gets, in which the node runs the warm-up. When the seed is ready, the controller creates
// a checkpoint of it and deletes the seed. Members and cold starts are restored from the checkpoint
// ([pool.WarmCheckpoint]); this package creates neither.
//
// Seed and checkpoint share a name derived from template and revision. So a revision never has two of
// them, even after a crash or with a stale cache.
//
// A failed warm-up is retried with exponential backoff; until then the seed stays for inspection. A
// checkpoint from which members cannot start is replaced. Seeds and checkpoints of older revisions, or of
// templates without pools or warm-up, are deleted; a checkpoint only after the members created from it
// have started.
package warmup
