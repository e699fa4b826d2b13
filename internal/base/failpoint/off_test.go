//go:build !failpoints

package failpoint_test

import (
	"testing"

	"github.com/barchan-dev/barchan/internal/base/failpoint"
)

// TestNothingWithoutTheTag runs what users run.
func TestNothingWithoutTheTag(t *testing.T) {
	t.Setenv(failpoint.Variable, "row/live=error")
	failpoint.Reach("row/live")
	failpoint.ReachIn("row", "live")
	if err := failpoint.Err("row/live"); err != nil || failpoint.Enabled {
		t.Errorf("Err = %v, Enabled = %v", err, failpoint.Enabled)
	}
}
