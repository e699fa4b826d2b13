//go:build !failpoints

package failpoint

// Enabled says whether the program was built with points.
const Enabled = false

// Reach marks that a point is reached.
func Reach(string) {}

// ReachIn is Reach of a point whose name is made of two parts.
func ReachIn(string, string) {}

// Err marks that a point is reached whose caller can fail. It returns nil.
func Err(string) error { return nil }
