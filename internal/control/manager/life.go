package manager

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// MaxRefresh bounds how far one Refresh extends a sandbox's life.
const MaxRefresh = time.Hour

// settleTimeout bounds the wait for the cache to show what was just written.
const settleTimeout = 5 * time.Second

// maxTries bounds the conditional writes of one change.
const maxTries = 12

// Get returns one sandbox that lives.
func (m *Manager) Get(ctx context.Context, namespace, id string) (Sandbox, error) {
	s, err := m.find(ctx, namespace, id)
	if err != nil {
		return Sandbox{}, err
	}
	return m.view(s), nil
}

// Kill ends a sandbox in any state. One that does not live is an errs.ErrNotFound; what is
// left of it is removed all the same.
func (m *Manager) Kill(ctx context.Context, namespace, id string) (err error) {
	start := time.Now()
	defer func() { m.observe(opKill, start, err) }()
	s, err := m.findAny(ctx, namespace, id)
	if err != nil {
		return err
	}
	if s.DeletionTimestamp != nil {
		return noSandbox(id)
	}
	dead := sandbox.DeadForGood(s)
	if err := m.remove(ctx, s); err != nil {
		if errors.Is(err, errs.ErrNotFound) {
			return noSandbox(id)
		}
		return err
	}
	m.log.InfoContext(ctx, "sandbox killed", telemetry.Sandbox, id, telemetry.Namespace, s.Namespace, telemetry.Name, s.Name)
	if dead {
		return noSandbox(id)
	}
	return nil
}

// remove deletes exactly this sandbox, not another that has got its name since.
func (m *Manager) remove(ctx context.Context, s *agents.Sandbox) error {
	err := m.objects.Delete(ctx, s, client.Preconditions{UID: &s.UID})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		m.cfg.Routes.ApplyDelete(s)
		return fmt.Errorf("delete sandbox: %w: %w", errs.ErrNotFound, err)
	}
	if err != nil {
		return apistatus.From("delete sandbox", err)
	}
	failpoint.Reach("delete/written")
	m.assumed.Forget(s.UID)
	m.cfg.Routes.ApplyDelete(s)
	m.settle(ctx, s, func(now *agents.Sandbox) bool { return now.DeletionTimestamp != nil })
	m.vacated(s, nil)
	return nil
}

// SetTimeout ends a running sandbox after d from now; it may shorten its life. Zero or less ends it now.
func (m *Manager) SetTimeout(ctx context.Context, namespace, id string, d time.Duration) error {
	if d = max(d, 0); d > 0 {
		if err := m.checkTimeout(d); err != nil {
			return err
		}
	}
	_, err := m.change(ctx, namespace, id, func(s *agents.Sandbox) (bool, error) {
		if s.Spec.OperatingMode == agents.ModeSuspended {
			return false, isPaused(id)
		}
		if d == 0 { // also where the longest life is over
			s.Spec.ShutdownTime = new(metav1.NewTime(time.Now().Truncate(time.Second)))
			return true, nil
		}
		end, err := m.capped(s, d)
		if err != nil {
			return false, err
		}
		s.Spec.ShutdownTime = end
		return true, nil
	})
	return err
}

// Refresh lets a running sandbox live for at least d from now. Zero means the most.
func (m *Manager) Refresh(ctx context.Context, namespace, id string, d time.Duration) error {
	setIfZero(&d, MaxRefresh)
	if d < 0 || d > MaxRefresh {
		return apistatus.Refuse(errs.ErrInvalid, "duration: must be from 1 to %d seconds", int(MaxRefresh/time.Second))
	}
	_, err := m.change(ctx, namespace, id, func(s *agents.Sandbox) (bool, error) {
		if s.Spec.OperatingMode == agents.ModeSuspended {
			return false, isPaused(id)
		}
		return m.extend(s, d)
	})
	return err
}

// extend moves a running sandbox's end only later.
func (m *Manager) extend(s *agents.Sandbox, d time.Duration) (bool, error) {
	if s.Spec.ShutdownTime == nil {
		return false, nil
	}
	end, err := m.capped(s, d)
	if err != nil || !end.After(s.Spec.ShutdownTime.Time) {
		return false, err
	}
	s.Spec.ShutdownTime = end
	return true, nil
}

