package controllers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// transition is what a sandbox's container is brought to.
type transition int

const (
	still   transition = iota // it is as wanted, or nobody knows
	start                     // to run for the first time, or anew
	suspend                   // to sleep
	resume                    // to run again
)

// drive brings the container to what the spec wants. It returns what is there, and what was tried.
func (r *sandboxReconciler) drive(ctx context.Context, s *agents.Sandbox) (sandbox.Observed, transition, error) {
	ref := refOf(s)
	seen, err := r.runner.Observe(ctx, ref)
	if err != nil {
		return seen, still, fmt.Errorf("observe: %w", err)
	}
	todo := moveOf(s, seen.State)
	if todo == suspend || (todo == resume && resumesFromFiles(s)) {
		if err := r.confirm(ctx, s); err != nil {
			return seen, still, err
		}
	}
	switch {
	case todo == start:
		seen, err = r.runner.Ensure(ctx, s)
	case todo == suspend:
		seen, err = r.runner.Suspend(ctx, ref, keepsAsleep(s))
	case todo == resume && r.refused.has(s):
		return seen, still, nil // its status says why
	case todo == resume && seen.State == sandbox.ContainerAbsent:
		seen, err = r.runner.Ensure(ctx, anew(s))
	case todo == resume:
		seen, err = r.runner.Resume(ctx, ref, resumesFromFiles(s))
	}
	return seen, todo, err
}

// confirm asks the API server whether a sandbox still says what the cache shows, before memory or files of
// it are given up. If not, it is a conflict.
func (r *sandboxReconciler) confirm(ctx context.Context, s *agents.Sandbox) error {
	now := &agents.Sandbox{}
	if err := r.client.Get(ctx, client.ObjectKeyFromObject(s), now); err != nil {
		return fmt.Errorf("read sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	if now.UID != s.UID || !apiequality.Semantic.DeepEqual(&now.Spec, &s.Spec) {
		return apierrors.NewConflict(schema.GroupResource{Group: agents.GroupVersion.Group, Resource: "sandboxes"}, s.Name, errChanged)
	}
	return nil
}

// errChanged is why a sandbox is looked at again before anything of it is given up.
var errChanged = errors.New("its spec is not what the cache shows")

func moveOf(s *agents.Sandbox, is sandbox.ContainerState) transition {
	sleeps := s.Spec.OperatingMode == agents.ModeSuspended
	switch {
	case sleeps && is == sandbox.ContainerRunning:
		return suspend
	case sleeps, is == sandbox.ContainerRunning, is == sandbox.ContainerExited:
		return still
	case is == sandbox.ContainerPaused, is == sandbox.ContainerAbsent && sandbox.Suspended(s) && sandbox.HasRun(s) && keepsAsleep(s) == agents.SuspendDelete:
		return resume
	case is == sandbox.ContainerAbsent:
		return start
	}
	return still
}

// anew is a sandbox of which nothing but its volumes was kept: it starts from its image.
func anew(s *agents.Sandbox) *agents.Sandbox {
	if s.Spec.Barchan == nil || s.Spec.Barchan.Restore == nil {
		return s
	}
	s = s.DeepCopy()
	s.Spec.Barchan.Restore = nil
	return s
}

// keepsAsleep is what a sandbox keeps while it is suspended.
func keepsAsleep(s *agents.Sandbox) agents.SuspendMode {
	if s.Spec.Barchan == nil {
		return ""
	}
	return s.Spec.Barchan.Suspend
}

// resumesFromFiles reports whether the next resume gives up the sandbox's memory.
func resumesFromFiles(s *agents.Sandbox) bool {
	return s.Spec.Barchan != nil && s.Spec.Barchan.Resume == agents.ResumeFiles
}

// refusedFor is after how long a resume is tried again that cannot succeed as far as is known.
const refusedFor = 10 * time.Minute

// refusals are resumes that cannot succeed as the sandboxes' specifications stand. They are lost with
// the process, which then tries once more.
type refusals struct {
	mu  sync.Mutex
	all map[types.UID]refusal // +checklocks:mu
}

type refusal struct {
	generation int64
	until      time.Time
}

func newRefusals() *refusals { return &refusals{all: map[types.UID]refusal{}} }

func (r *refusals) add(s *agents.Sandbox) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all[s.UID] = refusal{s.Generation, time.Now().Add(refusedFor)}
}

func (r *refusals) has(s *agents.Sandbox) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	last, refused := r.all[s.UID]
	return refused && last.generation == s.Generation && time.Now().Before(last.until)
}

func (r *refusals) drop(uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.all, uid)
}

// missed records why a sandbox could not be put to sleep, or woken, which never ends it: it runs on,
// or sleeps on. Another try is made unless only a change of its specification can help.
func (r *sandboxReconciler) missed(ctx context.Context, s *agents.Sandbox, seen sandbox.Observed, tried transition, cause error) (reconcile.Result, error) {
	text := errs.Text(cause)
	status := statusOf(s, seen)
	reason, action := sandbox.ReasonResumeFailed, "Resume"
	switch {
	case tried == suspend:
		reason, action = sandbox.ReasonSuspendFailed, "Suspend"
		setAwake(s, status, text)
	case errors.Is(cause, errs.ErrUnavailable): // it passes, and is waited for
		setFailure(s, status, agents.ReasonReconcilerError, text, false)
	default:
		setFailure(s, status, reason, text, false)
	}
	if r.events != nil {
		r.events.Eventf(s, nil, corev1.EventTypeWarning, reason, action, "%s", text)
	}
	if err := r.writeStatus(ctx, s, status); err != nil {
		return reconcile.Result{}, err
	}
	hopeless := tried == resume && (errors.Is(cause, errs.ErrConflict) || isFinal(cause))
	if hopeless {
		r.refused.add(s)
		r.log.WarnContext(ctx, "sandbox cannot be resumed as it is wanted", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, cause)
		return soonerOf(r.untilEnd(s), refusedFor), nil
	}
	r.log.WarnContext(ctx, "sandbox not as wanted, retrying", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, cause)
	return reconcile.Result{}, fmt.Errorf("%s sandbox %s/%s: %w", action, s.Namespace, s.Name, cause)
}

// isFinal reports whether only the user can mend what an error tells of.
func isFinal(cause error) bool {
	return errors.Is(cause, errs.ErrInvalid) || errors.Is(cause, errs.ErrNotFound) || errors.Is(cause, errs.ErrForbidden)
}

// soonerOf looks again after a time at the latest.
func soonerOf(result reconcile.Result, after time.Duration) reconcile.Result {
	if result.RequeueAfter == 0 || after < result.RequeueAfter {
		result.RequeueAfter = after
	}
	return result
}
