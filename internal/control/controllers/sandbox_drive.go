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

// transition is a change of a sandbox's container.
type transition int

const (
	still   transition = iota // none is needed, or the state is unknown
	start                     // also after a loss of the container
	suspend                   // to paused or stored
	resume                    // to running
)

// String names the transition, for spans.
func (t transition) String() string {
	return [...]string{still: "keep", start: "start", suspend: "suspend", resume: "resume"}[t]
}

// drive reconciles the container with the spec. It returns the observed state and the attempted transition.
func (r *sandboxReconciler) drive(ctx context.Context, s *agents.Sandbox) (_ sandbox.Observed, _ transition, err error) {
	seen, err := r.Runner.Observe(ctx, refOf(s))
	if err != nil {
		return seen, still, fmt.Errorf("observe: %w", err)
	}
	todo := transitionOf(s, seen.State)
	if todo != still {
		var end func(error)
		ctx, end = telemetry.StartSpan(ctx, todo.String()+" container", telemetry.OfSandbox(string(sandbox.IDOf(s.UID))))
		defer func() { end(err) }()
	}
	return r.do(ctx, s, seen, todo)
}

// do makes a transition, and returns the one that it has attempted.
func (r *sandboxReconciler) do(ctx context.Context, s *agents.Sandbox, seen sandbox.Observed, todo transition) (_ sandbox.Observed, _ transition, err error) {
	ref := refOf(s)
	if todo == suspend || (todo == resume && resumesFromFiles(s)) {
		if err := r.confirm(ctx, s); err != nil {
			return seen, still, err
		}
	}
	switch {
	case todo == start:
		seen, err = r.Runner.Ensure(ctx, s)
	case todo == still && r.Node == "":
		seen, err = r.complete(ctx, s, seen)
	case todo == suspend:
		seen, err = r.Runner.Suspend(ctx, ref, suspendMode(s))
	case todo == resume && r.refused.has(s):
		return seen, still, nil // the status has the reason
	case todo == resume && seen.State == sandbox.ContainerAbsent:
		seen, err = r.Runner.Ensure(ctx, withoutRestore(s))
	case todo == resume:
		seen, err = r.Runner.Resume(ctx, ref, resumesFromFiles(s))
	}
	return seen, todo, err
}

// complete makes what a sandbox of a cluster lacks beside its Pod.
func (r *sandboxReconciler) complete(ctx context.Context, s *agents.Sandbox, seen sandbox.Observed) (sandbox.Observed, error) {
	switch seen.State {
	case sandbox.ContainerRunning:
		return r.Runner.Ensure(ctx, s)
	case sandbox.ContainerAbsent: // it is suspended, perhaps from the start
		return r.Runner.Suspend(ctx, refOf(s), suspendMode(s))
	case sandbox.ContainerPending, sandbox.ContainerPaused, sandbox.ContainerExited:
	}
	return seen, nil
}