// capped is d from now, but no later than the longest life allows.
func (m *Manager) capped(s *agents.Sandbox, d time.Duration) (*metav1.Time, error) {
	end, limit := deadline(d), metav1.NewTime(startedAt(s).Add(m.cfg.MaxTimeout))
	if time.Now().After(limit.Time) {
		return nil, apistatus.Refuse(errs.ErrInvalid, "Max instance length exceeded")
	}
	if end.After(limit.Time) {
		return &limit, nil
	}
	return end, nil
}

// SetNetwork replaces what a sandbox may reach; nil clears it. It returns when that is in force. A
// wait that is too long is an errs.ErrUnavailable: the wish is written, and its node goes on trying.
func (m *Manager) SetNetwork(ctx context.Context, namespace, id string, n *agents.EgressPolicy) error {
	if err := checkNetwork(n); err != nil {
		return err
	}
	s, err := m.change(ctx, namespace, id, func(s *agents.Sandbox) (bool, error) {
		if s.Spec.Barchan == nil {
			s.Spec.Barchan = &agents.BarchanSpec{}
		}
		s.Spec.Barchan.Network = n.DeepCopy()
		return true, nil
	})
	if err != nil {
		return err
	}
	return m.awaitNetwork(ctx, s, m.cfg.MoveTimeout)
}

// awaitNetwork waits until a sandbox may reach what its object says: until its status is of the
// same generation, which its controller writes after the node has set the rules.
func (m *Manager) awaitNetwork(ctx context.Context, s *agents.Sandbox, limit time.Duration) error {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	uid, id := s.UID, sandbox.IDOf(s.UID)
	_, err := m.cache.WaitSandbox(bounded, client.ObjectKeyFromObject(s), func(now *agents.Sandbox) (bool, error) {
		if now == nil || now.UID != uid || sandbox.DeadForGood(now) {
			return false, noSandbox(string(id))
		}
		ready := meta.FindStatusCondition(now.Status.Conditions, agents.ConditionReady)
		return ready != nil && ready.ObservedGeneration >= s.Generation, nil
	})
	if errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return apistatus.Refuse(errs.ErrUnavailable, "what sandbox %q may reach was changed, and is not in force after %s", id, limit)
	}
	if err != nil {
		return fmt.Errorf("wait for the network of sandbox %s: %w", id, err)
	}
	return nil
}

// findLive is find for decisions: it returns the sandbox as the API server has it now. A cache may lag
// behind what another replica wrote, so nothing is refused, or answered as done already, on what it holds.
func (m *Manager) findLive(ctx context.Context, namespace, id string) (*agents.Sandbox, error) {
	s, err := m.find(ctx, namespace, id)
	if err != nil {
		return nil, err
	}
	if s, err = m.live(ctx, s); errors.Is(err, errs.ErrNotFound) {
		return nil, noSandbox(id)
	}
	return s, err
}

// live reads a sandbox from the API server. One that has ended since is an errs.ErrNotFound.
func (m *Manager) live(ctx context.Context, s *agents.Sandbox) (*agents.Sandbox, error) {
	now, key := &agents.Sandbox{}, client.ObjectKeyFromObject(s)
	if err := m.objects.Get(ctx, key, now); err != nil {
		return nil, apistatus.From("read sandbox "+key.String(), err)
	}
	if now.UID != s.UID || sandbox.DeadForGood(now) {
		return nil, fmt.Errorf("read sandbox %s: it is gone: %w", key, errs.ErrNotFound)
	}
	return now, nil
}

// find returns the tenant's sandbox if it lives.
func (m *Manager) find(ctx context.Context, namespace, id string) (*agents.Sandbox, error) {
	s, err := m.findAny(ctx, namespace, id)
	if err != nil {
		return nil, err
	}
	if sandbox.DeadForGood(s) {
		return nil, hasEnded(id, sandbox.EndOf(s))
	}
	return s, nil
}

// findAny returns the tenant's sandbox, dead or alive. What a pool still has is nobody's.
func (m *Manager) findAny(ctx context.Context, namespace, id string) (*agents.Sandbox, error) {
	parsed, err := sandbox.ParseID(id)
	if err != nil {
		return nil, noSandbox(id)
	}
	s, err := m.owned(ctx, parsed)
	if errors.Is(err, errs.ErrNotFound) || (err == nil && s.Namespace != namespace) {
		return nil, hasEnded(id, m.cfg.Routes.Ended(namespace, parsed))
	}
	return s, err
}

