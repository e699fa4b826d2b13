package warmup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

// reconcileState is the input of one reconcile.
type reconcileState struct {
	at       templateKey
	template *extensions.SandboxTemplate // nil: none with a warm-up
	revision string
	pools    []extensions.SandboxWarmPool
	// seed and checkpoint have the current revision; stale has all others.
	seed       *agents.Sandbox
	checkpoint *barchan.Checkpoint
	stale      []client.Object
	trouble    *failureBackoff
	now        time.Time
}

// Reconcile reconciles one template in one namespace.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	s, err := r.look(ctx, placeOf(req))
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("warm-up of template %s: %w", req, err)
	}
	result, err := r.pass(ctx, s)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) {
		// A concurrent write or a stale cache: reconcile again later.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("warm-up of template %s: %w", req, err)
	}
	return result, nil
}

func (r *reconciler) look(ctx context.Context, at templateKey) (*reconcileState, error) {
	s := &reconcileState{at: at, now: time.Now()}
	t, revision, err := r.Objects.CurrentTemplate(ctx, at.template)
	if err != nil && !errors.Is(err, errs.ErrNotFound) && !errors.Is(err, errs.ErrInvalid) {
		return nil, err
	}
	if err == nil && t.DeletionTimestamp == nil && pool.KeepsWarmMemory(t) {
		s.template, s.revision = t, revision
	}
	if s.pools, err = r.Objects.PoolsOf(ctx, at.namespace, at.template); err != nil {
		return nil, err
	}
	s.pools = slices.DeleteFunc(s.pools, func(p extensions.SandboxWarmPool) bool { return p.DeletionTimestamp != nil })
	slices.SortFunc(s.pools, func(a, b extensions.SandboxWarmPool) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	s.trouble = r.trouble(at, s.revision)
	return s, r.sort(ctx, s)
}

// sort separates seeds and checkpoints of the current revision from others.
func (r *reconciler) sort(ctx context.Context, s *reconcileState) error {
	checkpoints, err := r.Objects.WarmCheckpoints(ctx, s.at.namespace, s.at.template)
	if err != nil {
		return err
	}
	for i := range checkpoints {
		if c := &checkpoints[i]; s.template != nil && pool.IsWarm(c, s.template, s.revision) {
			s.checkpoint = c
		} else {
			s.stale = append(s.stale, c)
		}
	}
	seeds, err := r.Objects.Members(ctx, pool.SeedPool)
	if err != nil {
		return err
	}
	for _, seed := range seeds {
		switch {
		case of(seed) != s.at:
		case s.template != nil && pool.RevisionOf(seed) == s.revision && seed.Annotations[pool.AnnotationTemplateID] == pool.TemplateID(s.template):
			s.seed = seed
		default:
			s.stale = append(s.stale, seed)
		}
	}
	return nil
}

// wanted reports whether a pool of the namespace may need members.
func (s *reconcileState) wanted() bool {
	return slices.ContainsFunc(s.pools, func(p extensions.SandboxWarmPool) bool {
		return (p.Spec.Barchan != nil && p.Spec.Barchan.Autoscale != nil) || p.Spec.Replicas == nil || *p.Spec.Replicas > 0
	})
}

func (r *reconciler) pass(ctx context.Context, s *reconcileState) (reconcile.Result, error) {
	for _, o := range s.stale {
		if err := r.remove(ctx, o); err != nil {
			return reconcile.Result{}, err
		}
	}
	switch {
	case s.template == nil || len(s.pools) == 0:
		r.forget(s.at)
		return reconcile.Result{}, r.removeBoth(ctx, s)
	case s.checkpoint != nil:
		return r.keep(ctx, s)
	case !s.wanted():
		return reconcile.Result{}, r.removeBoth(ctx, s)
	case s.seed == nil:
		if left := s.trouble.retryAt.Sub(s.now); left > 0 {
			return reconcile.Result{RequeueAfter: left}, nil
		}
		return reconcile.Result{}, r.createSeed(ctx, s)
	}
	return r.advanceSeed(ctx, s)
}

// keep reconciles a checkpoint of the current revision.
func (r *reconciler) keep(ctx context.Context, s *reconcileState) (reconcile.Result, error) {
	c := s.checkpoint
	switch {
	case c.DeletionTimestamp != nil:
		return reconcile.Result{}, nil // its end causes an event
	case c.Status.Phase == barchan.CheckpointFailed:
		return r.failed(ctx, s, c, "no checkpoint could be taken of it: "+controllers.ReasonOf(c.Status.Conditions, barchan.ConditionReady))
	case c.Status.Phase != barchan.CheckpointReady:
		return reconcile.Result{}, nil
	}
	victim, err := r.failedRestore(ctx, c)
	if err != nil {
		return reconcile.Result{}, err
	}
	if victim != nil {
		_, text, _ := sandbox.Failure(victim)
		return r.failed(ctx, s, c, fmt.Sprintf("sandbox %s could not start from checkpoint %s: %s", victim.Name, c.Name, text))
	}
	s.trouble.failures, s.trouble.retryAt = 0, time.Time{}
	if s.seed == nil {
		return reconcile.Result{}, nil
	}
	return reconcile.Result{}, r.remove(ctx, s.seed)
}

// failedRestore returns a sandbox created after the checkpoint that ended before it ran; nil without one.
func (r *reconciler) failedRestore(ctx context.Context, c *barchan.Checkpoint) (*agents.Sandbox, error) {
	all, err := r.Objects.RestoringFrom(ctx, client.ObjectKeyFromObject(c))
	if err != nil {
		return nil, err
	}
	for i := range all {
		b := &all[i]
		if sandbox.PhaseOf(b) == sandbox.Dead && !sandbox.HasRun(b) && c.Status.CompletedAt != nil && !b.CreationTimestamp.Before(c.Status.CompletedAt) {
			return b, nil
		}
	}
	return nil, nil //nolint:nilnil // optional
}

func (r *reconciler) createSeed(ctx context.Context, s *reconcileState) error {
	seed := pool.NewSeed(s.template, s.revision, s.at.namespace, s.owner())
	if err := r.Client.Create(ctx, seed); err != nil {
		return fmt.Errorf("create seed: %w", err)
	}
	failpoint.Reach("warmup/seeded")
	r.Log.DebugContext(ctx, "seed created", telemetry.Namespace, seed.Namespace, telemetry.Template, s.template.Name, telemetry.Revision, s.revision)
	return nil
}

// owner returns the owner of seed and checkpoint: the template, or in other namespaces its oldest pool.
func (s *reconcileState) owner() *metav1.OwnerReference {
	if s.at.namespace == s.template.Namespace {
		return metav1.NewControllerRef(s.template, extensions.GroupVersion.WithKind("SandboxTemplate"))
	}
	return metav1.NewControllerRef(&s.pools[0], extensions.GroupVersion.WithKind("SandboxWarmPool"))
}

// advanceSeed creates the checkpoint of a ready seed, and fails one that ended or takes too long.
func (r *reconciler) advanceSeed(ctx context.Context, s *reconcileState) (reconcile.Result, error) {
	late := s.seed.CreationTimestamp.Add(startTime + time.Duration(pool.WarmUpOf(s.template).TimeoutSeconds)*time.Second).Sub(s.now)
	switch phase := sandbox.PhaseOf(s.seed); {
	case phase == sandbox.Stopping:
		return reconcile.Result{}, nil // its end causes an event
	case phase == sandbox.Dead:
		_, text, _ := sandbox.Failure(s.seed)
		return r.failed(ctx, s, s.seed, cmp.Or(text, "its sandbox has ended"))
	case phase == sandbox.Running:
		c := pool.NewWarmCheckpoint(s.template, s.revision, s.at.namespace, s.owner())
		if err := r.Client.Create(ctx, c); err != nil {
			return reconcile.Result{}, fmt.Errorf("create checkpoint: %w", err)
		}
		failpoint.Reach("warmup/checkpointed")
		return reconcile.Result{}, nil
	case late <= 0:
		return r.failed(ctx, s, s.seed, "it is still not done: "+controllers.ReasonOf(s.seed.Status.Conditions, agents.ConditionReady))
	}
	return reconcile.Result{RequeueAfter: late}, nil
}

// failed keeps a failed seed or checkpoint for inspection until the next attempt removes it.
func (r *reconciler) failed(ctx context.Context, s *reconcileState, what client.Object, why string) (reconcile.Result, error) {
	if s.trouble.fail(what.GetUID(), s.now) {
		r.Log.InfoContext(ctx, "warm-up failed", telemetry.Namespace, s.at.namespace, telemetry.Template, s.template.Name, telemetry.Reason, why)
		if r.Events != nil {
			r.Events.Eventf(s.template, nil, corev1.EventTypeWarning, "WarmUpFailed", "WarmUp", "%s", why)
		}
	}
	if left := s.trouble.retryAt.Sub(s.now); left > 0 {
		return reconcile.Result{RequeueAfter: left}, nil
	}
	return reconcile.Result{}, r.removeBoth(ctx, s)
}

func (r *reconciler) removeBoth(ctx context.Context, s *reconcileState) (err error) {
	if s.checkpoint != nil {
		err = r.remove(ctx, s.checkpoint)
	}
	if s.seed != nil && err == nil {
		err = r.remove(ctx, s.seed)
	}
	return err
}

// remove deletes an object, conditional on the version read.
func (r *reconciler) remove(ctx context.Context, o client.Object) error {
	if o.GetDeletionTimestamp() != nil {
		return nil
	}
	uid, version := o.GetUID(), o.GetResourceVersion()
	if err := r.Client.Delete(ctx, o, client.Preconditions{UID: &uid, ResourceVersion: &version}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %s: %w", o.GetName(), err)
	}
	failpoint.Reach("warmup/unseeded")
	return nil
}