// confirm compares the cached spec with the API server's before memory or files are discarded. A difference
// is a conflict.
func (r *sandboxReconciler) confirm(ctx context.Context, s *agents.Sandbox) error {
	now := &agents.Sandbox{}
	if err := r.Client.Get(ctx, client.ObjectKeyFromObject(s), now); err != nil {
		return fmt.Errorf("read sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	if now.UID != s.UID || !apiequality.Semantic.DeepEqual(&now.Spec, &s.Spec) {
		return apierrors.NewConflict(schema.GroupResource{Group: agents.GroupVersion.Group, Resource: "sandboxes"}, s.Name, errChanged)
	}
	return nil
}

var errChanged = errors.New("its spec differs from the cache")

func transitionOf(s *agents.Sandbox, is sandbox.ContainerState) transition {
	suspended := s.Spec.OperatingMode == agents.ModeSuspended
	switch {
	case suspended && (is == sandbox.ContainerRunning || is == sandbox.ContainerPending):
		return suspend
	case suspended, is == sandbox.ContainerRunning, is == sandbox.ContainerExited:
		return still
	case is == sandbox.ContainerPaused, is == sandbox.ContainerAbsent && sandbox.Suspended(s) && sandbox.HasRun(s) && suspendMode(s) == agents.SuspendDelete:
		return resume
	case is == sandbox.ContainerAbsent, is == sandbox.ContainerPending:
		return start
	}
	return still
}

// withoutRestore returns a sandbox that starts from its image, because only its volumes were kept.
func withoutRestore(s *agents.Sandbox) *agents.Sandbox {
	if s.Spec.Barchan == nil || s.Spec.Barchan.Restore == nil {
		return s
	}
	s = s.DeepCopy()
	s.Spec.Barchan.Restore = nil
	return s
}

// suspendMode returns what a sandbox keeps while it is suspended.
func suspendMode(s *agents.Sandbox) agents.SuspendMode {
	if s.Spec.Barchan == nil {
		return ""
	}
	return s.Spec.Barchan.Suspend
}

// resumesFromFiles reports whether the next resume discards the memory.
func resumesFromFiles(s *agents.Sandbox) bool {
	return s.Spec.Barchan != nil && s.Spec.Barchan.Resume == agents.ResumeFiles
}

// refusalTTL is the time until a refused resume is retried.
const refusalTTL = 10 * time.Minute

// refusals are resumes that cannot succeed with the current spec. They are not persisted: a new process
// retries once.
type refusals struct {
	mu  sync.Mutex
	all map[types.UID]refusedResume // +checklocks:mu
}

type refusedResume struct {
	generation int64
	until      time.Time
}

func newRefusals() *refusals { return &refusals{all: map[types.UID]refusedResume{}} }

func (r *refusals) add(s *agents.Sandbox) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all[s.UID] = refusedResume{s.Generation, time.Now().Add(refusalTTL)}
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

// transitionFailed records a failed suspend or resume. The sandbox keeps its state. The controller retries
// unless only a change of the spec can help.
func (r *sandboxReconciler) transitionFailed(ctx context.Context, s *agents.Sandbox, seen sandbox.Observed, tried transition, cause error) (reconcile.Result, error) {
	text := errs.Text(cause)
	status := statusOf(s, seen)
	reason, action := sandbox.ReasonResumeFailed, "Resume"
	switch {
	case tried == suspend:
		reason, action = sandbox.ReasonSuspendFailed, "Suspend"
		setSuspendFailed(s, status, text)
	case errors.Is(cause, errs.ErrUnavailable): // temporary
		setFailure(s, status, agents.ReasonReconcilerError, text, false)
	default:
		setFailure(s, status, reason, text, false)
	}
	if r.Events != nil {
		r.Events.Eventf(s, nil, corev1.EventTypeWarning, reason, action, "%s", text)
	}
	if err := r.writeStatus(ctx, s, status); err != nil {
		return reconcile.Result{}, err
	}
	hopeless := tried == resume && (errors.Is(cause, errs.ErrConflict) || isFinal(cause))
	if hopeless {
		r.refused.add(s)
	}
	if hopeless || tried == suspend && errors.Is(cause, errs.ErrInvalid) {
		r.Log.WarnContext(ctx, "transition refused with this spec", "transition", action, telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, cause)
		return soonerOf(r.untilEnd(s), refusalTTL), nil
	}
	r.Log.WarnContext(ctx, "sandbox not reconciled; retrying", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, cause)
	return reconcile.Result{}, fmt.Errorf("%s sandbox %s/%s: %w", action, s.Namespace, s.Name, cause)
}

// isFinal reports whether only a user can fix the cause of an error.
func isFinal(cause error) bool {
	return errors.Is(cause, errs.ErrInvalid) || errors.Is(cause, errs.ErrNotFound) || errors.Is(cause, errs.ErrForbidden)
}

// soonerOf bounds RequeueAfter by a duration.
func soonerOf(result reconcile.Result, after time.Duration) reconcile.Result {
	if result.RequeueAfter == 0 || after < result.RequeueAfter {
		result.RequeueAfter = after
	}
	return result
}
