package claim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/claiming"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

type reconciler struct {
	Config
	claims *claiming.Claimer
	// late reports whether running sandboxes can take variables.
	late bool
	took *prometheus.HistogramVec
	// upstream is the same by agent-sandbox's name.
	upstream  *prometheus.HistogramVec
	templates templateLabels
	// named holds written claims that the cache may not show yet.
	named    *assumecache.Claims
	attempts *attemptCache
	slots    *poolSlots
	// enqueue requests a reconcile. It is set before the first one.
	enqueue func(reconcile.Request)
}

// Metrics registers the metrics of the controller without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, _, err := newMetrics(to, nil)
	return err
}

// UpstreamMetrics registers those with agent-sandbox's names.
func UpstreamMetrics(to prometheus.Registerer) error {
	_, _, err := newMetrics(nil, to)
	return err
}

// newMetrics returns our metric and agent-sandbox's. One whose registerer is nil is not registered.
func newMetrics(to, upstreamTo prometheus.Registerer) (took, upstream *prometheus.HistogramVec, err error) {
	took = prometheus.NewHistogramVec(telemetry.DurationOpts("sandboxclaim", "ready",
		"Time from the first reconcile of a SandboxClaim until its status names its sandbox, by launch of the sandbox: `warm`, from a pool, or `cold`."), []string{"launch"})
	upstream = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "agent_sandbox_claim_controller_startup_latency_ms",
		Help:    "The same as barchan_sandboxclaim_ready_seconds, by launch and template of the sandbox.",
		Buckets: []float64{100, 250, 500, 750, 1000, 1250, 1500, 2000, 2500, 5000, 10000, 30000, 60000, 120000, 240000}, // agent-sandbox's
	}, []string{"launch_type", "sandbox_template"})
	return took, upstream, errors.Join(telemetry.Register(to, took), telemetry.Register(upstreamTo, upstream))
}

func newReconciler(cfg *Config) (*reconciler, error) {
	took, upstream, err := newMetrics(cfg.Metrics, cfg.UpstreamMetrics)
	if err != nil {
		return nil, fmt.Errorf("claim controller: %w", err)
	}
	claims, err := claiming.New(claiming.Config{
		Creator: cfg.Client, Reader: cfg.Cache, Picker: cfg.Picker, Quota: cfg.Quota, Binder: cfg.Binder, Assumed: cfg.Assumed,
	})
	if err != nil {
		return nil, err
	}
	return &reconciler{
		Config: *cfg, claims: claims, late: cfg.Binder != nil, took: took, upstream: upstream, named: assumecache.New(cfg.Cache.Claim),
		attempts: newAttemptCache(), slots: newPoolSlots(cfg.Workers / waitingShare),
	}, nil
}

// work is one reconcile of a claim, and the owner of what it claims.
type work struct {
	req   reconcile.Request
	claim *extensions.SandboxClaim
	known *attempt
	pool  *extensions.SandboxWarmPool
	late  bool
	op    *claiming.Claim
	// plan is for the last read version of the template.
	plan *plan
	// annotation is a write of the claim that is under way; nil without one.
	annotation *annotation
	// annotate begins one.
	annotate func(sandbox string)
}

// Reconcile implements [reconcile.Reconciler].
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	defer r.slots.release(req)
	c, err := r.Cache.Claim(ctx, req.NamespacedName)
	if errors.Is(err, errs.ErrNotFound) {
		r.named.Forget(r.attempts.forget(req))
		return reconcile.Result{}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	w := &work{req: req, claim: r.named.Latest(c), known: r.attempts.of(req, c.UID), late: r.late}
	w.annotate = func(sandbox string) { r.annotate(ctx, w, sandbox) }
	result, err := r.step(ctx, w)
	if failed := w.annotated(); err == nil {
		err = failed
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		// A concurrent write: reconcile again when the cache shows it.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	if err != nil {
		return reconcile.Result{}, fmt.Errorf("claim %s: %w", req, err)
	}
	return result, nil
}

