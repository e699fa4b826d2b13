package creating

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/manager/idempotency"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
)

// finish waits until a new sandbox is ready and sets its end. It removes a sandbox that fails.
func (cr *Creator) finish(ctx context.Context, made *agents.Sandbox, timeout time.Duration) (*agents.Sandbox, error) {
	ready, err := cr.awaitStart(ctx, made)
	if err == nil {
		ready, err = cr.setShutdownTime(ctx, ready, timeout)
		failpoint.Reach("create/timed")
	}
	if err != nil {
		cr.Sandboxes.Discard(ctx, made)
		return nil, err
	}
	return ready, nil
}

// awaitStart waits until a new sandbox is ready or has failed.
func (cr *Creator) awaitStart(ctx context.Context, made *agents.Sandbox) (*agents.Sandbox, error) {
	bounded, cancel := context.WithTimeout(ctx, cr.StartTimeout)
	defer cancel()
	id, waitingFor := sandbox.IDOf(made.UID), ""
	ready, err := cr.Sandboxes.Cache.WaitSandbox(bounded, client.ObjectKeyFromObject(made), func(s *agents.Sandbox) (bool, error) {
		if s == nil || s.UID != made.UID {
			return false, killed(id)
		}
		if reason, message, failed := sandbox.Failure(s); failed {
			return false, apistatus.Refuse(errs.ErrInvalid, "the sandbox cannot start: %s: %s", reason, message)
		}
		if sandbox.DeadForGood(s) {
			return false, killed(id)
		}
		if err := heldUp(s); err != nil {
			return false, err
		}
		condition := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
		failed := condition != nil && condition.Reason == agents.ReasonReconcilerError
		if err := cr.Sandboxes.Gate.Err(); err != nil && sandbox.PhaseOf(s) != sandbox.Running && failed {
			return false, err // the node would retry until the gate opens
		}
		waitingFor = waitReason(condition)
		return sandbox.PhaseOf(s) == sandbox.Running, nil
	})
	if refused := cr.Sandboxes.Gate.Err(); refused != nil && errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return nil, fmt.Errorf("wait for the start of sandbox %s: %w", id, refused)
	}
	if errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return nil, errs.Public(err, fmt.Sprintf("the sandbox was not ready within %s%s", cr.StartTimeout, waitingFor))
	}
	if err != nil {
		return nil, fmt.Errorf("wait for the start of sandbox %s: %w", id, err)
	}
	return ready, nil
}

// heldUp returns why a sandbox starts only after a change by an operator or a tenant, for which no create waits.
func heldUp(s *agents.Sandbox) error {
	if message, lacks := sandbox.LacksImage(s); lacks {
		return apistatus.Refuse(errs.ErrUnavailable, "the sandbox cannot start: %s", message)
	}
	if message, refused := sandbox.RefusedSecrets(s); refused {
		return apistatus.Refuse(errs.ErrForbidden, "the sandbox cannot start: %s", message)
	}
	return nil
}

func killed(id sandbox.ID) error {
	return apistatus.Refuse(errs.ErrConflict, "Sandbox %q was killed while it was starting", id)
}

// waitReason is the controller's message on a sandbox that is not ready.
func waitReason(ready *metav1.Condition) string {
	if ready == nil || ready.Status == metav1.ConditionTrue || ready.Message == "" {
		return ""
	}
	return ": " + ready.Reason + ": " + ready.Message
}

// setShutdownTime sets the end of a ready sandbox, unless it is right to the second, and records that its create is
// complete.
func (cr *Creator) setShutdownTime(ctx context.Context, ready *agents.Sandbox, timeout time.Duration) (*agents.Sandbox, error) {
	end := sandboxes.Deadline(timeout)
	set, err := cr.Sandboxes.Change(ctx, ready, func(s *agents.Sandbox) (changed bool, err error) {
		_, changed = s.Annotations[idempotency.AnnotationPending]
		delete(s.Annotations, idempotency.AnnotationPending)
		was := s.Spec.ShutdownTime
		if s.Spec.OperatingMode != agents.ModeSuspended && (was == nil || end.Sub(was.Time).Abs() > time.Second) {
			s.Spec.ShutdownTime, changed = end, true
		}
		return changed, nil
	})
	if errors.Is(err, errs.ErrNotFound) {
		return nil, killed(sandbox.IDOf(ready.UID))
	}
	return set, err
}
