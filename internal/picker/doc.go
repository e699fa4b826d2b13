// Package picker hands out the ready members of warm pools, each to one claim. It knows
// members from events alone, keeps no object alive, and starts nothing cold: who gets
// [ErrNone] does that.
package picker
