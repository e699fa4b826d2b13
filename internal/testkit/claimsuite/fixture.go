package claimsuite

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
	"github.com/barchan-dev/barchan/internal/testkit/lag"
)

// Each fixture has one pool, of one template.
const (
	templateName = "blueprint"
	poolName     = "pool"
)

// options are what a test changes of a fixture.
type options struct {
	hooks     interceptor.Funcs // between the controller and the API server
	binder    Binder
	limits    quota.Limits
	namespace string // of an earlier fixture; empty makes one
	annotate  bool
}

// fixture is a controller under test with all that is around it.
type fixture struct {
	t         *testing.T
	cfg       *Config
	namespace string
	api       client.WithWatch // the test's own, past counter and hooks
	cache     *cache.Cache
	quotas    *quota.Quotas
	events    *eventLog
	writes    *counter
	nodes     *fakecluster.Node
	observed  *observed
	upstream  *prometheus.Registry
	stop      func()
	// hold keeps changes of claims from the controller's cache, until release.
	hold, release func()
}

func start(t *testing.T, cfg *Config, opt options) *fixture {
	t.Helper()
	scheme, err := cache.NewScheme()
	must(t, err)
	api, err := client.NewWithWatch(cfg.REST, client.Options{Scheme: scheme})
	must(t, err)
	w := &fixture{t: t, cfg: cfg, namespace: opt.namespace, api: api, events: &eventLog{}, writes: &counter{}, upstream: prometheus.NewPedanticRegistry(), observed: &observed{all: map[types.UID]*agents.Sandbox{}}}
	if w.namespace == "" {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "claims-"}}
		must(t, api.Create(t.Context(), ns))
		w.namespace = ns.Name
	}
	counted := rest.CopyConfig(cfg.REST)
	counted.Wrap(w.writes.wrap)
	base, err := client.NewWithWatch(counted, client.Options{Scheme: scheme})
	must(t, err)
	controlled := interceptor.NewClient(base, opt.hooks)
	lagging, hold, release := lag.New(cfg.REST, lag.Only("sandboxclaims"))
	w.hold, w.release = hold, release
	w.cache, err = cache.New(t.Context(), cache.Config{REST: lagging})
	must(t, err)
	quotas, err := quota.New(quota.Config{Reader: w.cache, Log: telemetry.Discard(), Defaults: opt.limits})
	must(t, err)
	w.quotas = quotas
	p, err := picker.New(picker.Config{Writer: controlled})
	must(t, err)
	w.nodes = fakecluster.NewNode(api)
	assumed := assumecache.New(w.cache.Sandbox)
	_, err = cache.On(t.Context(), w.cache, func(older, newer *agents.Sandbox) {
		p.Observe(older, newer)
		quotas.Observe(older, newer)
		assumed.Observe(older, newer)
		w.observed.observe(older, newer)
		w.nodes.Observe(newer)
	})
	must(t, err)
	c, err := cfg.New(Parts{Client: controlled, Cache: w.cache, Picker: p, Binder: opt.binder, Quota: quotas, Assumed: assumed, Events: w.events, Upstream: w.upstream, Annotate: opt.annotate, Patience: eventually.Patience})
	must(t, err)
	w.run(c)
	return w
}

// run starts what runs; stop, or the end of the test, ends it.
func (w *fixture) run(c Starter) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	var running sync.WaitGroup
	service := func(name string, f func(context.Context) error) {
		running.Go(func() {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				w.t.Errorf("%s: %v", name, err)
			}
		})
	}
	w.stop = sync.OnceFunc(func() { cancel(); running.Wait() })
	w.t.Cleanup(w.stop)
	service("cache", w.cache.Run)
	must(w.t, w.cache.WaitSynced(ctx))
	service("stand-in", w.nodes.Run)
	service("controller", c.Start)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// counter counts the writes of a client, by method and kind of object.
type counter struct {
	mu sync.Mutex
	// +checklocks:mu
	seen []string
}

func (c *counter) wrap(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Method != http.MethodGet {
			c.mu.Lock()
			c.seen = append(c.seen, r.Method+" "+r.URL.Path)
			c.mu.Unlock()
		}
		return next.RoundTrip(r)
	})
}

func (c *counter) all() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.seen)
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip is part of http.RoundTripper.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// eventLog notes the events that would be written.
type eventLog struct {
	mu sync.Mutex
	// +checklocks:mu
	reasons []string
}