// owned returns a sandbox that has an owner, dead or alive, of any tenant. None is an errs.ErrNotFound.
func (m *Manager) owned(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error) {
	s, err := m.cache.SandboxByID(ctx, id)
	switch {
	case err == nil:
		s = m.assumed.Latest(s)
	case errors.Is(err, errs.ErrNotFound):
		if a := m.assumed.Find(func(s *agents.Sandbox) bool { return sandbox.IDOf(s.UID) == id }); a != nil {
			s, err = a, nil
		}
	}
	if errors.Is(err, errs.ErrNotFound) || (err == nil && pool.MemberOf(s) != "") {
		s, err = m.findByHint(ctx, id)
	}
	if err == nil && pool.MemberOf(s) != "" {
		err = errs.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("look up sandbox %s: %w", id, err)
	}
	return s, nil
}

// findByHint reads a sandbox that another replica has made or claimed, and told of before the watch
// could; without a route nobody has, and the API server is not asked. None is an errs.ErrNotFound.
func (m *Manager) findByHint(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error) {
	known, ok := m.cfg.Routes.Name(id)
	if !ok {
		return nil, errs.ErrNotFound
	}
	s := &agents.Sandbox{}
	err := m.objects.Get(ctx, known, s)
	if apierrors.IsNotFound(err) || (err == nil && sandbox.IDOf(s.UID) != id) {
		return nil, errs.ErrNotFound
	}
	return s, err
}

// change applies mutate to the tenant's sandbox and writes it, again on a newer version if
// somebody else wrote meanwhile. It returns the object as written, or as read where mutate
// reports that nothing is to change.
func (m *Manager) change(ctx context.Context, namespace, id string, mutate func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error) {
	s, err := m.find(ctx, namespace, id)
	if err != nil {
		return nil, err
	}
	s, err = m.changeObject(ctx, s, mutate)
	if errors.Is(err, errs.ErrNotFound) {
		return nil, noSandbox(id)
	}
	return s, err
}

// changeObject is change for an object that may be old. What mutate makes of an old one counts only if it is
// written, on the condition that it is the newest; that nothing is to change, or may be, is decided on a live read.
func (m *Manager) changeObject(ctx context.Context, s *agents.Sandbox, mutate func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error) {
	for try, live := 1, false; ; live = true {
		changed, err := mutate(s)
		if live && (err != nil || !changed) {
			m.settleAt(ctx, s) // the decision was made on more than the cache may show
			return s, err
		}
		if err == nil && changed {
			err := m.objects.Update(ctx, s)
			if err == nil {
				m.cfg.Routes.Apply(s)
				m.settleAt(ctx, s)
				return s, nil
			}
			if !apierrors.IsConflict(err) || try == maxTries {
				return nil, apistatus.From("update sandbox "+client.ObjectKeyFromObject(s).String(), err)
			}
			try++
		}
		if s, err = m.live(ctx, s); err != nil {
			return nil, err
		}
	}
}

// settleAt settles at the version of s or a newer one.
func (m *Manager) settleAt(ctx context.Context, s *agents.Sandbox) {
	version := s.ResourceVersion
	m.settle(ctx, s, func(now *agents.Sandbox) bool { return !behind(now, version) })
}

// behind reports whether an object is of an older version than another one.
func behind(s *agents.Sandbox, version string) bool {
	order, err := resourceversion.CompareResourceVersion(s.ResourceVersion, version)
	return err == nil && order < 0
}

// settle waits until the cache shows a write, so that the caller's next read does too. The
// write is done in any case: a cache that lags is no reason to tell otherwise.
func (m *Manager) settle(ctx context.Context, s *agents.Sandbox, shown func(*agents.Sandbox) bool) {
	ctx, cancel := context.WithTimeout(ctx, m.settleIn)
	defer cancel()
	uid := s.UID
	_, err := m.cache.WaitSandbox(ctx, client.ObjectKeyFromObject(s), func(now *agents.Sandbox) (bool, error) {
		return now == nil || now.UID != uid || shown(now), nil
	})
	if err != nil {
		m.log.WarnContext(ctx, "cache does not show a write yet", telemetry.Sandbox, sandbox.IDOf(uid), telemetry.Error, err)
	}
}
