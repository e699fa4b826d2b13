// Package sleep measures sandboxes whose memory is kept: how soon a paused one is on disk and back, beside dd of the same bytes; how
// soon a request wakes one; for how long a snapshot stops one; how soon many forks of one run; and what the server holds for those
// that sleep.
package sleep
