package quota_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// TestRateOfCreates has a namespace make its burst at once, then no more than its rate, and not slow another down.
func TestRateOfCreates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := newQuotas(t, quota.Limits{Creates: quota.AtMost(10)}, nil)
		hold := func(namespace string, paused bool) error {
			_, err := q.Hold(t.Context(), quota.Request{Namespace: namespace, Paused: paused})
			return err
		}
		for i := range 10 * quota.Burst {
			if err := hold("a", false); err != nil {
				t.Fatalf("create %d: %v", i, err)
			}
		}
		if err := hold("a", false); !errors.Is(err, errs.ErrExhausted) || !strings.Contains(errs.Text(err), "at most 10 new sandboxes a second") {
			t.Errorf("beyond the burst: %v", err)
		}
		if err := hold("b", false); err != nil {
			t.Errorf("another namespace: %v", err)
		}
		if err := hold("a", true); err != nil {
			t.Errorf("a resume: %v", err)
		}
		start := time.Now()
		for range 20 {
			if _, err := q.Await(t.Context(), quota.Request{Namespace: "a"}, time.Minute); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(start); took < 1900*time.Millisecond || took > 3*time.Second {
			t.Errorf("20 creates that wait took %s, want 2 s", took)
		}
	})
}

func TestUnreadableRate(t *testing.T) {
	q, _ := newQuotas(t, quota.Limits{}, map[string]string{quota.AnnotationCreates: "x"})
	if _, err := q.Hold(t.Context(), quota.Request{Namespace: "a"}); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("with a rate that cannot be read: %v", err)
	}
}
