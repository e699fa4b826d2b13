// Package boot starts a server in named phases, in a declared order. Each phase states what it needs and what it provides;
// [Check] refuses an order in which a need is not met by an earlier phase.
//
// It contains no phase itself, does not retry, and does not stop services: the caller owns the [lifecycle.Stack].
//
// Locks: Progress.mu only; no call is made while it is held.
package boot
