package manager

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// errInTransition says that a sandbox is between two states, and that waiting helps.
var errInTransition = errors.New("the sandbox is changing its state")

// Pause puts a running sandbox to sleep for as long as nobody resumes it. Its route is closed
// before anything else happens. keepMemory nil leaves to the sandbox what it keeps.
// One that is paused, or on its way there, is an errs.ErrConflict. One that cannot be put to sleep
// runs on, and the error says why.
func (m *Manager) Pause(ctx context.Context, namespace, id string, keepMemory *bool) (err error) {
	start := time.Now()
	defer func() { m.observe(opPause, start, err) }()
	var end *metav1.Time
	s, err := m.change(ctx, namespace, id, func(s *agents.Sandbox) (bool, error) {
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
			ours(s).Suspend = agents.SuspendFiles
			if *keepMemory {
				ours(s).Suspend = agents.SuspendMemory
			}
		}
		resetResumeMode(s)
		return true, nil
	})
	if err != nil {
		return err
	}
	failpoint.Reach("pause/written")
	if err := m.awaitSleep(ctx, s, id, end); err != nil {
		return err
	}
	if now, err := m.find(ctx, namespace, id); err == nil {
		m.vacated(s, now)
	}
	return nil
}

// ours is what Barchan adds to a sandbox, to be changed.
func ours(s *agents.Sandbox) *agents.BarchanSpec {
	if s.Spec.Barchan == nil {
		s.Spec.Barchan = &agents.BarchanSpec{}
	}
	return s.Spec.Barchan
}

// resetResumeMode forgets that the memory was to be given up once: the next sleep has another.
func resetResumeMode(s *agents.Sandbox) (changed bool) {
	if s.Spec.Barchan == nil || s.Spec.Barchan.Resume != agents.ResumeFiles {
		return false
	}
	s.Spec.Barchan.Resume = agents.ResumeMemory
	return true
}

