package sandboxes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

var (
	// errInTransition reports a sandbox between two states, for which a caller can wait.
	errInTransition = errors.New("the sandbox is changing its state")
	// errTransitionFailed reports a transition that cannot succeed and is to be reverted.
	errTransitionFailed = errors.New("the sandbox could not be moved")
)

// Pause pauses a running sandbox until a resume. Its route is closed first. keepMemory nil keeps what the
// sandbox's spec selects; false keeps files, or a Pod's volumes. A paused or pausing sandbox is an errs.ErrConflict; a pause with the
// memory beyond the quota of stored bytes an errs.ErrExhausted, of a Pod an errs.ErrInvalid. If the pause fails, the sandbox continues,
// and the error has the reason.
func (st *Store) Pause(ctx context.Context, namespace, id string, keepMemory *bool) error {
	return st.pause(ctx, namespace, id, keepMemory, st.checkStored)
}

// PauseIdle is Pause by an idle policy. No quota refuses it, for the sandbox would then run on.
func (st *Store) PauseIdle(ctx context.Context, namespace, id string) error {
	return st.pause(ctx, namespace, id, nil, func(context.Context, *agents.Sandbox) error { return nil })
}

// checkStored refuses a pause that would store memory beyond the quota.
func (st *Store) checkStored(ctx context.Context, s *agents.Sandbox) error {
	if !quota.KeepsMemory(s.Spec.Barchan) || s.Status.Barchan != nil && s.Status.Barchan.Runtime == agents.RuntimeRunc {
		return nil
	}
	err := st.Quota.CheckStored(ctx, s.Namespace)
	if errors.Is(err, errs.ErrExhausted) {
		return errs.Public(err, errs.Text(err)+", or pause without the memory")
	}
	return err
}

func (st *Store) pause(ctx context.Context, namespace, id string, keepMemory *bool, allowed func(context.Context, *agents.Sandbox) error) (err error) {
	start := time.Now()
	ctx, endSpan := telemetry.StartSpan(ctx, "pause sandbox", telemetry.OfSandbox(id))
	defer func() { endSpan(err) }()
	defer func() { st.Observe(ctx, "pause", start, err) }()
	var end *metav1.Time
	s, err := st.change(ctx, namespace, id, func(s *agents.Sandbox) (bool, error) {
		switch {
		case s.Spec.OperatingMode == agents.ModeSuspended || sandbox.PhaseOf(s) == sandbox.Paused:
			return false, apistatus.Refuse(errs.ErrConflict, "Sandbox %q is already paused", id)
		case !sandbox.Started(s):
			return false, apistatus.Refuse(errs.ErrConflict, "Sandbox %q is still starting", id)
		}
		end = s.Spec.ShutdownTime
		s.Spec.OperatingMode = agents.ModeSuspended
		s.Spec.ShutdownTime = nil
		if keepMemory != nil {
			ours(s).Suspend = st.WithoutMemory()
			if *keepMemory {
				ours(s).Suspend = agents.SuspendMemory
			}
		}
		if err := st.CheckPause(s.Spec.Barchan, "pause", "memory"); err != nil {
			return false, err
		}
		resetResumeMode(s)
		return true, allowed(ctx, s)
	})
	if err != nil {
		return err
	}
	failpoint.Reach("pause/written")
	err = st.awaitTransition(ctx, s, id, func(now *agents.Sandbox) (bool, error) {
		if message, failed := sandbox.SuspendFailure(now); failed {
			return false, errs.Public(fmt.Errorf("%w: %w", errTransitionFailed, errs.ErrUnavailable), fmt.Sprintf("Sandbox %q could not be paused and keeps running: %s", id, message))
		}
		return sandbox.PhaseOf(now) != sandbox.Pausing, nil
	})
	if errors.Is(err, errTransitionFailed) {
		st.revertSpec(ctx, s, agents.ModeRunning, end)
	}
	if err != nil {
		return err
	}
	if now, err := st.find(ctx, namespace, id); err == nil {
		st.Quota.Observe(s, now)
	}
	return nil
}

// ours returns the Barchan part of a spec, for changes.
func ours(s *agents.Sandbox) *agents.BarchanSpec {
	s.Spec.Barchan = cmp.Or(s.Spec.Barchan, &agents.BarchanSpec{})
	return s.Spec.Barchan
}

// resetResumeMode has the next resume use the memory again.
func resetResumeMode(s *agents.Sandbox) (changed bool) {
	if s.Spec.Barchan == nil || s.Spec.Barchan.Resume != agents.ResumeFiles {
		return false
	}
	s.Spec.Barchan.Resume = agents.ResumeMemory
	return true
}

