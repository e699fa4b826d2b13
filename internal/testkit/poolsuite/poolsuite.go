// Package poolsuite tests the controller of warm pools against any API server, with a
// fake node that marks sandboxes ready. It does not construct the controller: the caller passes a
// constructor.
package poolsuite

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
	"github.com/barchan-dev/barchan/internal/testkit/watched"
)

// Tuning are a test's settings of the controller.
type Tuning struct {
	// StuckAfter and GoneAfter are as in the controller's Config; zero leaves the default.
	StuckAfter, GoneAfter time.Duration
}

// Config is what the suite tests.
type Config struct {
	// REST connects to an API server that serves our kinds, with all permissions.
	REST *rest.Config
	// Start runs a cache and the controller, both over the REST config that it is given, and
	// returns once they run. The function that it returns ends them and waits until they have.
	Start func(t *testing.T, cfg *rest.Config, tuning Tuning) (stop func())
	// Collects is set where the API server deletes objects without an owner. A kube-apiserver
	// without its controller manager does not.
	Collects bool
}

// Run runs the suite.
func Run(t *testing.T, cfg Config) {
	t.Helper()
	for _, test := range []struct {
		name string
		run  func(*testing.T, Config)
	}{
		{"Fill", fill},
		{"Scale", scale},
		{"ScaleDownSparesTheClaimed", scaleDownSpares},
		{"Recreate", recreate},
		{"RecreateWithinBounds", recreateBounded},
		{"SwitchTemplate", switchTemplate},
		{"OnReplenish", onReplenish},
		{"Stuck", stuck},
		{"Barred", barred},
		{"Dead", dead},
		{"SlowDeletion", slowDeletion},
		{"PoolDeleted", poolDeleted},
		{"Orphans", orphans},
		{"TemplateDeletedAndBack", templateGone},
		{"TemplatePrivate", templatePrivate},
		{"CacheHeldBack", heldBack},
		{"Restart", restart},
		{"RestartInTheMiddle", restartInTheMiddle},
		{"Autoscale", autoscale},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, cfg) })
	}
}

// fixture is one namespace with nodes that are none.
type fixture struct {
	t         *testing.T
	cfg       Config
	client    client.WithWatch
	namespace string

	bell *watched.Bell

	mu      sync.Mutex
	boxes   map[types.UID]*agents.Sandbox        // last version from the watch; +checklocks:mu
	seen    map[types.UID]struct{}               // sandboxes ever; +checklocks:mu
	made    map[types.UID]map[types.UID]struct{} // members ever, by pool; +checklocks:mu
	peak    map[types.UID]int                    // most members of a pool that ever existed at once; +checklocks:mu
	low     map[types.UID]int                    // fewest ready members since mark; +checklocks:mu
	holding bool                                 // nothing that is deleted goes; +checklocks:mu
	claims  int                                  // +checklocks:mu
}

// newFixture makes a namespace and starts its stand-in.
func newFixture(t *testing.T, cfg Config) *fixture {
	t.Helper()
	c := watched.Client(t, cfg.REST)
	w := &fixture{
		t: t, cfg: cfg, client: c, bell: watched.NewBell(), boxes: map[types.UID]*agents.Sandbox{}, seen: map[types.UID]struct{}{},
		made: map[types.UID]map[types.UID]struct{}{}, peak: map[types.UID]int{}, low: map[types.UID]int{},
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "pools-"}}
	if err := c.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	w.namespace = ns.Name
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { watched.Follow(ctx, t, c, ns.Name, &agents.SandboxList{}, w.saw) })
	running.Go(func() {
		watched.Follow(ctx, t, c, ns.Name, &extensions.SandboxWarmPoolList{}, func(context.Context, watch.Event) { w.bell.Ring() })
	})
	t.Cleanup(func() { cancel(); running.Wait() })
	return w
}

// saw records an event and acts as a node.
func (w *fixture) saw(ctx context.Context, e watch.Event) {
	s, ok := e.Object.(*agents.Sandbox)
	if !ok {
		return
	}
	holding := w.note(e.Type, s.DeepCopy())
	defer w.bell.Ring()
	if e.Type == watch.Deleted || (holding && s.DeletionTimestamp != nil) {
		return
	}
	err := fakecluster.Reconcile(ctx, w.client, s)
	if err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil { // a conflict is followed by its event
		w.t.Errorf("stand in for the node of %s: %v", s.Name, err)
	}
}

