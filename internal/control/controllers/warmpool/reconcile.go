package warmpool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

// Reconcile makes one pass over one pool.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	if uid, yes := isOrphans(req); yes {
		return r.collect(ctx, req.Namespace, uid)
	}
	p := &extensions.SandboxWarmPool{}
	if err := r.Client.Get(ctx, req.NamespacedName, p); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("read warm pool %s: %w", req.NamespacedName, err)
	}
	for _, uid := range r.predecessors(req.NamespacedName, p.UID) {
		if again, err := r.collect(ctx, req.Namespace, uid); err != nil || again.RequeueAfter > 0 {
			return again, err
		}
	}
	if p.UID == "" || p.DeletionTimestamp != nil {
		return reconcile.Result{}, nil
	}
	r.names.Store(p.UID, req.NamespacedName)
	result, err := r.pass(ctx, p)
	if apierrors.IsConflict(err) {
		// Another writer was first: reconcile again on its version.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	return result, err
}

// reconcileState is the input and the result of a pass.
type reconcileState struct {
	*poolState
	pool     *extensions.SandboxWarmPool
	template *extensions.SandboxTemplate
	usage    usage
	target   poolTarget
	members  []member
	now      time.Time
	until    time.Time // when time alone changes the desired count
	problem  problem   // of the template
	warm     warmUpState
	unseen   bool // the cache lacks some writes
	todo     actions
	made     int
	writeAt  time.Time // when to write the status, which has changed in numbers alone; zero: not
	refillAt time.Time // when to create members that are delayed; zero: none is
}

// problem is why a pool's template cannot be used; empty for a usable one.
type problem struct{ reason, text string }