func (r *reconciler) step(ctx context.Context, w *work) (result reconcile.Result, err error) {
	switch {
	case w.claim.DeletionTimestamp != nil:
		w.known.leaveQueue()
		return reconcile.Result{}, nil // garbage collection deletes what it owns
	case hasExpired(w.claim):
		return reconcile.Result{}, r.removeOwned(ctx, w)
	case isOver(w.claim):
		w.known.leaveQueue()
		return reconcile.Result{}, r.expire(ctx, w)
	case w.claim.Status.Sandbox.Name != "":
		err = r.mirror(ctx, w)
	case queueTimedOut(w.claim):
		err = r.removeOwned(ctx, w)
	default:
		result, err = r.take(ctx, w)
	}
	if at, _, ends := endOf(w.claim); err == nil && ends {
		if left := max(time.Until(at), time.Millisecond); result.RequeueAfter == 0 || left < result.RequeueAfter {
			result.RequeueAfter = left
		}
	}
	return result, err
}

// annotation is a write of agent-sandbox's annotations to a claim: which sandbox it has, and when a controller first saw it. It runs
// beside the write that takes the sandbox, so that the claim is ready no later.
type annotation struct {
	sandbox string
	patched *extensions.SandboxClaim
	written chan error
}

// annotate begins that write, unless the claim has the annotations.
func (r *reconciler) annotate(ctx context.Context, w *work, sandbox string) {
	if !r.Annotate || w.claim.Annotations[agents.AnnotationSandboxName] == sandbox || w.annotation != nil && w.annotation.sandbox == sandbox {
		return
	}
	_ = w.annotated() // of a sandbox that could not be taken; what failed fails again
	a := &annotation{sandbox: sandbox, patched: w.claim.DeepCopy(), written: make(chan error, 1)}
	metav1.SetMetaDataAnnotation(&a.patched.ObjectMeta, agents.AnnotationSandboxName, sandbox)
	if a.patched.Annotations[agents.AnnotationFirstObserved] == "" {
		metav1.SetMetaDataAnnotation(&a.patched.ObjectMeta, agents.AnnotationFirstObserved, w.known.seen.UTC().Format(time.RFC3339Nano))
	}
	patch := client.MergeFromWithOptions(w.claim, client.MergeFromWithOptimisticLock{})
	go func() { a.written <- r.Client.Patch(ctx, a.patched, patch) }() // annotated receives it
	w.annotation = a
}

// annotated waits for that write, if there is one. No other write of the claim may come before.
func (w *work) annotated() error {
	a := w.annotation
	if a == nil {
		return nil
	}
	w.annotation = nil
	if err := <-a.written; err != nil {
		return fmt.Errorf("write the claim's annotations: %w", err)
	}
	w.claim = a.patched
	return nil
}

// take assigns a sandbox to a claim without one, or records why it has none.
func (r *reconciler) take(ctx context.Context, w *work) (_ reconcile.Result, err error) {
	ctx, end := telemetry.StartTrace(ctx, r.Tracing, "serve SandboxClaim", telemetry.OfClaim(w.req.String()))
	defer func() { end(err) }()
	if w.known.since.IsZero() {
		w.known.since = time.Now()
	}
	var fault error
	for range bindTries {
		s, result, err := r.find(ctx, w)
		if no, ok := errors.AsType[*refusal](err); ok {
			return reconcile.Result{}, errors.Join(r.refuse(ctx, w, no), no.retry)
		}
		if s == nil || err != nil {
			return result, err
		}
		if fault = r.bind(ctx, w, s); fault == nil {
			return reconcile.Result{}, r.announce(ctx, w, s)
		}
		if ctx.Err() != nil {
			return reconcile.Result{}, fault // shutdown: the next process finds the owned sandbox
		}
		r.Log.WarnContext(ctx, "sandbox replaced after failed bind",
			telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name, telemetry.Error, fault)
		if err := r.drop(ctx, w, s); err != nil {
			return reconcile.Result{}, err
		}
	}
	_, err = r.write(ctx, w, waiting(w.claim, extensions.ReasonClaimReconcilerFailed,
		fmt.Sprintf("spec.env: %d sandboxes did not take the variables and were replaced; it is tried again: %s", bindTries, errs.Text(fault))))
	return reconcile.Result{}, errors.Join(err, fault)
}

// look reads pool and template, and validates the claim.
func (r *reconciler) look(ctx context.Context, w *work) error {
	spec := field.NewPath("spec")
	key := client.ObjectKey{Namespace: w.claim.Namespace, Name: w.claim.Spec.WarmPoolRef.Name}
	p, err := r.Cache.Pool(ctx, key)
	switch at := spec.Child("warmPoolRef", "name"); {
	case errors.Is(err, errs.ErrNotFound):
		return &refusal{reason: extensions.ReasonWarmPoolNotFound, message: fmt.Sprintf("%s: there is no warm pool %q in namespace %s; create it, or name another", at, key.Name, key.Namespace)}
	case err != nil:
		return err
	case p.DeletionTimestamp != nil:
		return &refusal{reason: extensions.ReasonWarmPoolNotFound, message: fmt.Sprintf("%s: warm pool %q is being deleted; name another", at, key.Name)}
	}
	w.pool = p
	w.op = r.claims.Begin(w.claim.Namespace, pool.TemplateOf(p), w)
	return w.op.Resolve(ctx)
}