func (w *fixture) note(kind watch.EventType, s *agents.Sandbox) (holding bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.boxes[s.UID], w.seen[s.UID] = s, struct{}{}
	if kind == watch.Deleted {
		delete(w.boxes, s.UID)
	}
	if uid := pool.MemberOf(s); uid != "" {
		if w.made[uid] == nil {
			w.made[uid] = map[types.UID]struct{}{}
		}
		w.made[uid][s.UID] = struct{}{}
	}
	all, spare := map[types.UID]int{}, map[types.UID]int{}
	for _, b := range w.boxes {
		uid := pool.MemberOf(b)
		all[uid]++
		if pool.Spare(b) {
			spare[uid]++
		}
	}
	for uid, n := range all {
		w.peak[uid] = max(w.peak[uid], n)
	}
	for uid := range w.low {
		w.low[uid] = min(w.low[uid], spare[uid])
	}
	return w.holding
}

// mark forgets peaks and lows of a pool.
func (w *fixture) mark(uid types.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.peak[uid], w.low[uid] = 0, 1<<30
}

// extremes counts the sandboxes of all events until now.
func (w *fixture) extremes(uid types.UID) (made, peak, low int) {
	w.t.Helper()
	all := w.list()
	w.until("the watch has delivered all that exist", func() (bool, string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		for i := range all {
			if _, seen := w.seen[all[i].UID]; !seen {
				return false, all[i].Name + " is unknown"
			}
		}
		return true, ""
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.made[uid]), w.peak[uid], w.low[uid]
}

// hold has what is deleted stay, until hold(false).
func (w *fixture) hold(held bool) {
	w.mu.Lock()
	w.holding = held
	var ending []*agents.Sandbox
	for _, s := range w.boxes {
		if s.DeletionTimestamp != nil {
			ending = append(ending, s.DeepCopy())
		}
	}
	w.mu.Unlock()
	for _, s := range ending {
		if err := fakecluster.Reconcile(w.t.Context(), w.client, s); !held && err != nil && !apierrors.IsConflict(err) { // as in saw
			w.t.Fatal(err)
		}
	}
}

// start runs the controller until the test ends, or stop is called.
func (w *fixture) start(tuning Tuning) (stop func()) { return w.startOver(w.cfg.REST, tuning) }

func (w *fixture) startOver(cfg *rest.Config, tuning Tuning) (stop func()) {
	w.t.Helper()
	stop = sync.OnceFunc(w.cfg.Start(w.t, cfg, tuning))
	w.t.Cleanup(stop)
	return stop
}

// until waits until done returns true. It calls done at each event; done also describes the current state.
func (w *fixture) until(what string, done func() (bool, string)) {
	w.t.Helper()
	w.bell.Until(w.t, what, done)
}

// members are a pool's, as the API server has them.
func (w *fixture) members(p *extensions.SandboxWarmPool) []agents.Sandbox {
	w.t.Helper()
	return w.list(client.MatchingLabels{agents.LabelWarmPoolSandbox: string(p.UID)})
}

func (w *fixture) list(opts ...client.ListOption) []agents.Sandbox {
	w.t.Helper()
	all, err := w.find(opts...)
	if err != nil {
		w.t.Fatal(err)
	}
	return all
}

// find is list for any goroutine.
func (w *fixture) find(opts ...client.ListOption) ([]agents.Sandbox, error) {
	var list agents.SandboxList
	err := w.client.List(w.t.Context(), &list, append(opts, client.InNamespace(w.namespace))...)
	return list.Items, err
}

func (w *fixture) get(p *extensions.SandboxWarmPool) *extensions.SandboxWarmPool {
	w.t.Helper()
	now := &extensions.SandboxWarmPool{}
	if err := w.client.Get(w.t.Context(), client.ObjectKeyFromObject(p), now); err != nil {
		w.t.Fatal(err)
	}
	return now
}

func (w *fixture) create(o client.Object) {
	w.t.Helper()
	if o.GetNamespace() == "" {
		o.SetNamespace(w.namespace)
	}
	if err := w.client.Create(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
}

// template makes the template t.
func (w *fixture) template(image string) *extensions.SandboxTemplate {
	w.t.Helper()
	t := fakecluster.Template(w.namespace, "t", image)
	w.create(t)
	return t
}

// change updates an object as often as it takes.
func change[T client.Object](w *fixture, o T, edit func(T)) T {
	w.t.Helper()
	for {
		if err := w.client.Get(w.t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			w.t.Fatal(err)
		}
		edit(o)
		err := w.client.Update(w.t.Context(), o)
		if err == nil {
			return o
		}
		if !apierrors.IsConflict(err) {
			w.t.Fatal(err)
		}
	}
}

func setImage(image string) func(*extensions.SandboxTemplate) {
	return func(t *extensions.SandboxTemplate) { t.Spec.PodTemplate.Spec.Containers[0].Image = image }
}

func setReplicas(n int32) func(*extensions.SandboxWarmPool) {
	return func(p *extensions.SandboxWarmPool) { p.Spec.Replicas = &n }
}

// pool makes a pool of the template t.
func (w *fixture) pool(replicas int32, changes ...func(*extensions.SandboxWarmPool)) *extensions.SandboxWarmPool {
	w.t.Helper()
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
	p.Spec.Replicas, p.Spec.SandboxTemplateRef.Name = &replicas, "t"
	for _, f := range changes {
		f(p)
	}
	w.create(p)
	return p
}

func recreating(p *extensions.SandboxWarmPool) {
	p.Spec.UpdateStrategy = &extensions.UpdateStrategy{Type: extensions.UpdateRecreate}
}

// revision is that of the template t.
func (w *fixture) revision() string {
	w.t.Helper()
	t := &extensions.SandboxTemplate{}
	if err := w.client.Get(w.t.Context(), types.NamespacedName{Namespace: w.namespace, Name: "t"}, t); err != nil {
		w.t.Fatal(err)
	}
	r, _, err := pool.Revision(t)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// full waits until exactly n members exist, all ready and of the template as it is, and the
// pool says so.
func (w *fixture) full(p *extensions.SandboxWarmPool, n int) *extensions.SandboxWarmPool {
	w.t.Helper()
	revision, now := w.revision(), p
	w.until(fmt.Sprintf("a pool of %d", n), func() (bool, string) {
		now = w.get(p)
		members, good := w.members(p), 0
		for i := range members {
			if pool.Spare(&members[i]) && pool.Fits(&members[i], pool.TemplateOf(p), revision) {
				good++
			}
		}
		st := now.Status
		reported := st.Barchan != nil && int(st.Barchan.CurrentReadyReplicas) == n && int(st.Replicas) == n && st.CurrentRevision == revision &&
			st.ObservedGeneration == now.Generation && condition(now, extensions.PoolReady).Status == metav1.ConditionTrue &&
			condition(now, extensions.PoolProgressing).Status == metav1.ConditionFalse
		return reported && good == n && len(members) == n, w.describe(now)
	})
	return now
}

// awaitReason waits until the condition Ready of a pool has a reason.
func (w *fixture) awaitReason(p *extensions.SandboxWarmPool, reason string) *extensions.SandboxWarmPool {
	w.t.Helper()
	now := p
	w.until("the pool gives the reason "+reason, func() (bool, string) {
		now = w.get(p)
		return now.Status.ObservedGeneration == now.Generation && condition(now, extensions.PoolReady).Reason == reason, w.describe(now)
	})
	return now
}

func condition(p *extensions.SandboxWarmPool, kind string) metav1.Condition {
	for _, c := range p.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return metav1.Condition{}
}

func (w *fixture) describe(p *extensions.SandboxWarmPool) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%+v %+v;", p.Status, p.Status.Barchan)
	for _, s := range w.list() {
		fmt.Fprintf(&text, " %s(%s %.4s)", s.Name, sandbox.PhaseOf(&s), pool.RevisionOf(&s))
	}
	return text.String()
}

// take adopts a spare member as a claim does. It is nil if there is none.
func (w *fixture) take(p *extensions.SandboxWarmPool) *agents.Sandbox {
	w.t.Helper()
	s, err := w.tryTake(p, w.revision())
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// tryTake is take for any goroutine.
func (w *fixture) tryTake(p *extensions.SandboxWarmPool, revision string) (*agents.Sandbox, error) {
	members, err := w.find(client.MatchingLabels{agents.LabelWarmPoolSandbox: string(p.UID)})
	if err != nil {
		return nil, err
	}
	for i := range members {
		if !pool.Spare(&members[i]) || !pool.Fits(&members[i], pool.TemplateOf(p), revision) {
			continue
		}
		mine := pool.Adopt(&members[i], nil)
		err := w.client.Update(w.t.Context(), mine)
		if err == nil {
			return mine, nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return nil, err
		}
	}
	return nil, nil //nolint:nilnil // there is none
}

// cold starts a sandbox through a pool that had none ready.
func (w *fixture) cold(p *extensions.SandboxWarmPool) *agents.Sandbox {
	w.t.Helper()
	t := &extensions.SandboxTemplate{}
	if err := w.client.Get(w.t.Context(), types.NamespacedName{Namespace: w.namespace, Name: "t"}, t); err != nil {
		w.t.Fatal(err)
	}
	s := pool.NewSandbox(t, w.revision(), w.namespace)
	w.mu.Lock()
	w.claims++
	s.Name = fmt.Sprintf("cold-%d", w.claims)
	w.mu.Unlock()
	s.Labels[pool.LabelOrigin] = string(p.UID)
	w.create(s)
	return s
}
