package picker_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/picker"
)

func serve(t *testing.T) *apiserver.Server {
	t.Helper()
	api, err := apiserver.New(apiserver.Config{DataDir: t.TempDir(), Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	if err := api.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Stop)
	return api
}

// rig is a picker that a cache of its own feeds.
type rig struct {
	*picker.Picker
	cache *cache.Cache
	seen  chan struct{} // holds a token after an event
}

// over makes a rig. writer nil means the API server.
func over(t *testing.T, api *apiserver.Server, writer func(client.Client) picker.Writer) *rig {
	t.Helper()
	c, err := cache.New(t.Context(), cache.Config{REST: api.RESTConfig(apiserver.UserController)})
	if err != nil {
		t.Fatal(err)
	}
	cfg := picker.Config{Writer: c.Live()}
	if writer != nil {
		cfg.Writer = writer(c.Live())
	}
	p, err := picker.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{Picker: p, cache: c, seen: make(chan struct{}, 1)}
	_, err = cache.On(t.Context(), c, func(older, newer *agents.Sandbox) {
		p.Observe(older, newer)
		select {
		case r.seen <- struct{}{}:
		default:
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := c.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	if err := c.WaitSynced(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r
}

// newPool makes a pool; what owns nothing alive would be collected.
func newPool(t *testing.T, r *rig) *extensions.SandboxWarmPool {
	t.Helper()
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}}
	p.Spec.SandboxTemplateRef.Name = "t"
	if err := r.cache.Live().Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	return p
}

// fill makes ready members of a revision, and waits until all pickers have them.
func fill(t *testing.T, of *extensions.SandboxWarmPool, n int, revision string, rigs ...*rig) {
	t.Helper()
	template := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: ofTemplate.Namespace, Name: ofTemplate.Name, UID: "template"}}
	template.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "x"}}
	next := make(chan int, n)
	for i := range n {
		next <- i
	}
	close(next)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range next {
				if err := makeReady(t.Context(), rigs[0].cache.Live(), pool.NewMember(of, template, revision), i); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	for _, r := range rigs {
		for r.Ready(of.UID, ofTemplate, revision) < n {
			<-r.seen
		}
	}
}

func makeReady(ctx context.Context, live client.Client, s *agents.Sandbox, i int) error {
	if err := live.Create(ctx, s); err != nil {
		return err
	}
	s.Status.NodeName, s.Status.PodIPs = fmt.Sprintf("node%d", i%3), []string{"10.0.0.1"}
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue, Reason: "Test", LastTransitionTime: metav1.Now()}}
	return live.Status().Update(ctx, s)
}

// ofTemplate is the template of all members.
var ofTemplate = types.NamespacedName{Namespace: "default", Name: "t"}

func request(of *extensions.SandboxWarmPool, current func() string, owner string) picker.Request {
	return picker.Request{
		Pool: of.UID, Template: ofTemplate, Current: func(context.Context) (string, error) { return current(), nil },
		Adopt: func(m *agents.Sandbox) *agents.Sandbox {
			s := pool.Adopt(m, nil)
			s.Annotations["test/claimant"] = owner
			return s
		},
	}
}

// gate is a writer that lets few writes be under way at once: all claims hold a member at the
// same time, and a busy machine's server does not time out.
type gate struct {
	client.Client
	free chan struct{}
}

func (g gate) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	g.free <- struct{}{}
	defer func() { <-g.free }()
	return g.Client.Update(ctx, obj, opts...)
}

