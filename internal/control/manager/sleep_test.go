package manager

import (
	"errors"
	"sync"
	"testing"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

func TestResumeFromFiles(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	ctx, id := t.Context(), string(v.ID)
	if err := f.Sandboxes.Pause(ctx, team, id, nil); err != nil {
		t.Fatal(err)
	}
	writes := f.objects.writes.Load()
	if _, resumed, err := f.Sandboxes.Connect(ctx, team, id, time.Minute, new(false)); err != nil || !resumed {
		t.Fatalf("Connect = %v, %v", resumed, err)
	}
	if n := f.objects.writes.Load() - writes; n != 2 {
		t.Errorf("%d writes, want 2: the wish, and that it is spent", n)
	}
	if b := f.object(t, v).Spec.Barchan; b.Resume != agents.ResumeMemory {
		t.Errorf("the next resume would be from %q too", b.Resume)
	}
	if got, err := f.Sandboxes.Get(ctx, team, id); err != nil || got.AgentToken != v.AgentToken {
		t.Errorf("Get = %+v, %v", got, err)
	}
}

func TestPauseForgetsHowItWasResumed(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	f.edit(t, v, func(s *agents.Sandbox) { s.Spec.Barchan.Resume = agents.ResumeFiles })
	if err := f.Sandboxes.Pause(t.Context(), team, string(v.ID), nil); err != nil {
		t.Fatal(err)
	}
	if b := f.object(t, v).Spec.Barchan; b.Resume != agents.ResumeMemory {
		t.Errorf("it would be resumed from %q", b.Resume)
	}
}

// TestFailedPause: the reason is returned at once, and the sandbox keeps running with its end.
func TestFailedPause(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, f.imaged(t, fakecluster.ImageRestless))
	wantKind(t, f.Sandboxes.Pause(t.Context(), team, string(v.ID), nil), errs.ErrUnavailable, "could not be paused and keeps running: the disk is full")
	if got, err := f.Sandboxes.Get(t.Context(), team, string(v.ID)); err != nil || got.State != sandboxes.StateRunning || !got.EndAt.Equal(v.EndAt) {
		t.Errorf("Get = %+v, %v", got, err)
	}
	f.wantReachable(t, v.ID, true)
}

// TestFailedResume: the reason is returned at once, the sandbox stays paused without an end, and its files
// can still be had.
func TestFailedResume(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, f.imaged(t, fakecluster.ImageStuck))
	ctx, id := t.Context(), string(v.ID)
	if err := f.Sandboxes.Pause(ctx, team, id, nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, _, err := f.Sandboxes.Connect(ctx, team, id, time.Minute, nil)
		wantKind(t, err, errs.ErrConflict, "cannot be resumed, and stays paused: the memory is damaged")
		s := f.object(t, v)
		if s.Spec.OperatingMode != agents.ModeSuspended || s.Spec.ShutdownTime != nil {
			t.Errorf("wanted %s until %v", s.Spec.OperatingMode, s.Spec.ShutdownTime)
		}
		f.wantReachable(t, v.ID, false)
	}
	_, err := f.Sandboxes.Resume(ctx, team, id, time.Minute, nil)
	wantKind(t, err, errs.ErrConflict, "the memory is damaged")
	if got, err := f.Sandboxes.Get(ctx, team, id); err != nil || got.State != sandboxes.StatePaused {
		t.Errorf("Get = %v, %v", got.State, err)
	}
	if use, _ := f.quotas.Used(team); use.Sandboxes != 0 {
		t.Errorf("%d count as running", use.Sandboxes)
	}
	if _, resumed, err := f.Sandboxes.Connect(ctx, team, id, time.Minute, new(false)); err != nil || !resumed {
		t.Errorf("from its files: %v, %v", resumed, err)
	}
}

func TestFailedResumesAtOnce(t *testing.T) {
	f := newFixture(t)
	req := f.imaged(t, fakecluster.ImageStuck)
	req.AutoResume = true
	v := f.mustCreate(t, req)
	if err := f.Sandboxes.Pause(t.Context(), team, string(v.ID), nil); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := f.Sandboxes.Wake(t.Context(), v.ID); !errors.Is(err, errs.ErrConflict) {
				t.Errorf("Wake = %v", err)
			}
		})
	}
	wg.Wait()
	await(t, func() bool {
		s := f.object(t, v)
		return s.Spec.OperatingMode == agents.ModeSuspended && sandbox.PhaseOf(s) == sandbox.Paused
	})
}