// Connect makes sure that a sandbox runs: it resumes a paused one with a new timeout, and
// extends the life of a running one if it would end before. resumed tells which. keepMemory false
// gives up the memory of a paused one for good, and starts it anew from its files; nil goes on with
// what there is. One that cannot be resumed is an errs.ErrConflict that says why, and stays paused.
func (m *Manager) Connect(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (_ Sandbox, resumed bool, err error) {
	if timeout > 0 { // less extends nothing, and resumes nothing
		if err := m.checkTimeout(timeout); err != nil {
			return Sandbox{}, false, err
		}
	}
	s, resumed, err := m.connect(ctx, namespace, id, timeout, keepMemory)
	if err != nil {
		return Sandbox{}, false, err
	}
	return m.view(s), resumed, nil
}

// Resume wakes a paused sandbox. One that runs is an errs.ErrConflict.
func (m *Manager) Resume(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (Sandbox, error) {
	s, err := m.findLive(ctx, namespace, id)
	if err != nil {
		return Sandbox{}, err
	}
	if s.Spec.OperatingMode != agents.ModeSuspended && sandbox.PhaseOf(s) != sandbox.Paused {
		return Sandbox{}, apistatus.Refuse(errs.ErrConflict, "Sandbox %q is already running", id)
	}
	v, _, err := m.Connect(ctx, namespace, id, timeout, keepMemory)
	return v, err
}

// Wake resumes a sandbox because a request has arrived for it, if it is one that traffic may
// wake; else the error is an errs.ErrForbidden. The caller has checked the request's tokens.
// One that runs is left as it is.
func (m *Manager) Wake(ctx context.Context, id sandbox.ID) error {
	s, err := m.owned(ctx, id)
	if err == nil {
		s, err = m.live(ctx, s)
	}
	if errors.Is(err, errs.ErrNotFound) {
		return noSandbox(string(id))
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
	_, _, err = m.connect(ctx, s.Namespace, string(id), m.wakeTimeout(timeout), nil)
	return err
}

// wakeTimeout is how long a woken sandbox lives.
func (m *Manager) wakeTimeout(asked time.Duration) time.Duration {
	return min(max(asked, MinWakeTimeout), m.cfg.MaxTimeout)
}

// connect brings a sandbox to run. Each round waits for a steady state and acts on it, if it is
// still the same when the write is made.
func (m *Manager) connect(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (s *agents.Sandbox, resumed bool, err error) {
	start := time.Now()
	for range maxTries {
		if s, err = m.find(ctx, namespace, id); err != nil {
			return nil, false, err
		}
		if err = m.awaitTransition(ctx, s, id, phase(steady)); err != nil {
			return nil, false, err
		}
		s, resumed, err = m.writeResume(ctx, namespace, id, timeout, keepMemory)
		if !errors.Is(err, errInTransition) {
			break
		}
	}
	if errors.Is(err, errInTransition) {
		return nil, false, errs.Public(errs.ErrConflict, fmt.Sprintf("Sandbox %q keeps changing its state; try again", id))
	}
	if err != nil || !resumed {
		return s, false, err
	}
	failpoint.Reach("connect/written")
	s, err = m.awaitResume(ctx, s, id)
	m.observe(opResume, start, err)
	return s, true, err
}

// writeResume writes what connecting means, within the quota.
func (m *Manager) writeResume(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (s *agents.Sandbox, resumed bool, err error) {
	var hold *quota.Reservation
	s, err = m.change(ctx, namespace, id, func(s *agents.Sandbox) (changed bool, err error) {
		if sandbox.PhaseOf(s) == sandbox.Paused && hold == nil {
			if err := m.cfg.Gate.Err(); err != nil && !resumesFromRAM(s, keepMemory) {
				return false, err
			}
			if hold, err = m.reserve(ctx, s.Namespace, &s.Spec.PodTemplate.Spec); err != nil {
				return false, err
			}
			hold.For(s.Name)
		}
		changed, resumed, err = m.connected(s, timeout, keepMemory)
		return changed, err
	})
	if err != nil || !resumed {
		hold.Release()
	}
	return s, resumed, err
}

// resumesFromRAM reports whether a sandbox that sleeps goes on with what it holds of the machine already:
// nothing new, which the gate would refuse.
func resumesFromRAM(s *agents.Sandbox, keepMemory *bool) bool {
	if s.Status.Barchan == nil || s.Status.Barchan.Memory != agents.MemoryInRAM {
		return false
	}
	if keepMemory != nil {
		return *keepMemory
	}
	return s.Spec.Barchan == nil || s.Spec.Barchan.Resume != agents.ResumeFiles
}

// connected is what connecting means for a sandbox in a steady state.
func (m *Manager) connected(s *agents.Sandbox, timeout time.Duration, keepMemory *bool) (changed, resumed bool, err error) {
	phase := sandbox.PhaseOf(s)
	if phase == sandbox.Running {
		changed, err = m.extend(s, timeout)
		if errors.Is(err, errs.ErrInvalid) { // at its longest life already: it can be connected to until then
			err = nil
		}
		return changed, false, err
	}
	if phase != sandbox.Paused {
		return false, false, errInTransition
	}
	if err := m.checkTimeout(timeout); err != nil {
		return false, false, err
	}
	if keepMemory != nil {
		ours(s).Resume = agents.ResumeMemory
		if !*keepMemory {
			ours(s).Resume = agents.ResumeFiles
		}
	}
	s.Spec.OperatingMode = agents.ModeRunning
	s.Spec.ShutdownTime = deadline(timeout)
	metav1.SetMetaDataAnnotation(&s.ObjectMeta, pool.AnnotationResumedAt, exactly())
	return true, true, nil
}

func steady(p sandbox.Phase) bool { return p == sandbox.Running || p == sandbox.Paused }

// awaitSleep waits until a sandbox sleeps. If it cannot, it gets back the end that it had.
func (m *Manager) awaitSleep(ctx context.Context, s *agents.Sandbox, id string, end *metav1.Time) error {
	err := m.awaitTransition(ctx, s, id, func(now *agents.Sandbox) (bool, error) {
		if message, failed := sandbox.SuspendFailure(now); failed {
			return false, errs.Public(fmt.Errorf("%w: %w", errTransitionFailed, errs.ErrUnavailable), fmt.Sprintf("Sandbox %q could not be paused, and runs on: %s", id, message))
		}
		return sandbox.PhaseOf(now) != sandbox.Pausing, nil
	})
	if errors.Is(err, errTransitionFailed) {
		m.revertSpec(ctx, s, agents.ModeRunning, end)
	}
	return err
}

// awaitResume waits until a sandbox runs. If it cannot be woken, it sleeps on as if nobody had asked.
func (m *Manager) awaitResume(ctx context.Context, s *agents.Sandbox, id string) (*agents.Sandbox, error) {
	err := m.awaitTransition(ctx, s, id, func(now *agents.Sandbox) (bool, error) {
		if message, failed := sandbox.ResumeFailure(now); failed {
			return false, errs.Public(fmt.Errorf("%w: %w", errTransitionFailed, errs.ErrConflict), fmt.Sprintf("Sandbox %q cannot be resumed, and stays paused: %s", id, message))
		}
		if now.Spec.OperatingMode == agents.ModeSuspended && now.Generation >= s.Generation {
			return false, apistatus.Refuse(errs.ErrConflict, "Sandbox %q was paused again before it ran; try again", id)
		}
		return sandbox.PhaseOf(now) == sandbox.Running, nil
	})
	if errors.Is(err, errTransitionFailed) {
		m.revertSpec(ctx, s, agents.ModeSuspended, nil)
	}
	if err != nil {
		return nil, err
	}
	now, err := m.find(ctx, s.Namespace, id)
	if err != nil {
		return nil, err
	}
	if now.Spec.Barchan != nil && now.Spec.Barchan.Resume == agents.ResumeFiles {
		return m.changeObject(ctx, now, func(s *agents.Sandbox) (bool, error) { return resetResumeMode(s), nil })
	}
	m.cfg.Routes.Apply(now)
	return now, nil
}

// errTransitionFailed says that what was wished cannot be done, and that the wish should be taken back.
var errTransitionFailed = errors.New("the sandbox could not be moved")

// revertSpec undoes a wish that could not be fulfilled, unless another has been made since. Until then its
// controller goes on trying; a sandbox that is wanted to run would come to its end asleep.
func (m *Manager) revertSpec(ctx context.Context, s *agents.Sandbox, mode agents.OperatingMode, end *metav1.Time) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	wished := s.Spec.OperatingMode
	_, err := m.changeObject(ctx, s, func(now *agents.Sandbox) (bool, error) {
		if now.Spec.OperatingMode != wished {
			return false, nil
		}
		now.Spec.OperatingMode, now.Spec.ShutdownTime = mode, end
		resetResumeMode(now)
		return true, nil
	})
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		m.log.WarnContext(ctx, "wish that cannot be fulfilled could not be taken back", telemetry.Sandbox, sandbox.IDOf(s.UID),
			telemetry.Namespace, s.Namespace, telemetry.Name, s.Name, telemetry.Error, err)
	}
}

// phase makes a condition on a sandbox's phase one on the sandbox.
func phase(arrived func(sandbox.Phase) bool) func(*agents.Sandbox) (bool, error) {
	return func(s *agents.Sandbox) (bool, error) { return arrived(sandbox.PhaseOf(s)), nil }
}

// awaitTransition waits until a sandbox is as wanted. A wait that is too long is an
// errs.ErrConflict: what the caller wants and what happens contradict each other for now.
func (m *Manager) awaitTransition(ctx context.Context, s *agents.Sandbox, id string, arrived func(*agents.Sandbox) (bool, error)) error {
	bounded, cancel := context.WithTimeout(ctx, m.cfg.MoveTimeout)
	defer cancel()
	uid, version, phase := s.UID, s.ResourceVersion, sandbox.PhaseOf(s)
	_, err := m.cache.WaitSandbox(bounded, client.ObjectKeyFromObject(s), func(now *agents.Sandbox) (bool, error) {
		if now == nil || now.UID != uid || sandbox.DeadForGood(now) {
			return false, noSandbox(id)
		}
		if behind(now, version) {
			return false, nil
		}
		phase = sandbox.PhaseOf(now)
		return arrived(now)
	})
	if errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return apistatus.Refuse(errs.ErrConflict, "Sandbox %q is still %s after %s; try again", id, phase, m.cfg.MoveTimeout)
	}
	if err != nil {
		return fmt.Errorf("wait for sandbox %s: %w", id, err)
	}
	return nil
}