func (r *reconciler) pass(ctx context.Context, p *extensions.SandboxWarmPool) (reconcile.Result, error) {
	extensions.SetWarmPoolDefaults(p)
	s, err := r.observe(ctx, p)
	if err != nil {
		return reconcile.Result{}, err
	}
	s.todo = plan(s.target, s.members, s.now)
	s.delayRefill()
	err = r.remove(ctx, s)
	if err == nil {
		err = r.create(ctx, s)
	}
	if writeErr := r.writeStatus(ctx, s); writeErr != nil {
		return reconcile.Result{}, errors.Join(err, writeErr)
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	return s.again(), nil
}

// observe reads the state that the pass decides on.
func (r *reconciler) observe(ctx context.Context, p *extensions.SandboxWarmPool) (*reconcileState, error) {
	state, _ := r.states.LoadOrStore(p.UID, &poolState{})
	s := &reconcileState{pool: p, poolState: state.(*poolState)} //nolint:forcetypeassert // all values are
	revision, err := r.findTemplate(ctx, s)
	if err != nil {
		return nil, err
	}
	s.now = time.Now()
	if s.members, s.unseen, err = r.members(ctx, p, s.now); err != nil {
		return nil, err
	}
	claimed, err := r.Objects.ClaimedFrom(ctx, p.UID)
	if err != nil {
		return nil, fmt.Errorf("find claimed sandboxes of warm pool %s/%s: %w", p.Namespace, p.Name, err)
	}
	var last time.Time
	if b := p.Status.Barchan; b != nil && b.LastClaimTime != nil {
		last = b.LastClaimTime.Time
	}
	s.usage = use(claimed, pool.TemplateOf(p), revision, last)
	s.target = poolTarget{revision: revision, inUse: s.usage.current, stuckAfter: r.StuckAfter, goneAfter: r.GoneAfter}
	s.target.recreate = p.Spec.UpdateStrategy.Type == extensions.UpdateRecreate
	s.target.desired, s.until = desired(p, s.usage, s.now)
	s.target.surge, s.target.unavailable = bounds(p, s.target.desired)
	if revision != "" {
		s.backoff.observe(revision, s.members, s.now)
		s.target.hold, s.target.probe = s.backoff.hold(s.now), s.backoff.probe()
		if s.warm, err = r.warmUpState(ctx, s); err != nil {
			return nil, err
		}
		s.target.warming = s.now.Before(s.warm.until)
	}
	return s, nil
}

// delayRefill has new members wait while claims arrive and at least half of the members are ready: a claim costs the API
// server as much as a refill, and has a client that waits.
func (s *reconcileState) delayRefill() {
	var wait time.Duration
	if s.todo.create > 0 && 2*count(s.target, s.members).currentReady >= s.target.desired {
		s.delayed = cmp.Or(s.delayed, s.now)
		wait = controllers.ClaimDelay(func() time.Time { return s.usage.last }, s.delayed)
	}
	if wait <= 0 {
		s.delayed = time.Time{}
		return
	}
	s.todo.create, s.refillAt = 0, s.now.Add(wait)
}

// findTemplate reads the template. An unusable one sets s.problem and has no revision.
func (r *reconciler) findTemplate(ctx context.Context, s *reconcileState) (revision string, err error) {
	key := pool.TemplateOf(s.pool)
	t, revision, err := r.Objects.CurrentTemplate(ctx, key)
	switch {
	case errors.Is(err, errs.ErrNotFound):
		s.problem = problem{extensions.ReasonTemplateNotFound, fmt.Sprintf("there is no template %s", key)}
	case errors.Is(err, errs.ErrInvalid):
		s.problem = problem{extensions.ReasonTemplateInvalid, errs.Text(err)}
	case err != nil:
		return "", fmt.Errorf("read the template of warm pool %s/%s: %w", s.pool.Namespace, s.pool.Name, err)
	case t.DeletionTimestamp != nil:
		s.problem = problem{extensions.ReasonTemplateNotFound, fmt.Sprintf("template %s is being deleted", key)}
	case t.Namespace != s.pool.Namespace && (t.Spec.Barchan == nil || !t.Spec.Barchan.Public):
		s.problem = problem{extensions.ReasonTemplatePrivate, fmt.Sprintf("template %s is not public (its spec.barchan.public)", key)}
	default:
		s.template = t
		return revision, nil
	}
	return "", nil
}

// members returns the members in the cache, corrected by writes that it lacks.
func (r *reconciler) members(ctx context.Context, p *extensions.SandboxWarmPool, now time.Time) (all []member, unseen bool, err error) {
	entries := r.expected.open(p.UID, now)
	var live map[types.UID]member
	if entries.read {
		var list agents.SandboxList
		label := client.MatchingLabels{agents.LabelWarmPoolSandbox: string(p.UID)}
		if err := r.Client.List(ctx, &list, client.InNamespace(p.Namespace), label); err != nil {
			return nil, false, fmt.Errorf("list members of warm pool %s/%s: %w", p.Namespace, p.Name, err)
		}
		listed := make([]*agents.Sandbox, len(list.Items))
		for i := range list.Items {
			listed[i] = &list.Items[i]
		}
		live = r.assess(listed, pool.TemplateOf(p), now)
	}
	found, err := r.Objects.Members(ctx, p.UID)
	if err != nil {
		return nil, false, fmt.Errorf("find members of warm pool %s/%s: %w", p.Namespace, p.Name, err)
	}
	cached := r.assess(found, pool.TemplateOf(p), now)
	if live != nil {
		entries = r.expected.correct(p.UID, cached, live, now)
	} else {
		r.expected.settle(p.UID, cached)
	}
	return entries.over(cached), len(entries.made)+len(entries.gone) > 0, nil
}

func (r *reconciler) assess(found []*agents.Sandbox, template types.NamespacedName, now time.Time) map[types.UID]member {
	all := make(map[types.UID]member, len(found))
	for _, s := range found {
		all[s.UID] = assess(s, template, now, r.StuckAfter)
	}
	return all
}

// assess returns the state of a member of a pool of this template.
func assess(s *agents.Sandbox, template types.NamespacedName, now time.Time, stuckAfter time.Duration) member {
	m := member{
		name: s.Name, uid: s.UID, version: s.ResourceVersion, revision: cmp.Or(pool.RevisionFor(s, template), otherTemplate),
		created: s.CreationTimestamp.Time, since: s.CreationTimestamp.Time,
	}
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); c != nil && c.Status != "True" {
		m.note = c.Message
		if c.LastTransitionTime.After(m.since) {
			m.since = c.LastTransitionTime.Time
		}
	}
	switch phase := sandbox.PhaseOf(s); {
	case phase == sandbox.Stopping:
		m.state, m.since = ending, endingSince(s)
	case phase == sandbox.Dead:
		m.state = failed
		if _, text, ok := sandbox.Failure(s); ok {
			m.note = text
		}
	case pool.Spare(s):
		m.state, m.since = ready, time.Time{}
	case sandbox.EntrypointFailed(s):
		m.state = failed
	case bar(s) != "":
		m.state, m.note = startRefused, bar(s)
	case unschedulable(s):
		m.state = waiting
		m.note = meta.FindStatusCondition(s.Status.Conditions, agents.ConditionPodScheduled).Message
	case now.Sub(m.since) >= stuckAfter:
		m.state = failed
		m.note = fmt.Sprintf("not ready after %s: %s", stuckAfter, cmp.Or(m.note, "it has no status"))
	}
	return m
}

// bar is why a member may not start until its template, its object, an object that it refers to, or the server's settings
// allow it; else empty. A
// replacement would be refused too.
func bar(s *agents.Sandbox) string {
	if message, lacks := sandbox.LacksObject(s); lacks {
		return message
	}
	message, is := sandbox.RefusedSecrets(s)
	if !is {
		return ""
	}
	return cmp.Or(message, sandbox.ReasonSecrets)
}

// endingSince is when the deletion of a sandbox was requested.
func endingSince(s *agents.Sandbox) time.Time {
	at := s.DeletionTimestamp.Time
	if s.DeletionGracePeriodSeconds != nil {
		at = at.Add(-time.Duration(*s.DeletionGracePeriodSeconds) * time.Second)
	}
	return at
}

// again is when to reconcile without an event.
func (s *reconcileState) again() reconcile.Result {
	at := sooner(sooner(sooner(s.until, s.writeAt), s.refillAt), next(s.target, s.members, s.now))
	if s.backoff.hold(s.now) {
		at = sooner(at, s.backoff.retryAt)
	}
	if s.target.warming {
		at = sooner(at, s.warm.until)
	}
	if s.made < s.todo.create { // one pass does not create them all
		at = sooner(at, s.now.Add(time.Millisecond))
	}
	if s.unseen || len(s.todo.remove) > 0 || s.made > 0 { // if the events are lost
		at = sooner(at, s.now.Add(expectationTimeout+time.Second))
	}
	if at.IsZero() {
		return reconcile.Result{}
	}
	return reconcile.Result{RequeueAfter: max(time.Until(at), time.Millisecond)}
}
