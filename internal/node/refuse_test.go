package node

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// While something is wrong with the machine nothing is begun on it, what runs is left alone and
// can be suspended and removed; and each write of the journal is reported.
func TestRefusedWork(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var wrong atomic.Pointer[error]
	var written, failed atomic.Int64
	n, stop := m.node(func(c *Config) {
		c.Refuse = func() error {
			if err := wrong.Load(); err != nil {
				return *err
			}
			return nil
		}
		c.Journalled = func(err error) {
			written.Add(1)
			if err != nil {
				failed.Add(1)
			}
		}
	})
	defer stop()
	lives, late := object(), object()
	ensure(t, n, lives)
	if written.Load() == 0 || failed.Load() != 0 {
		t.Errorf("%d writes of the journal were reported, %d failed", written.Load(), failed.Load())
	}
	refusal := fmt.Errorf("the disk is full: %w", errs.ErrUnavailable)
	wrong.Store(&refusal)
	before := written.Load()
	if _, err := n.Ensure(t.Context(), late); !errors.Is(err, errs.ErrUnavailable) || written.Load() != before {
		t.Errorf("Ensure = %v, with %d writes of the journal", err, written.Load()-before)
	}
	if seen := ensure(t, n, lives); seen.State != sandbox.ContainerRunning {
		t.Errorf("what runs is %+v", seen)
	}
	if _, err := n.Suspend(t.Context(), refOf(lives), agents.SuspendMemory); err != nil {
		t.Errorf("Suspend = %v", err)
	}
	if _, err := n.Resume(t.Context(), refOf(lives), false); err != nil { // it is still in memory
		t.Errorf("Resume = %v", err)
	}
	if err := n.Remove(t.Context(), refOf(lives)); err != nil {
		t.Errorf("Remove = %v", err)
	}
	wrong.Store(nil)
	ensure(t, n, late)
	must(t, n.db.Close()) // as if its disk had gone
	if _, err := n.Suspend(t.Context(), refOf(late), agents.SuspendMemory); err == nil || failed.Load() == 0 {
		t.Errorf("Suspend without a journal = %v; %d failures were reported", err, failed.Load())
	}
}
