package timing

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// TestSteps: steps are in the order of their beginnings, and those that failed or took no time are left out.
func TestSteps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := New()
		w.Began(time.Now().Add(-2 * time.Millisecond))
		takes := func(d time.Duration, err error) func() error {
			return func() error {
				time.Sleep(d)
				return err
			}
		}
		outer := time.Now()
		if err := w.Timed("inner", takes(5*time.Millisecond, nil)); err != nil {
			t.Error(err)
		}
		failure := errors.New("failed")
		if err := w.Timed("failed", takes(3*time.Millisecond, failure)); !errors.Is(err, failure) {
			t.Errorf("a failed step returns %v", err)
		}
		if err := w.Timed("quick", takes(499*time.Microsecond, nil)); err != nil {
			t.Error(err)
		}
		if err := w.Timed("last", takes(1500*time.Microsecond, nil)); err != nil {
			t.Error(err)
		}
		w.Record("earlier than the operation", outer.Add(-time.Hour))
		w.Record("outer", outer)
		got := w.Status(agents.OperationCreate)
		want := "[{earlier than the operation 0 3600010} {inner 2 5} {outer 2 10} {last 10 2}]"
		if fmt.Sprint(got.Steps) != want || got.Milliseconds != 12 || got.Operation != agents.OperationCreate {
			t.Errorf("%s took %d ms: %v, want 12 ms: %s", got.Operation, got.Milliseconds, got.Steps, want)
		}
	})
}

func TestStepsIsBounded(t *testing.T) {
	w := New()
	for range agents.MaxOperationSteps + 5 {
		w.Record("step", time.Now().Add(-time.Second))
	}
	if got := len(w.Status(agents.OperationCreate).Steps); got != agents.MaxOperationSteps {
		t.Errorf("%d steps, want %d", got, agents.MaxOperationSteps)
	}
	(*Steps)(nil).Record("of a container besides the first", time.Now().Add(-time.Second)) // does not panic
}