// Connect resumes a paused sandbox with a new timeout, and extends the life of a running one. keepMemory false
// discards a paused one's memory and restarts it from its files; nil uses what was kept. A sandbox that cannot be
// resumed is an errs.ErrConflict with the reason, and stays paused.
func (st *Store) Connect(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (_ Sandbox, resumed bool, err error) {
	ctx, end := telemetry.StartSpan(ctx, "connect sandbox", telemetry.OfSandbox(id))
	defer func() { end(err) }()
	if timeout > 0 { // without a timeout it extends nothing, and resumes nothing
		if err := st.CheckTimeout(timeout); err != nil {
			return Sandbox{}, false, err
		}
	}
	start := time.Now()
	var s *agents.Sandbox
	for range maxTries { // each waits for a steady state, and writes if the state is still the same
		if s, err = st.find(ctx, namespace, id); err != nil {
			return Sandbox{}, false, err
		}
		err = st.awaitTransition(ctx, s, id, func(now *agents.Sandbox) (bool, error) {
			p := sandbox.PhaseOf(now)
			return p == sandbox.Running || p == sandbox.Paused, nil
		})
		if err != nil {
			return Sandbox{}, false, err
		}
		s, resumed, err = st.writeResume(ctx, namespace, id, timeout, keepMemory)
		if !errors.Is(err, errInTransition) {
			break
		}
	}
	if errors.Is(err, errInTransition) {
		err = errs.Public(errs.ErrConflict, fmt.Sprintf("Sandbox %q keeps changing its state; try again", id))
	}
	if err == nil && resumed {
		failpoint.Reach("connect/written")
		s, err = st.awaitResume(ctx, s, id)
		st.Observe(ctx, "resume", start, err)
	}
	if err != nil {
		return Sandbox{}, false, err
	}
	return st.View(s), resumed, nil
}

// Resume resumes a paused sandbox. A running one is an errs.ErrConflict.
func (st *Store) Resume(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (Sandbox, error) {
	s, err := st.FindLive(ctx, namespace, id)
	if err != nil {
		return Sandbox{}, err
	}
	if s.Spec.OperatingMode != agents.ModeSuspended && sandbox.PhaseOf(s) != sandbox.Paused {
		return Sandbox{}, apistatus.Refuse(errs.ErrConflict, "Sandbox %q is already running", id)
	}
	v, _, err := st.Connect(ctx, namespace, id, timeout, keepMemory)
	return v, err
}

// Wake resumes a sandbox for a request that has arrived for it, if its owner allows that; else the error is an
// errs.ErrForbidden. The caller has checked the request's tokens. A running sandbox is left unchanged.
func (st *Store) Wake(ctx context.Context, id sandbox.ID) (err error) {
	ctx, end := telemetry.StartSpan(ctx, "wake sandbox", telemetry.OfSandbox(string(id)))
	defer func() { end(err) }()
	s, err := st.owned(ctx, id)
	if err == nil {
		s, err = st.live(ctx, s)
	}
	if errors.Is(err, errs.ErrNotFound) {
		return NotFound(string(id))
	}
	if err != nil {
		return err
	}
	if sandbox.PhaseOf(s) == sandbox.Running {
		return nil
	}
	b := s.Spec.Barchan
	if s.Spec.OperatingMode == agents.ModeSuspended && (b == nil || b.Wake == nil || !b.Wake.OnTraffic || b.Suspend == agents.SuspendFiles) {
		return apistatus.Refuse(errs.ErrForbidden, "Sandbox %q is paused, and traffic does not wake it", id)
	}
	var timeout time.Duration
	if b != nil && b.Wake != nil {
		timeout = time.Duration(b.Wake.TimeoutSeconds) * time.Second
	}
	_, _, err = st.Connect(ctx, s.Namespace, string(id), st.WakeTimeout(timeout), nil)
	return err
}

// writeResume writes the change of a connect, within the quota.
func (st *Store) writeResume(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (s *agents.Sandbox, resumed bool, err error) {
	var hold *quota.Reservation
	s, err = st.change(ctx, namespace, id, func(s *agents.Sandbox) (changed bool, err error) {
		if sandbox.PhaseOf(s) == sandbox.Paused && hold == nil {
			if err := st.Gate.Err(); err != nil && !resumesFromRAM(s, keepMemory) {
				return false, err
			}
			size := st.Quota.SizeOf(&s.Spec.PodTemplate.Spec)
			if hold, err = st.Quota.Hold(ctx, quota.Request{Namespace: s.Namespace, Size: size, Paused: true}); err != nil {
				return false, err
			}
			hold.For(s.Name)
		}
		changed, resumed, err = st.connected(s, timeout, keepMemory)
		return changed, err
	})
	if err != nil || !resumed {
		hold.Release()
	}
	return s, resumed, err
}

// resumesFromRAM reports whether a paused sandbox needs no resources that the gate would refuse.
func resumesFromRAM(s *agents.Sandbox, keepMemory *bool) bool {
	if s.Status.Barchan == nil || s.Status.Barchan.Memory != agents.MemoryInRAM {
		return false
	}
	if keepMemory != nil {
		return *keepMemory
	}
	return s.Spec.Barchan == nil || s.Spec.Barchan.Resume != agents.ResumeFiles
}

// connected applies a connect to a sandbox in a steady state.
func (st *Store) connected(s *agents.Sandbox, timeout time.Duration, keepMemory *bool) (changed, resumed bool, err error) {
	phase := sandbox.PhaseOf(s)
	if phase == sandbox.Running {
		changed, err = st.extend(s, timeout)
		if errors.Is(err, errs.ErrInvalid) { // after its longest life a client can still connect
			err = nil
		}
		return changed, false, err
	}
	if phase != sandbox.Paused {
		return false, false, errInTransition
	}
	if err := st.CheckTimeout(timeout); err != nil {
		return false, false, err
	}
	if keepMemory != nil {
		ours(s).Resume = agents.ResumeMemory
		if !*keepMemory {
			ours(s).Resume = agents.ResumeFiles
		}
	}
	s.Spec.OperatingMode = agents.ModeRunning
	s.Spec.ShutdownTime = Deadline(timeout)
	metav1.SetMetaDataAnnotation(&s.ObjectMeta, pool.AnnotationResumedAt, barchan.ExactNow())
	return true, true, nil
}

// awaitResume waits until a sandbox runs. If the resume fails, it reverts the spec to paused.
func (st *Store) awaitResume(ctx context.Context, s *agents.Sandbox, id string) (*agents.Sandbox, error) {
	err := st.awaitTransition(ctx, s, id, func(now *agents.Sandbox) (bool, error) {
		if message, failed := sandbox.ResumeFailure(now); failed {
			return false, errs.Public(fmt.Errorf("%w: %w", errTransitionFailed, errs.ErrConflict), fmt.Sprintf("Sandbox %q cannot be resumed, and stays paused: %s", id, message))
		}
		if now.Spec.OperatingMode == agents.ModeSuspended && now.Generation >= s.Generation {
			return false, apistatus.Refuse(errs.ErrConflict, "Sandbox %q was paused again before it ran; try again", id)
		}
		return sandbox.PhaseOf(now) == sandbox.Running, nil
	})
	if errors.Is(err, errTransitionFailed) {
		st.revertSpec(ctx, s, agents.ModeSuspended, nil)
	}
	if err != nil {
		return nil, err
	}
	now, err := st.find(ctx, s.Namespace, id)
	if err != nil {
		return nil, err
	}
	if now.Spec.Barchan != nil && now.Spec.Barchan.Resume == agents.ResumeFiles {
		return st.Change(ctx, now, func(s *agents.Sandbox) (bool, error) { return resetResumeMode(s), nil })
	}
	st.Routes.Apply(now)
	return now, nil
}

// revertSpec reverts a failed transition, unless the mode has changed since. Until then the controller keeps
// trying; a sandbox with mode Running and an end would be ended while it is paused.
func (st *Store) revertSpec(ctx context.Context, s *agents.Sandbox, mode agents.OperatingMode, end *metav1.Time) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), UndoTimeout)
	defer cancel()
	failed := s.Spec.OperatingMode
	_, err := st.Change(ctx, s, func(now *agents.Sandbox) (bool, error) {
		if now.Spec.OperatingMode != failed {
			return false, nil
		}
		now.Spec.OperatingMode, now.Spec.ShutdownTime = mode, end
		resetResumeMode(now)
		return true, nil
	})
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		st.Log.WarnContext(ctx, "cannot revert failed transition", telemetry.Sandbox, sandbox.IDOf(s.UID),
			telemetry.Namespace, s.Namespace, telemetry.Name, s.Name, telemetry.Error, err)
	}
}

// awaitTransition waits for a state. After MoveTimeout the error is an errs.ErrConflict: the requested and the
// present state contradict each other.
func (st *Store) awaitTransition(ctx context.Context, s *agents.Sandbox, id string, arrived func(*agents.Sandbox) (bool, error)) error {
	phase := sandbox.PhaseOf(s)
	return st.await(ctx, s, id, st.MoveTimeout, func(now *agents.Sandbox) (bool, error) {
		phase = sandbox.PhaseOf(now)
		return arrived(now)
	}, func() error {
		return apistatus.Refuse(errs.ErrConflict, "Sandbox %q is still %s after %s; try again", id, phase, st.MoveTimeout)
	})
}
