package sandboxes

import (
	"cmp"
	"context"
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

const (
	// MaxRefresh bounds how far one Refresh extends a sandbox's life.
	MaxRefresh = time.Hour
	// minWakeTimeout is the least time to live of a sandbox after a wake.
	minWakeTimeout = 5 * time.Minute
)

// Kill ends a sandbox in any state. A dead one is an errs.ErrNotFound; its leftovers are removed all the same.
func (st *Store) Kill(ctx context.Context, namespace, id string) (err error) {
	start := time.Now()
	defer func() { st.Observe(ctx, "kill", start, err) }()
	s, err := st.findAny(ctx, namespace, id)
	if err != nil {
		return err
	}
	if s.DeletionTimestamp != nil {
		return NotFound(id)
	}
	dead := sandbox.DeadForGood(s)
	if err := st.Remove(ctx, s); err != nil {
		if errors.Is(err, errs.ErrNotFound) {
			return NotFound(id)
		}
		return err
	}
	st.Log.InfoContext(ctx, "sandbox killed", telemetry.Sandbox, id, telemetry.Namespace, s.Namespace, telemetry.Name, s.Name)
	if dead {
		return NotFound(id)
	}
	return nil
}

// SetTimeout ends a running sandbox after d from now; it may shorten its life. Zero or less ends it now.
func (st *Store) SetTimeout(ctx context.Context, namespace, id string, d time.Duration) error {
	if d > 0 {
		if err := st.CheckTimeout(d); err != nil {
			return err
		}
	}
	return st.changeRunning(ctx, namespace, id, func(s *agents.Sandbox) (_ bool, err error) {
		end := new(metav1.NewTime(time.Now().Truncate(time.Second))) // also after the longest life
		if d > 0 {
			if end, err = st.capped(s, d); err != nil {
				return false, err
			}
		}
		s.Spec.ShutdownTime = end
		return true, nil
	})
}

// Refresh extends a running sandbox's life to at least d from now. Zero means MaxRefresh.
func (st *Store) Refresh(ctx context.Context, namespace, id string, d time.Duration) error {
	d = cmp.Or(d, MaxRefresh)
	if d < 0 || d > MaxRefresh {
		return apistatus.Refuse(errs.ErrInvalid, "duration: must be from 1 to %d seconds", int(MaxRefresh/time.Second))
	}
	return st.changeRunning(ctx, namespace, id, func(s *agents.Sandbox) (bool, error) { return st.extend(s, d) })
}

// changeRunning is change for sandboxes that are not paused.
func (st *Store) changeRunning(ctx context.Context, namespace, id string, mutate func(*agents.Sandbox) (bool, error)) error {
	_, err := st.change(ctx, namespace, id, func(s *agents.Sandbox) (bool, error) {
		if s.Spec.OperatingMode == agents.ModeSuspended {
			return false, IsPaused(id)
		}
		return mutate(s)
	})
	return err
}

// extend moves a running sandbox's end only later.
func (st *Store) extend(s *agents.Sandbox, d time.Duration) (bool, error) {
	if s.Spec.ShutdownTime == nil {
		return false, nil
	}
	end, err := st.capped(s, d)
	if err != nil || !end.After(s.Spec.ShutdownTime.Time) {
		return false, err
	}
	s.Spec.ShutdownTime = end
	return true, nil
}

// capped is d from now, but no later than the longest life allows.
func (st *Store) capped(s *agents.Sandbox, d time.Duration) (*metav1.Time, error) {
	end, limit := Deadline(d), metav1.NewTime(pool.StartedAt(s).Add(st.MaxTimeout))
	if time.Now().After(limit.Time) {
		return nil, apistatus.Refuse(errs.ErrInvalid, "Max instance length exceeded")
	}
	if end.After(limit.Time) {
		return &limit, nil
	}
	return end, nil
}

// Deadline is a duration from now, rounded up to the second, the resolution of objects.
func Deadline(d time.Duration) *metav1.Time {
	return new(metav1.NewTime(time.Now().Add(d + time.Second - 1).Truncate(time.Second)))
}

// CheckTimeout refuses a time to live that is too short or too long.
func (st *Store) CheckTimeout(d time.Duration) error {
	if d <= 0 {
		return apistatus.Refuse(errs.ErrInvalid, "Timeout must be greater than 0")
	}
	if d > st.MaxTimeout {
		return apistatus.Refuse(errs.ErrInvalid, "Timeout cannot be greater than %g hours", st.MaxTimeout.Hours())
	}
	return nil
}

// WakeTimeout is the time to live of a sandbox after a wake.
func (st *Store) WakeTimeout(requested time.Duration) time.Duration {
	return min(max(requested, minWakeTimeout), st.MaxTimeout)
}

// SetNetwork replaces a sandbox's egress policy; nil clears it. It returns when the policy is in force. After
// MoveTimeout the error is an errs.ErrUnavailable: the policy is written, and the node keeps trying.
func (st *Store) SetNetwork(ctx context.Context, namespace, id string, n *agents.EgressPolicy) error {
	if err := CheckNetwork(n); err != nil {
		return err
	}
	s, err := st.change(ctx, namespace, id, func(s *agents.Sandbox) (bool, error) {
		ours(s).Network = n.DeepCopy()
		return true, nil
	})
	if err != nil {
		return err
	}
	return st.AwaitNetwork(ctx, s, st.MoveTimeout)
}

// CheckNetwork refuses an invalid policy; nil is valid.
func CheckNetwork(n *agents.EgressPolicy) error {
	if n == nil {
		return nil
	}
	return apistatus.InvalidFields(agents.ValidateEgress(n, field.NewPath("network")))
}

// AwaitNetwork waits until a sandbox's policy is in force: until its status has the same generation, which its
// controller writes after the node has set the rules.
func (st *Store) AwaitNetwork(ctx context.Context, s *agents.Sandbox, limit time.Duration) error {
	id, generation := string(sandbox.IDOf(s.UID)), s.Generation
	return st.await(ctx, s, id, limit, func(now *agents.Sandbox) (bool, error) {
		ready := meta.FindStatusCondition(now.Status.Conditions, agents.ConditionReady)
		return ready != nil && ready.ObservedGeneration >= generation, nil
	}, func() error {
		return apistatus.Refuse(errs.ErrUnavailable, "what sandbox %q may reach was changed, and is not in force after %s", id, limit)
	})
}
