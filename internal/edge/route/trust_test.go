package route

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// TestTrust: a table that is no longer trusted finds nothing and reports that it is not
// synced; writers continue, and everything is there when it is trusted again.
func TestTrust(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := NewTable()
		x.Apply(object("a", "u", 1))
		x.MarkSynced()
		knows := func() bool {
			_, byID := look(x, sandbox.IDOf("u"))
			_, byName := x.LookupName("ns", "a")
			if byID != byName || byID != x.Synced() {
				t.Errorf("by ID %v, by name %v, synced %v", byID, byName, x.Synced())
			}
			return byID
		}
		if !knows() {
			t.Error("an unused table is not trusted")
		}
		x.TrustUntil(time.Now().Add(time.Minute))
		time.Sleep(time.Minute - 1)
		if !knows() {
			t.Error("not trusted before its time is over")
		}
		time.Sleep(time.Nanosecond)
		if knows() {
			t.Error("trusted after its time")
		}
		x.Apply(object("b", "v", 2))
		x.Progress("2")
		x.TrustUntil(time.Now().Add(time.Minute))
		if _, ok := look(x, sandbox.IDOf("v")); !ok || !knows() {
			t.Error("what was written meanwhile is lost")
		}
		x.TrustUntil(time.Time{})
		time.Sleep(time.Hour)
		if !knows() {
			t.Error("the zero time is not permanent")
		}
	})
}