// Resolved implements [claiming.Owner]: it validates the claim against the current template.
func (w *work) Resolved(t claiming.Template, err error) error {
	p, key := w.pool, pool.TemplateOf(w.pool)
	none := err == nil && key.Namespace != p.Namespace && (t.Spec.Barchan == nil || !t.Spec.Barchan.Public)
	switch {
	case none, errors.Is(err, errs.ErrNotFound):
		return &refusal{reason: extensions.ReasonTemplateNotFound, message: fmt.Sprintf("spec.warmPoolRef.name: warm pool %q is of template %s, which does not exist, or is not public; create it, or name another pool", p.Name, key)}
	case errors.Is(err, errs.ErrInvalid):
		return &refusal{reason: extensions.ReasonTemplateInvalid, message: fmt.Sprintf("template %s of warm pool %q: %s", key, p.Name, errs.Text(err))}
	case err != nil:
		return err
	}
	x, no := newPlan(w.claim, p, t.SandboxTemplate, t.Revision, w.late)
	if no != nil {
		return no
	}
	w.plan = x
	return nil
}

// Warm implements [claiming.Owner].
func (w *work) Warm() bool { return w.plan.cold == "" }

// Adopt implements [claiming.Owner].
func (w *work) Adopt(member *agents.Sandbox, _ claiming.Template) *agents.Sandbox {
	w.annotate(member.Name)
	return w.plan.adopt(member)
}

// Binds implements [claiming.Owner].
func (w *work) Binds() bool { return len(w.plan.env) > 0 }

// New implements [claiming.Owner].
func (w *work) New(claiming.Template) *agents.Sandbox {
	w.annotate(w.claim.Name)
	return w.plan.fresh()
}

// refuse records an error that only a user can fix, and deletes a taken, unassigned sandbox.
func (r *reconciler) refuse(ctx context.Context, w *work, no *refusal) error {
	owned, err := r.owned(ctx, w)
	if err != nil {
		return err
	}
	for i := range owned {
		if err := r.drop(ctx, w, owned[i]); err != nil {
			return err
		}
	}
	w.known.leaveQueue()
	w.known.since, w.known.waits, w.known.blocked = time.Time{}, time.Time{}, time.Time{}
	if changed, err := r.write(ctx, w, waiting(w.claim, no.reason, no.message)); err != nil || !changed {
		return err
	}
	r.Log.InfoContext(ctx, "claim refused", telemetry.Namespace, w.req.Namespace, telemetry.Name, w.req.Name, telemetry.Reason, no.reason)
	r.recordEvent(w, corev1.EventTypeWarning, no.reason, no.message)
	return nil
}

// bind sends the claim's variables once to the agent of a sandbox that ran before the claim.
func (r *reconciler) bind(ctx context.Context, w *work, s *agents.Sandbox) error {
	if !w.Binds() || s.Labels[agents.LabelLaunchType] == agents.LaunchCold || w.known.bound == s.UID {
		return nil
	}
	if err := r.claims.Bind(ctx, s, envd.InitRequest{EnvVars: w.plan.env}); err != nil {
		return fmt.Errorf("bind sandbox %s: %w", s.Name, err)
	}
	w.known.bound = s.UID
	return nil
}

// announce writes the sandbox to the claim's status; the assignment is final.
func (r *reconciler) announce(ctx context.Context, w *work, s *agents.Sandbox) error {
	w.annotate(s.Name)
	_, err := r.write(ctx, w, mirrored(w.claim, s))
	if apierrors.IsNotFound(err) { // the claim is gone
		return r.drop(ctx, w, s)
	}
	if err != nil {
		return err
	}
	w.known.hold.For(s.Name) // after a write of unknown outcome
	w.known.spend()
	launch := s.Labels[agents.LabelLaunchType]
	took := time.Since(w.known.since)
	r.took.WithLabelValues(launch).Observe(took.Seconds())
	r.upstream.WithLabelValues(launch, r.templates.label(s.Annotations[agents.AnnotationTemplateRef])).Observe(float64(took.Milliseconds()))
	r.Log.InfoContext(ctx, "claim served", telemetry.Namespace, s.Namespace, telemetry.Name, w.req.Name, telemetry.Sandbox, s.Name, "launch", launch, telemetry.Duration, took)
	if launch != agents.LaunchWarm { // the status has all that there is to say of a warm one
		r.recordEvent(w, corev1.EventTypeNormal, "Claimed", fmt.Sprintf("sandbox %s, started %s, is the claim's", s.Name, launch))
	}
	return nil
}

