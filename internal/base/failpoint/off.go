//go:build !failpoints

package failpoint

// Enabled reports whether the program was built with failpoints.
const Enabled = false

// Reach marks a point.
func Reach(string) {}

// ReachIn is Reach for a name of two parts.
func ReachIn(string, string) {}

// Err marks a point whose caller can fail. It returns nil.
func Err(string) error { return nil }
