package warmpool

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
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
	// atOnce bounds the requests of a pool in flight.
	atOnce = 16
	// perPass bounds the members that one pass creates.
	perPass = 128
	// callTimeout bounds each request.
	callTimeout = 10 * time.Second
)

// inBatches calls do n times: once, then in batches of twice the size after each success, at most atOnce. It stops
// after the first batch with an error and returns it.
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
	var group errgroup.Group
	group.SetLimit(atOnce)
	for i := range n {
		group.Go(func() error { failures[i] = do(i); return nil })
	}
	_ = group.Wait()
	return errors.Join(failures...)
}

// create creates the planned members. A rejection by the API server starts the backoff and is no error: a retry at
// once would not help.
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
		r.Log.DebugContext(ctx, "members created", telemetry.Namespace, s.pool.Namespace, telemetry.Pool, s.pool.Name, telemetry.Count, s.made)
	}
	if refusal := apierrors.APIStatus(nil); errors.As(err, &refusal) && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsForbidden(err)) {
		status := refusal.Status()
		s.backoff.refuse(status.Message, status.Reason != metav1.StatusReasonForbidden, s.now)
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
	box := pool.NewMember(s.pool, s.template, s.target.revision)
	pool.StartWarm(box, s.warm.checkpoint)
	if err := r.Client.Create(ctx, box); err != nil {
		if code := apierrors.APIStatus(nil); !errors.As(err, &code) || code.Status().Code >= http.StatusInternalServerError {
			r.expected.invalidate(s.pool.UID) // it may exist
		}
		return member{}, fmt.Errorf("create a member of warm pool %s/%s: %w", s.pool.Namespace, s.pool.Name, err)
	}
	failpoint.Reach("pool/made")
	m := assess(box, pool.TemplateOf(s.pool), s.now, r.StuckAfter)
	m.since = s.now
	r.expected.add(s.pool.UID, m)
	return m, nil
}

// begin returns the context of a request. A stopping server waits for a request that has begun: its expectations end
// with the process.
func begin(ctx context.Context) (_ context.Context, cancel context.CancelFunc, err error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, fmt.Errorf("the controller stops: %w", err)
	}
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	return ctx, cancel, nil
}

// remove deletes the planned members, on condition that they have not changed.
func (r *reconciler) remove(ctx context.Context, s *reconcileState) error {
	var mu sync.Mutex
	going := map[types.UID]struct{}{}
	err := together(len(s.todo.remove), func(i int) error {
		m := s.todo.remove[i]
		r.expected.removing(s.pool.UID, m.uid, s.now)
		switch err := r.removeOne(ctx, s.pool.Namespace, m); {
		case err == nil:
			mu.Lock()
			defer mu.Unlock()
			going[m.uid] = struct{}{}
			return nil
		case apierrors.IsConflict(err) || apierrors.IsNotFound(err):
			// It changed, perhaps by a claim: an event follows.
			r.expected.deletionFailed(s.pool.UID, m.uid)
			return nil
		default: // unknown result
			r.expected.deletionFailed(s.pool.UID, m.uid)
			r.expected.invalidate(s.pool.UID)
			return err
		}
	})
	for i := range s.members {
		if _, goes := going[s.members[i].uid]; goes {
			s.members[i].state, s.members[i].since = ending, s.now
		}
	}
	if len(going) > 0 {
		r.Log.DebugContext(ctx, "members removed", telemetry.Namespace, s.pool.Namespace, telemetry.Pool, s.pool.Name, telemetry.Count, len(going))
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
	if err := r.Client.Delete(ctx, box, client.Preconditions{UID: &m.uid, ResourceVersion: &m.version}); err != nil {
		return fmt.Errorf("delete member %s/%s: %w", namespace, m.name, err)
	}
	failpoint.Reach("pool/unmade")
	return nil
}

// collect deletes members without an owner whose pool the API server does not have. The API server's garbage
// collection deletes those of a deleted owner.
func (r *reconciler) collect(ctx context.Context, namespace string, uid types.UID) (reconcile.Result, error) {
	var pools extensions.SandboxWarmPoolList
	if err := r.Client.List(ctx, &pools, client.InNamespace(namespace)); err != nil {
		return reconcile.Result{}, fmt.Errorf("list warm pools of %s: %w", namespace, err)
	}
	if slices.ContainsFunc(pools.Items, func(p extensions.SandboxWarmPool) bool { return p.UID == uid }) {
		return reconcile.Result{}, nil // its own event reconciles it
	}
	var left agents.SandboxList
	if err := r.Client.List(ctx, &left, client.InNamespace(namespace), client.MatchingLabels{agents.LabelWarmPoolSandbox: string(uid)}); err != nil {
		return reconcile.Result{}, fmt.Errorf("list members of a lost pool: %w", err)
	}
	orphans := slices.DeleteFunc(left.Items, func(s agents.Sandbox) bool { return !orphan(&s) })
	err := together(len(orphans), func(i int) error {
		err := r.removeOne(ctx, namespace, assess(&orphans[i], types.NamespacedName{}, time.Now(), r.StuckAfter))
		return client.IgnoreNotFound(err)
	})
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	if err == nil {
		r.forget(uid)
	}
	if len(orphans) > 0 && err == nil {
		r.Log.InfoContext(ctx, "members of a lost pool removed", telemetry.Namespace, namespace, telemetry.UID, uid, telemetry.Count, len(orphans))
	}
	return reconcile.Result{}, err
}

// orphan reports whether a member has no owner and is not being deleted.
func orphan(s *agents.Sandbox) bool {
	return pool.MemberOf(s) != "" && s.DeletionTimestamp == nil && metav1.GetControllerOfNoCopy(s) == nil
}

// record records an event on a pool.
func (r *reconciler) record(p *extensions.SandboxWarmPool, e poolEvent) {
	if r.Events == nil {
		return
	}
	kind := corev1.EventTypeNormal
	if e.warning {
		kind = corev1.EventTypeWarning
	}
	r.Events.Eventf(p, nil, kind, e.reason, e.action, "%s", e.note)
}