// Eventf is part of events.EventRecorder.
func (e *eventLog) Eventf(_, _ runtime.Object, _, reason, _, _ string, _ ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.reasons = append(e.reasons, reason)
}

func (e *eventLog) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.reasons)
}

// template makes a template; change may alter it first.
func (w *fixture) template(change ...func(*extensions.SandboxTemplate)) *extensions.SandboxTemplate {
	w.t.Helper()
	x := fakecluster.Template(w.namespace, templateName, "first", change...)
	must(w.t, w.api.Create(w.t.Context(), x))
	return x
}

// pool makes a pool of a template with ready members.
func (w *fixture) pool(of *extensions.SandboxTemplate, members int) *extensions.SandboxWarmPool {
	w.t.Helper()
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: poolName}}
	p.Spec.SandboxTemplateRef.Name = of.Name
	must(w.t, w.api.Create(w.t.Context(), p))
	w.fill(p, of, members)
	return p
}

// observed holds the sandboxes as the picker and the quota have observed them, which may be later than
// in the cache.
type observed struct {
	mu  sync.Mutex
	all map[types.UID]*agents.Sandbox // +checklocks:mu
}

func (x *observed) observe(older, newer *agents.Sandbox) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if newer == nil {
		delete(x.all, older.UID)
		return
	}
	x.all[newer.UID] = newer
}

// of is nil for one that is not observed yet or is deleted.
func (x *observed) of(uid types.UID) *agents.Sandbox {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.all[uid]
}

// fill adds members to a pool and waits until the picker has them.
func (w *fixture) fill(p *extensions.SandboxWarmPool, of *extensions.SandboxTemplate, members int) {
	w.t.Helper()
	for _, s := range w.grow(p, of, members) {
		w.settled(s, func(s *agents.Sandbox) bool { return s != nil && pool.Spare(s) })
	}
}

// grow adds members to a pool and does not wait.
func (w *fixture) grow(p *extensions.SandboxWarmPool, of *extensions.SandboxTemplate, members int) (all []*agents.Sandbox) {
	w.t.Helper()
	revision, _, err := pool.Revision(of)
	must(w.t, err)
	for range members {
		s := pool.NewMember(p, of, revision)
		must(w.t, w.api.Create(w.t.Context(), s))
		all = append(all, s)
	}
	return all
}

// settled waits until ok accepts the picker's version of a sandbox.
func (w *fixture) settled(s *agents.Sandbox, ok func(*agents.Sandbox) bool) {
	w.t.Helper()
	eventually.True(w.t, "the picker has not observed sandbox "+s.Name, func() bool { return ok(w.observed.of(s.UID)) })
}

// claim makes a claim on a pool.
func (w *fixture) claim(name string, change ...func(*extensions.SandboxClaim)) *extensions.SandboxClaim {
	w.t.Helper()
	c := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}}
	c.Spec.WarmPoolRef.Name = poolName
	for _, f := range change {
		f(c)
	}
	must(w.t, w.api.Create(w.t.Context(), c))
	return c
}

// update changes an object as it is now.
func update[T client.Object](w *fixture, obj T, change func(T)) T {
	w.t.Helper()
	for {
		must(w.t, w.api.Get(w.t.Context(), client.ObjectKeyFromObject(obj), obj))
		change(obj)
		err := w.api.Update(w.t.Context(), obj)
		if apierrors.IsConflict(err) {
			continue
		}
		must(w.t, err)
		return obj
	}
}

// await waits until ok accepts the API server's version of an object; ok gets nil once it is gone. It sees all
// that has become of the object since it was read or written last, even what did not last.
func await[T client.Object](w *fixture, obj T, list client.ObjectList, what string, ok func(T) bool) T {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), eventually.Patience)
	defer cancel()
	var last, none T
	if now, err := get(ctx, w, obj); err != nil || ok(now) {
		must(w.t, err)
		return now
	}
	version := obj.GetResourceVersion()
	for {
		since := &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: version}}
		events, err := w.api.Watch(ctx, list, client.InNamespace(obj.GetNamespace()), since)
		must(w.t, err)
		if now, err := get(ctx, w, obj); err == nil && ok(now) {
			events.Stop()
			return now
		}
		for e := range events.ResultChan() {
			now, isOne := e.Object.(T)
			if !isOne { // the server does not remember that version any more
				version = ""
				continue
			}
			if version = now.GetResourceVersion(); now.GetName() != obj.GetName() {
				continue
			}
			last = now
			if e.Type == watch.Deleted {
				now = none
			}
			if ok(now) {
				events.Stop()
				return now
			}
		}
		if ctx.Err() != nil {
			w.t.Fatalf("%T %s never %s; last: %+v", obj, obj.GetName(), what, last)
		}
	}
}

