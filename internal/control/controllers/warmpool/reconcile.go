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
)

// Reconcile does one pass over one pool.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	if uid, yes := isOrphans(req); yes {
		return r.collect(ctx, req.Namespace, uid)
	}
	p := &extensions.SandboxWarmPool{}
	if err := r.client.Get(ctx, req.NamespacedName, p); client.IgnoreNotFound(err) != nil {
		return reconcile.Result{}, fmt.Errorf("read warm pool %s: %w", req.NamespacedName, err)
	}
	for _, uid := range r.names.others(req.NamespacedName, p.UID) {
		if again, err := r.collect(ctx, req.Namespace, uid); err != nil || again.RequeueAfter > 0 {
			return again, err
		}
	}
	if p.UID == "" || p.DeletionTimestamp != nil { // gone, or going
		return reconcile.Result{}, nil
	}
	r.names.learn(p.UID, req.NamespacedName)
	result, err := r.pass(ctx, p)
	if apierrors.IsConflict(err) {
		// Somebody else wrote first: look again, at what they wrote.
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	}
	return result, err
}

// reconcileState is what a pass decides upon, and what it did.
type reconcileState struct {
	pool     *extensions.SandboxWarmPool
	template *extensions.SandboxTemplate
	usage    usage
	wish     poolTarget
	members  []member
	trouble  *failureBackoff
	now      time.Time
	until    time.Time // when time alone changes what is desired
	problem  problem   // of the template
	warm     warmUpState
	unseen   bool // the cache does not show all that was done
	todo     actions
	made     int
}

// problem is why a pool's template cannot be used; empty if it can.
type problem struct{ reason, text string }

func (r *reconciler) pass(ctx context.Context, p *extensions.SandboxWarmPool) (reconcile.Result, error) {
	extensions.SetWarmPoolDefaults(p)
	s, err := r.look(ctx, p)
	if err != nil {
		return reconcile.Result{}, err
	}
	s.todo = plan(s.wish, s.members, s.now)
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

// look gathers what is.
func (r *reconciler) look(ctx context.Context, p *extensions.SandboxWarmPool) (*reconcileState, error) {
	s := &reconcileState{pool: p, trouble: r.trouble(p.UID)}
	revision, err := r.findTemplate(ctx, s)
	if err != nil {
		return nil, err
	}
	s.now = time.Now()
	if s.members, s.unseen, err = r.members(ctx, p, s.now); err != nil {
		return nil, err
	}
	claimed, err := r.objects.ClaimedFrom(ctx, p.UID)
	if err != nil {
		return nil, fmt.Errorf("find what was claimed of warm pool %s/%s: %w", p.Namespace, p.Name, err)
	}
	s.usage = use(claimed, revision, lastClaim(p))
	s.wish = poolTarget{revision: revision, inUse: s.usage.current, stuckAfter: r.stuckAfter, goneAfter: r.goneAfter}
	s.wish.recreate = p.Spec.UpdateStrategy.Type == extensions.UpdateRecreate
	s.wish.desired, s.until = desired(p, s.usage, s.now)
	s.wish.surge, s.wish.unavailable = bounds(p, s.wish.desired)
	if revision != "" {
		s.trouble.look(revision, s.members, s.now)
		s.wish.hold, s.wish.probe = s.trouble.hold(s.now), s.trouble.probe()
		if s.warm, err = r.warmUpState(ctx, s); err != nil {
			return nil, err
		}
		s.wish.warming = s.now.Before(s.warm.until)
	}
	return s, nil
}

func lastClaim(p *extensions.SandboxWarmPool) time.Time {
	if b := p.Status.Barchan; b != nil && b.LastClaimTime != nil {
		return b.LastClaimTime.Time
	}
	return time.Time{}
}

// findTemplate reads the template; what is wrong with it is noted, and then it has no revision.
func (r *reconciler) findTemplate(ctx context.Context, s *reconcileState) (revision string, err error) {
	key := pool.TemplateOf(s.pool)
	t, revision, err := r.objects.CurrentTemplate(ctx, key)
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

// members are those of a pool as the cache shows them, corrected by what it does not show yet,
// if there is such.
func (r *reconciler) members(ctx context.Context, p *extensions.SandboxWarmPool, now time.Time) (all []member, unseen bool, err error) {
	entries := r.ledger.open(p.UID, now)
	var live map[types.UID]member
	if entries.ask {
		var list agents.SandboxList
		label := client.MatchingLabels{agents.LabelWarmPoolSandbox: string(p.UID)}
		if err := r.client.List(ctx, &list, client.InNamespace(p.Namespace), label); err != nil {
			return nil, false, fmt.Errorf("list members of warm pool %s/%s: %w", p.Namespace, p.Name, err)
		}
		live = r.assess(list.Items, now)
	}
	found, err := r.objects.Members(ctx, p.UID)
	if err != nil {
		return nil, false, fmt.Errorf("find members of warm pool %s/%s: %w", p.Namespace, p.Name, err)
	}
	cached := r.assess(found, now)
	if live != nil {
		entries = r.ledger.correct(p.UID, cached, live, now)
	} else {
		r.ledger.settle(p.UID, cached)
	}
	return entries.over(cached), len(entries.made)+len(entries.gone) > 0, nil
}

func (r *reconciler) assess(found []agents.Sandbox, now time.Time) map[types.UID]member {
	all := make(map[types.UID]member, len(found))
	for i := range found {
		all[found[i].UID] = assess(&found[i], now, r.stuckAfter)
	}
	return all
}

// assess says what a member is good for.
func assess(s *agents.Sandbox, now time.Time, stuckAfter time.Duration) member {
	m := member{
		name: s.Name, uid: s.UID, version: s.ResourceVersion, revision: pool.RevisionOf(s),
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
		m.note = fmt.Sprintf("not ready after %s: %s", stuckAfter, m.note)
	}
	return m
}

// bar is why a member may not start before its template, its own object or the server's settings allow
// it; empty if it may. Another in its place would be refused as well.
func bar(s *agents.Sandbox) string {
	message, is := sandbox.RefusedSecrets(s)
	if !is {
		return ""
	}
	return cmp.Or(message, sandbox.ReasonSecrets)
}

// endingSince is when a sandbox was told to go.
func endingSince(s *agents.Sandbox) time.Time {
	at := s.DeletionTimestamp.Time
	if s.DeletionGracePeriodSeconds != nil {
		at = at.Add(-time.Duration(*s.DeletionGracePeriodSeconds) * time.Second)
	}
	return at
}

// again is when to look without any event.
func (s *reconcileState) again() reconcile.Result {
	at := sooner(s.until, next(s.wish, s.members, s.now))
	if s.trouble.hold(s.now) {
		at = sooner(at, s.trouble.retryAt)
	}
	if s.wish.warming {
		at = sooner(at, s.warm.until)
	}
	if s.made < s.todo.create { // more than one pass makes
		at = sooner(at, s.now.Add(time.Millisecond))
	}
	if s.unseen || len(s.todo.remove) > 0 || s.made > 0 { // should the events not come
		at = sooner(at, s.now.Add(ledgerPatience+time.Second))
	}
	if at.IsZero() {
		return reconcile.Result{}
	}
	return reconcile.Result{RequeueAfter: max(time.Until(at), time.Millisecond)}
}
