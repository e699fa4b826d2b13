package warmpool

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// atOnce is how many requests a pool has in flight.
	atOnce = 16
	// perPass is how many members a pass makes before the next looks at the wishes again.
	perPass = 128
	// callTimeout bounds each request.
	callTimeout = 10 * time.Second
)

// inBatches calls do n times: once, then twice as often each time all went well, at most atOnce
// at a time. It stops at the first batch with an error and returns it.
func inBatches(n int, do func() error) error {
	for batch := 1; n > 0; batch = min(2*batch, atOnce) {
		batch = min(batch, n)
		if err := together(batch, func(int) error { return do() }); err != nil {
			return err
		}
		n -= batch
	}
	return nil
}

// together calls do for 0 to n-1, at most atOnce at a time, and joins the errors.
func together(n int, do func(i int) error) error {
	failures := make([]error, n)
	slots := make(chan struct{}, atOnce)
	var wg sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			failures[i] = do(i)
		})
	}
	wg.Wait()
	return errors.Join(failures...)
}

// create makes the members that are to be made. That the API server will not have them is
// trouble and no error: asking again at once would not help.
func (r *reconciler) create(ctx context.Context, s *reconcileState) error {
	var mu sync.Mutex
	err := inBatches(min(s.todo.create, perPass), func() error {
		m, err := r.createOne(ctx, s)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		s.members = append(s.members, m)
		s.made++
		return nil
	})
	if s.made > 0 {
		r.log.DebugContext(ctx, "members made", telemetry.Namespace, s.pool.Namespace, telemetry.Pool, s.pool.Name, telemetry.Count, s.made)
	}
	if refusal := apierrors.APIStatus(nil); errors.As(err, &refusal) && rejects(refusal) {
		status := refusal.Status()
		s.trouble.refuse(status.Message, status.Reason != metav1.StatusReasonForbidden, s.now)
		s.todo.create = s.made
		return nil
	}
	return err
}

func (r *reconciler) createOne(ctx context.Context, s *reconcileState) (member, error) {
	ctx, cancel, err := begin(ctx)
	if err != nil {
		return member{}, err
	}
	defer cancel()
	box := pool.NewMember(s.pool, s.template, s.wish.revision)
	pool.StartWarm(box, s.warm.checkpoint)
	if err := r.client.Create(ctx, box); err != nil {
		if code := apierrors.APIStatus(nil); !errors.As(err, &code) || code.Status().Code >= http.StatusInternalServerError {
			r.ledger.invalidate(s.pool.UID) // it may have been made
		}
		return member{}, fmt.Errorf("make a member of warm pool %s/%s: %w", s.pool.Namespace, s.pool.Name, err)
	}
	failpoint.Reach("pool/made")
	m := assess(box, s.now, r.stuckAfter)
	m.since = s.now
	r.ledger.add(s.pool.UID, m)
	return m, nil
}

// begin is the context of a request. One that has begun is waited for, even by a server that stops:
// what the API server may still do after that, the next server would not know of.
func begin(ctx context.Context) (_ context.Context, cancel context.CancelFunc, err error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("the controller stops: %w", err)
	}
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	return ctx, cancel, nil
}

// rejects reports whether an answer says that the object itself will not do.
func rejects(answer apierrors.APIStatus) bool {
	reason := answer.Status().Reason
	return reason == metav1.StatusReasonInvalid || reason == metav1.StatusReasonBadRequest || reason == metav1.StatusReasonForbidden
}

// remove deletes the members that are to go, each only as it was when that was decided.
func (r *reconciler) remove(ctx context.Context, s *reconcileState) error {
	var mu sync.Mutex
	going := map[types.UID]struct{}{}
	err := together(len(s.todo.remove), func(i int) error {
		m := s.todo.remove[i]
		r.ledger.removing(s.pool.UID, m.uid, s.now)
		switch err := r.removeOne(ctx, s.pool.Namespace, m); {
		case err == nil:
			mu.Lock()
			defer mu.Unlock()
			going[m.uid] = struct{}{}
			return nil
		case apierrors.IsConflict(err) || apierrors.IsNotFound(err):
			// It changed, perhaps got an owner: an event is on its way.
			r.ledger.deletionFailed(s.pool.UID, m.uid)
			return nil
		default: // it may go or stay
			r.ledger.deletionFailed(s.pool.UID, m.uid)
			r.ledger.invalidate(s.pool.UID)
			return err
		}
	})
	for i := range s.members {
		if _, goes := going[s.members[i].uid]; goes {
			s.members[i].state, s.members[i].since = ending, s.now
		}
	}
	if len(going) > 0 {
		r.log.DebugContext(ctx, "members removed", telemetry.Namespace, s.pool.Namespace, telemetry.Pool, s.pool.Name, telemetry.Count, len(going))
	}
	return err
}

func (r *reconciler) removeOne(ctx context.Context, namespace string, m member) error {
	ctx, cancel, err := begin(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	box := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: m.name}}
	if err := r.client.Delete(ctx, box, client.Preconditions{UID: &m.uid, ResourceVersion: &m.version}); err != nil {
		return fmt.Errorf("delete member %s/%s: %w", namespace, m.name, err)
	}
	failpoint.Reach("pool/unmade")
	return nil
}

// collect deletes members that nobody owns and whose pool the API server does not know. What
// has an owner that is gone goes with it, by the API server's garbage collection.
func (r *reconciler) collect(ctx context.Context, namespace string, uid types.UID) (reconcile.Result, error) {
	var pools extensions.SandboxWarmPoolList
	if err := r.client.List(ctx, &pools, client.InNamespace(namespace)); err != nil {
		return reconcile.Result{}, fmt.Errorf("list warm pools of %s: %w", namespace, err)
	}
	if slices.ContainsFunc(pools.Items, func(p extensions.SandboxWarmPool) bool { return p.UID == uid }) {
		return reconcile.Result{}, nil // its own event brings us to it
	}
	var left agents.SandboxList
	if err := r.client.List(ctx, &left, client.InNamespace(namespace), client.MatchingLabels{agents.LabelWarmPoolSandbox: string(uid)}); err != nil {
		return reconcile.Result{}, fmt.Errorf("list members of a lost pool: %w", err)
	}
	orphans := slices.DeleteFunc(left.Items, func(s agents.Sandbox) bool { return !orphan(&s) })
	err := together(len(orphans), func(i int) error {
		err := r.removeOne(ctx, namespace, assess(&orphans[i], time.Now(), r.stuckAfter))
		return client.IgnoreNotFound(err)
	})
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	if err == nil {
		r.forget(uid)
	}
	if len(orphans) > 0 && err == nil {
		r.log.InfoContext(ctx, "members of a lost pool removed", telemetry.Namespace, namespace, telemetry.UID, uid, telemetry.Count, len(orphans))
	}
	return reconcile.Result{}, err
}

// orphan reports whether a member has no owner and is not on its way out.
func orphan(s *agents.Sandbox) bool {
	return pool.MemberOf(s) != "" && s.DeletionTimestamp == nil && metav1.GetControllerOfNoCopy(s) == nil
}

// tell records an event on a pool.
func (r *reconciler) tell(p *extensions.SandboxWarmPool, warning bool, reason, action, note string) {
	if r.events == nil {
		return
	}
	kind := corev1.EventTypeNormal
	if warning {
		kind = corev1.EventTypeWarning
	}
	r.events.Eventf(p, nil, kind, reason, action, "%s", note)
}