// get reads an object from the API server; nil if there is none.
func get[T client.Object](ctx context.Context, w *fixture, obj T) (T, error) {
	now, _ := obj.DeepCopyObject().(T)
	if err := w.api.Get(ctx, client.ObjectKeyFromObject(obj), now); err != nil {
		var none T
		return none, client.IgnoreNotFound(err)
	}
	return now, nil
}

func (w *fixture) awaitClaim(c *extensions.SandboxClaim, what string, ok func(*extensions.SandboxClaim) bool) *extensions.SandboxClaim {
	w.t.Helper()
	return await(w, c, &extensions.SandboxClaimList{}, what, ok)
}

// served waits for a claim to be Ready and returns it with its sandbox.
func (w *fixture) served(c *extensions.SandboxClaim) (*extensions.SandboxClaim, *agents.Sandbox) {
	w.t.Helper()
	c = w.awaitClaim(c, "got ready", func(c *extensions.SandboxClaim) bool { return ready(c).Status == metav1.ConditionTrue })
	s := &agents.Sandbox{}
	must(w.t, w.api.Get(w.t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: c.Status.Sandbox.Name}, s))
	if ref := metav1.GetControllerOf(s); ref == nil || ref.UID != c.UID {
		w.t.Errorf("claim %s names sandbox %s, which is owned by %+v", c.Name, s.Name, ref)
	}
	return c, s
}

// refused waits for a claim to be refused for a reason, and for its message to hold a text.
func (w *fixture) refused(c *extensions.SandboxClaim, reason, text string) *extensions.SandboxClaim {
	w.t.Helper()
	return w.awaitClaim(c, "was refused: "+reason+": "+text, func(c *extensions.SandboxClaim) bool {
		return ready(c).Reason == reason && ready(c).Status == metav1.ConditionFalse && strings.Contains(ready(c).Message, text)
	})
}

// gone waits for a sandbox to be no more.
func (w *fixture) gone(s *agents.Sandbox) {
	w.t.Helper()
	await(w, s, &agents.SandboxList{}, "went", func(now *agents.Sandbox) bool { return now == nil || now.UID != s.UID })
}

// owned lists the living sandboxes of a claim.
func (w *fixture) owned(c *extensions.SandboxClaim) (all []agents.Sandbox) {
	w.t.Helper()
	var list agents.SandboxList
	must(w.t, w.api.List(w.t.Context(), &list, client.InNamespace(c.Namespace)))
	for i := range list.Items {
		ref := metav1.GetControllerOf(&list.Items[i])
		if ref != nil && ref.UID == c.UID && list.Items[i].DeletionTimestamp == nil {
			all = append(all, list.Items[i])
		}
	}
	return all
}

// ready is a claim's condition of that name; empty if it has none, or if there is no claim.
func ready(c *extensions.SandboxClaim) metav1.Condition {
	if c != nil {
		for _, x := range c.Status.Conditions {
			if x.Type == agents.ConditionReady {
				return x
			}
		}
	}
	return metav1.Condition{}
}

// agent is a Binder that records its requests.
type agent struct {
	mu sync.Mutex
	// +checklocks:mu
	calls map[string]int // by sandbox
	// +checklocks:mu
	bound map[string]map[string]string // by sandbox
	// +checklocks:mu
	fail int // how many calls are to fail
}

// Wake is part of Binder.
func (*agent) Wake(context.Context, *agents.Sandbox) {}

// Bind is part of Binder.
func (a *agent) Bind(_ context.Context, s *agents.Sandbox, req envd.InitRequest) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.bound == nil {
		a.bound, a.calls = map[string]map[string]string{}, map[string]int{}
	}
	a.bound[s.Name] = req.EnvVars
	a.calls[s.Name]++
	if a.fail > 0 {
		a.fail--
		return errors.New("connection refused")
	}
	return nil
}

func (a *agent) environment(s string) map[string]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.bound[s]
}