// mirror updates the status of a claim with an assigned sandbox.
func (r *reconciler) mirror(ctx context.Context, w *work) error {
	s, cached, err := r.sandboxOf(ctx, w.claim)
	if err != nil {
		return err
	}
	if cached {
		r.attempts.forget(w.req)
	}
	if err := r.dropOthers(ctx, w); err != nil {
		return err
	}
	status := missing(w.claim)
	if s != nil {
		status = mirrored(w.claim, s)
	}
	changed, err := r.write(ctx, w, status)
	if err != nil {
		return err
	}
	if s == nil && changed {
		r.recordEvent(w, corev1.EventTypeWarning, extensions.ReasonSandboxMissing, readyOf(status).Message)
	}
	return nil
}

// sandboxOf returns the assigned sandbox, nil if it is deleted; cached reports whether the cache shows it
// as owned by the claim. Otherwise it is read from the API server.
func (r *reconciler) sandboxOf(ctx context.Context, c *extensions.SandboxClaim) (s *agents.Sandbox, cached bool, err error) {
	key := client.ObjectKey{Namespace: c.Namespace, Name: c.Status.Sandbox.Name}
	s, err = r.Cache.Sandbox(ctx, key)
	if err == nil && owns(c, s) {
		return s, true, nil
	}
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		return nil, false, err
	}
	s = &agents.Sandbox{}
	if err := r.Client.Get(ctx, key, s); err != nil {
		if apierrors.IsNotFound(err) {
			return nil, false, nil
		}
		return nil, false, fmt.Errorf("read sandbox %s: %w", key, err)
	}
	if !owns(c, s) {
		return nil, false, nil
	}
	return s, false, nil
}

// owns reports whether this claim, by UID, controls a sandbox.
func owns(c *extensions.SandboxClaim, s *agents.Sandbox) bool {
	owner := metav1.GetControllerOfNoCopy(s)
	return owner != nil && owner.UID == c.UID
}

// dropOthers deletes owned sandboxes other than the assigned one: a write whose response was lost may
// take effect late.
func (r *reconciler) dropOthers(ctx context.Context, w *work) error {
	all, err := r.Cache.Owned(ctx, w.claim.UID)
	if err != nil {
		return err
	}
	for _, s := range all {
		if s.Name != w.claim.Status.Sandbox.Name {
			err = errors.Join(err, r.drop(ctx, w, s))
		}
	}
	return err
}

// drop deletes an owned sandbox that is not assigned. It first reads the claim from the API server, because
// the cached claim may be stale.
func (r *reconciler) drop(ctx context.Context, w *work, s *agents.Sandbox) error {
	if s.DeletionTimestamp != nil || r.Assumed.Deleted(s.UID) {
		return nil
	}
	now := &extensions.SandboxClaim{}
	err := r.Client.Get(ctx, w.req.NamespacedName, now)
	if err == nil && now.UID == w.claim.UID && now.Status.Sandbox.Name == s.Name {
		return apierrors.NewConflict(schema.GroupResource{Group: extensions.GroupVersion.Group, Resource: "sandboxclaims"}, now.Name, errNamed)
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("read the claim: %w", err)
	}
	return r.remove(ctx, s)
}

var errNamed = errors.New("the claim already names this sandbox")

// remove deletes a sandbox of the claim, conditional on the version read.
func (r *reconciler) remove(ctx context.Context, s *agents.Sandbox) error {
	if s.DeletionTimestamp != nil || r.Assumed.Deleted(s.UID) {
		return nil
	}
	err := r.Client.Delete(ctx, s, client.Preconditions{UID: &s.UID})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	failpoint.Reach("claimobject/unmade")
	r.Assumed.AssumeDeleted(s)
	return nil
}

// recordEvent records a Kubernetes event.
func (r *reconciler) recordEvent(w *work, kind, reason, note string) {
	if r.Events != nil {
		r.Events.Eventf(w.claim, nil, kind, reason, "Claim", "%s", note)
	}
}
