package cache

import (
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/watch"
)

// TestContinuity: a watch that goes on at once where the last one ended is unbroken; what follows a gap or a list has to catch up.
func TestContinuity(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &continuity{}
		check := func(when string, want bool) {
			t.Helper()
			if got := c.broken(); got != want {
				t.Errorf("%s: broken is %v", when, got)
			}
		}
		check("before the first watch", true)
		w := c.follow(watch.NewFake(), true)
		check("during the first list", true)
		time.Sleep(catchUp)
		check("later", false)
		w.Stop()
		w.Stop()
		check("without a watch", true)
		w = c.follow(watch.NewFake(), false)
		check("continued at once", false)
		w.Stop()
		time.Sleep(shortGap)
		w = c.follow(watch.NewFake(), false)
		check("after a gap", true)
		time.Sleep(catchUp)
		check("later", false)
		w.Stop()
		c.follow(watch.NewFake(), true)
		check("after a list", true)
	})
}
