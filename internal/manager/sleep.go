package manager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/errs"
	"github.com/barchan-dev/barchan/internal/pool"
	"github.com/barchan-dev/barchan/internal/quota"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

// errMoving says that a sandbox is between two states, and that waiting helps.
var errMoving = errors.New("the sandbox is changing its state")

// Pause puts a running sandbox to sleep for as long as nobody resumes it. Its route is closed
// before anything else happens. keepMemory nil leaves to the sandbox what it keeps.
// One that is paused, or on its way there, is an errs.ErrConflict.
func (m *Manager) Pause(ctx context.Context, namespace, id string, keepMemory *bool) (err error) {
	start := time.Now()
	defer func() { m.observe(opPause, start, err) }()
	s, err := m.change(ctx, namespace, id, func(s *agents.Sandbox) (bool, error) {
		switch {
		case s.Spec.OperatingMode == agents.ModeSuspended:
			return false, refuse(errs.ErrConflict, "Sandbox %q is already paused", id)
		case !sandbox.Started(s):
			return false, refuse(errs.ErrConflict, "Sandbox %q is still starting", id)
		}
		s.Spec.OperatingMode = agents.ModeSuspended
		s.Spec.ShutdownTime = nil
		if keepMemory != nil {
			if s.Spec.Barchan == nil {
				s.Spec.Barchan = &agents.BarchanSpec{}
			}
			s.Spec.Barchan.Suspend = agents.SuspendFiles
			if *keepMemory {
				s.Spec.Barchan.Suspend = agents.SuspendMemory
			}
		}
		return true, nil
	})
	if err != nil {
		return err
	}
	if err := m.awaitMove(ctx, s, id, func(p sandbox.Phase) bool { return p != sandbox.Pausing }); err != nil {
		return err
	}
	if now, err := m.find(ctx, namespace, id); err == nil {
		m.vacated(s, now)
	}
	return nil
}

// Connect makes sure that a sandbox runs: it resumes a paused one with a new timeout, and
// extends the life of a running one if it would end before. resumed tells which.
func (m *Manager) Connect(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (_ Sandbox, resumed bool, err error) {
	if err := m.checkTimeout(timeout); err != nil {
		return Sandbox{}, false, err
	}
	s, resumed, err := m.connect(ctx, namespace, id, timeout, keepMemory)
	if err != nil {
		return Sandbox{}, false, err
	}
	return m.view(s), resumed, nil
}

// Resume wakes a paused sandbox. One that runs is an errs.ErrConflict.
func (m *Manager) Resume(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (Sandbox, error) {
	s, err := m.find(ctx, namespace, id)
	if err != nil {
		return Sandbox{}, err
	}
	if s.Spec.OperatingMode != agents.ModeSuspended {
		return Sandbox{}, refuse(errs.ErrConflict, "Sandbox %q is already running", id)
	}
	v, _, err := m.Connect(ctx, namespace, id, timeout, keepMemory)
	return v, err
}

// Wake resumes a sandbox because a request has arrived for it, if it is one that traffic may
// wake; else the error is an errs.ErrForbidden. The caller has checked the request's tokens.
// One that runs is left as it is.
func (m *Manager) Wake(ctx context.Context, id sandbox.ID) error {
	m.ahead.wait(ctx, func(other sandbox.ID, _ string) bool { return id == other })
	s, err := m.cache.SandboxByID(ctx, id)
	if err != nil {
		return fmt.Errorf("look up sandbox %s: %w", id, err)
	}
	if sandbox.DeadForGood(s) || pool.MemberOf(s) != "" {
		return noSandbox(string(id))
	}
	if sandbox.PhaseOf(s) == sandbox.Running {
		return nil
	}
	b := s.Spec.Barchan
	if s.Spec.OperatingMode == agents.ModeSuspended && (b == nil || b.Wake == nil || !b.Wake.OnTraffic || b.Suspend == agents.SuspendFiles) {
		return refuse(errs.ErrForbidden, "Sandbox %q is paused, and traffic does not wake it", id)
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
		if err = m.awaitMove(ctx, s, id, steady); err != nil {
			return nil, false, err
		}
		s, resumed, err = m.arouse(ctx, namespace, id, timeout, keepMemory)
		if !errors.Is(err, errMoving) {
			break
		}
	}
	if errors.Is(err, errMoving) {
		return nil, false, errs.Public(errs.ErrConflict, fmt.Sprintf("Sandbox %q keeps changing its state; try again", id))
	}
	if err != nil || !resumed {
		return s, false, err
	}
	s, err = m.awaitResume(ctx, s, id)
	m.observe(opResume, start, err)
	return s, true, err
}

// arouse writes what connecting means, within the quota.
func (m *Manager) arouse(ctx context.Context, namespace, id string, timeout time.Duration, keepMemory *bool) (s *agents.Sandbox, resumed bool, err error) {
	if s, err = m.find(ctx, namespace, id); err != nil {
		return nil, false, err
	}
	var hold *quota.Reservation
	if sandbox.PhaseOf(s) == sandbox.Paused {
		if hold, err = m.reserve(ctx, s.Namespace, &s.Spec.PodTemplate.Spec, true); err != nil {
			return nil, false, err
		}
		hold.For(s.Name)
	}
	s, err = m.change(ctx, namespace, id, func(s *agents.Sandbox) (changed bool, err error) {
		changed, resumed, err = m.connected(s, timeout, keepMemory)
		return changed, err
	})
	if err != nil || !resumed {
		hold.Release()
	}
	return s, resumed, err
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
		return false, false, errMoving
	}
	if keepMemory != nil && !*keepMemory && (s.Spec.Barchan == nil || s.Spec.Barchan.Suspend != agents.SuspendFiles) {
		return false, false, refuse(errs.ErrInvalid, "memory: a sandbox that was paused with its memory cannot be resumed without it yet")
	}
	s.Spec.OperatingMode = agents.ModeRunning
	s.Spec.ShutdownTime = deadline(timeout)
	return true, true, nil
}

func steady(p sandbox.Phase) bool { return p == sandbox.Running || p == sandbox.Paused }

func (m *Manager) awaitResume(ctx context.Context, s *agents.Sandbox, id string) (*agents.Sandbox, error) {
	if err := m.awaitMove(ctx, s, id, func(p sandbox.Phase) bool { return p == sandbox.Running }); err != nil {
		return nil, err
	}
	now, err := m.find(ctx, s.Namespace, id)
	if err != nil {
		return nil, err
	}
	m.cfg.Routes.Apply(now)
	return now, nil
}

// awaitMove waits until a sandbox's phase is as wanted. A wait that is too long is an
// errs.ErrConflict: what the caller wants and what happens contradict each other for now.
func (m *Manager) awaitMove(ctx context.Context, s *agents.Sandbox, id string, arrived func(sandbox.Phase) bool) error {
	bounded, cancel := context.WithTimeout(ctx, m.cfg.MoveTimeout)
	defer cancel()
	uid, phase := s.UID, sandbox.PhaseOf(s)
	_, err := m.cache.WaitSandbox(bounded, client.ObjectKeyFromObject(s), func(s *agents.Sandbox) (bool, error) {
		if s == nil || s.UID != uid || sandbox.DeadForGood(s) {
			return false, noSandbox(id)
		}
		phase = sandbox.PhaseOf(s)
		return arrived(phase), nil
	})
	if errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return refuse(errs.ErrConflict, "Sandbox %q is still %s after %s; try again", id, phase, m.cfg.MoveTimeout)
	}
	if err != nil {
		return fmt.Errorf("wait for sandbox %s: %w", id, err)
	}
	return nil
}
