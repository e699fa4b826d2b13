package controllers

import "time"

const (
	// ClaimPause is how long no claim has come when work begins that claims should not compete with.
	ClaimPause = 100 * time.Millisecond
	// MaxClaimDelay bounds the delay of such work.
	MaxClaimDelay = 2 * time.Second
)

// ClaimDelay returns how long work that was due at a time still waits for a pause between claims; zero or less: it does not.
// lastClaim returns the time of the last claim, zero without any; nil delays nothing. Nor does a time in the future, of a clock
// that is ahead.
func ClaimDelay(lastClaim func() time.Time, due time.Time) time.Duration {
	late := time.Since(due)
	if lastClaim == nil || late >= MaxClaimDelay || late < 0 {
		return 0
	}
	ago := time.Since(lastClaim())
	if ago < 0 {
		return 0
	}
	return min(ClaimPause-ago, MaxClaimDelay-late)
}