func TestTwoPickersOnePool(t *testing.T) {
	const members = 500
	api := serve(t)
	gated := func(c client.Client) picker.Writer { return gate{c, make(chan struct{}, 8)} }
	a, b := over(t, api, gated), over(t, api, gated)
	of := newPool(t, a)
	fill(t, of, members, "r1", a, b)
	var mu sync.Mutex
	owners := map[types.UID]string{}
	var wg sync.WaitGroup
	for i := range members {
		wg.Go(func() {
			p, owner := []*rig{a, b}[i%2], fmt.Sprint(i)
			s, err := p.Pick(t.Context(), request(of, func() string { return "r1" }, owner))
			if err != nil {
				t.Errorf("pick %d: %v", i, err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if other, taken := owners[s.UID]; taken {
				t.Errorf("%s belongs to %s and %s", s.Name, other, owner)
			}
			owners[s.UID] = owner
		})
	}
	wg.Wait()
	var list agents.SandboxList
	if err := a.cache.Live().List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	for _, s := range list.Items {
		if owners[s.UID] == "" || s.Annotations["test/claimant"] != owners[s.UID] || pool.MemberOf(&s) != "" {
			t.Errorf("%s was returned to %q and is %q's", s.Name, owners[s.UID], s.Annotations["test/claimant"])
		}
	}
	for _, p := range []*rig{a, b} {
		if s, err := p.Pick(t.Context(), request(of, func() string { return "r1" }, "late")); !errors.Is(err, picker.ErrNone) || !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("pick of an empty pool = %v, %v", s, err)
		}
	}
}

// stuck is a writer that holds its first write until it is let go, and then loses it.
type stuck struct {
	client.Client
	reached chan struct{}
	release chan struct{}
}

func (s stuck) Update(context.Context, client.Object, ...client.UpdateOption) error {
	close(s.reached)
	<-s.release
	return errors.New("the process is gone")
}

func TestReservationOfADeadPicker(t *testing.T) {
	api := serve(t)
	dead := stuck{reached: make(chan struct{}), release: make(chan struct{})}
	a := over(t, api, func(c client.Client) picker.Writer {
		dead.Client = c
		return dead
	})
	b := over(t, api, nil)
	of := newPool(t, a)
	fill(t, of, 1, "r1", a, b)
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	wg.Go(func() {
		if _, err := a.Pick(ctx, request(of, func() string { return "r1" }, "a")); !errors.Is(err, errs.ErrTimeout) {
			t.Errorf("pick of the dead = %v", err)
		}
	})
	<-dead.reached
	if a.Ready(of.UID, ofTemplate, "r1") != 0 {
		t.Error("the member is not held")
	}
	if s, err := b.Pick(t.Context(), request(of, func() string { return "r1" }, "b")); err != nil || s.Annotations["test/claimant"] != "b" {
		t.Errorf("pick beside a reservation = %v, %v", s, err)
	}
	cancel()
	close(dead.release)
	wg.Wait()
}

// The template changes under claims, and the members of its old revision take their time to
// go: owner comes after the change gets none of them.
func TestTemplateChangesUnderClaims(t *testing.T) {
	api := serve(t)
	p := over(t, api, nil)
	of := newPool(t, p)
	fill(t, of, 60, "r1", p)
	var current atomic.Value
	current.Store("r1")
	now := func() string { return current.Load().(string) }
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			for j := range 6 {
				before := now()
				s, err := p.Pick(t.Context(), request(of, now, fmt.Sprint(i, j)))
				if errors.Is(err, picker.ErrNone) {
					continue
				}
				if err != nil {
					t.Errorf("pick: %v", err)
				} else if got := pool.RevisionOf(s); got < before {
					t.Errorf("a claim of %s got %s", before, got)
				}
			}
		})
	}
	wg.Go(func() {
		current.Store("r2")
		// The node's finalizer keeps what is deleted.
		if err := p.cache.Live().DeleteAllOf(t.Context(), &agents.Sandbox{}, client.InNamespace("default"), client.MatchingLabels{agents.LabelTemplateHash: "r1"}); err != nil {
			t.Error(err)
		}
	})
	wg.Wait()
	fill(t, of, 20, "r2", p)
	for i := range 20 {
		if s, err := p.Pick(t.Context(), request(of, now, fmt.Sprint("after", i))); err != nil || pool.RevisionOf(s) != "r2" {
			t.Errorf("pick after the change = %v, %v", s, err)
		}
	}
}
