package manager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

// fill makes the team's pool of the base template, with members of it that every manager knows to be
// ready.
func (w *realAPI) fill(t *testing.T, members int, managers ...*Manager) {
	t.Helper()
	ctx := t.Context()
	p := fakecluster.Pool(team, "base", templates.PublicNamespace, "base")
	if err := w.objects.Live().Create(ctx, p); err != nil {
		t.Fatal(err)
	}
	if _, err := fakecluster.Fill(ctx, w.objects.Live(), p, members); err != nil {
		t.Fatal(err)
	}
	_, revision, err := w.objects.CurrentTemplate(ctx, pool.TemplateOf(p))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range managers {
		await(t, func() bool {
			pools, err := m.Creates.Cache.PoolsOf(ctx, "", pool.TemplateOf(p))
			return err == nil && len(pools) == 1 && m.Creates.Picker.Ready(p.UID, pool.TemplateOf(p), revision) == members
		})
	}
}

// TestNetworkIsInForceBeforeTheAnswer reads, as soon as the answer is there, whether the status is
// of what was requested: the controller writes it after the node has set the rules.
func TestNetworkIsInForceBeforeTheAnswer(t *testing.T) {
	_, w := newRealAPI(t)
	m, _ := w.manager(t, w.objects)
	w.fill(t, 10, m)
	inForce := func(what string, v sandboxes.Sandbox) {
		t.Helper()
		s := &agents.Sandbox{}
		if err := w.objects.Live().Get(t.Context(), client.ObjectKey{Namespace: v.Namespace, Name: v.Name}, s); err != nil {
			t.Fatal(err)
		}
		ready := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
		if s.Generation < 2 || ready.ObservedGeneration < s.Generation {
			t.Errorf("%s: answered with a status of generation %d, the object has %d", what, ready.ObservedGeneration, s.Generation)
		}
	}
	for range 10 {
		req := request("base")
		req.Network = &agents.EgressPolicy{Internet: new(false)}
		v, err := m.Creates.Create(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		inForce("claim", v)
		if err := m.Sandboxes.SetNetwork(t.Context(), team, string(v.ID), &agents.EgressPolicy{DenyOut: []string{"8.8.8.8"}}); err != nil {
			t.Fatal(err)
		}
		inForce("change", v)
	}
}

// TestAWarmClaimIsOneWrite counts what the manager and its picker write, with all that a request
// may set, and reads the effect back at once.
func TestAWarmClaimIsOneWrite(t *testing.T) {
	_, w := newRealAPI(t)
	m, writer := w.manager(t, w.objects)
	w.fill(t, 20, m)
	for i := range 20 {
		req := request("base")
		req.Metadata, req.Env = map[string]string{"i": fmt.Sprint(i)}, map[string]string{"A": "1"}
		req.Secure, req.IdempotencyKey = i%2 == 0, fmt.Sprintf("key %d", i)
		before := writer.writes.Load()
		v, err := m.Creates.Create(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if n := writer.writes.Load() - before; n != 1 {
			t.Errorf("claim %d made %d writes, want 1", i, n)
		}
		if got, err := m.Sandboxes.Get(t.Context(), team, string(v.ID)); err != nil || !reflect.DeepEqual(got, v) {
			t.Errorf("read back at once: %+v, %v; want %+v", got, err, v)
		}
	}
	page, err := m.Sandboxes.List(t.Context(), sandboxes.ListRequest{Namespace: team, OldestFirst: true})
	if err != nil || len(page.Items) != 20 {
		t.Fatalf("List = %d items, %v", len(page.Items), err)
	}
	for i, v := range page.Items { // in the order of the claims, not of the members' starts
		if v.Metadata["i"] != fmt.Sprint(i) {
			t.Errorf("item %d is claim %s", i, v.Metadata["i"])
		}
	}
}

// TestTwoManagersShareAPool: each with its own cache and picker, all members handed out once.
func TestTwoManagersShareAPool(t *testing.T) {
	const members = 500
	first, w := newRealAPI(t)
	second, _ := w.manager(t, w.cache(t))
	w.fill(t, members, first, second)
	var mu sync.Mutex
	owners := map[sandbox.ID]int{}
	var wg sync.WaitGroup
	var next atomic.Int64
	for i := range 16 {
		m := []*Manager{first, second}[i%2]
		wg.Go(func() {
			for {
				n := next.Add(1)
				if n > members {
					return
				}
				req := request("base")
				req.Metadata = map[string]string{"owner": fmt.Sprint(n)}
				v, err := m.Creates.Create(t.Context(), req)
				if err != nil {
					t.Errorf("claim %d: %v", n, err)
					return
				}
				mu.Lock()
				owners[v.ID]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(owners) != members {
		t.Errorf("%d distinct sandboxes, want %d", len(owners), members)
	}
	var all agents.SandboxList // of the API server: the cache may be behind
	if err := w.objects.Live().List(t.Context(), &all, client.InNamespace(team)); err != nil {
		t.Fatal(err)
	}
	seen, warm := map[string]bool{}, 0
	for i := range all.Items {
		s := &all.Items[i]
		if pool.MemberOf(s) != "" {
			continue
		}
		seen[s.Spec.Barchan.Metadata["owner"]] = true
		if s.Annotations[pool.AnnotationClaimedAt] != "" {
			warm++
		}
	}
	if len(seen) != members {
		t.Errorf("%d distinct owners, want %d", len(seen), members)
	}
	t.Logf("%d of %d claims were warm", warm, members)
}

// TestUpdateUnderClaims updates the template while 200 claims arrive: none that began after the
// update was written gets an older one.
func TestUpdateUnderClaims(t *testing.T) {
	m, w := newRealAPI(t)
	w.fill(t, 60, m)
	var latest atomic.Int64 // the newest image that is durable
	done := make(chan struct{})
	var updates sync.WaitGroup
	updates.Go(func() {
		for n := int64(1); ; n++ {
			select {
			case <-done:
				return
			default:
			}
			if err := w.setImage(t.Context(), imageOf(n)); err != nil {
				t.Error(err)
				return
			}
			latest.Store(n)
		}
	})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 25 {
				least := imageOf(latest.Load())
				v, err := m.Creates.Create(t.Context(), request("base"))
				if err != nil {
					t.Errorf("Create: %v", err)
					continue
				}
				s, err := m.Sandboxes.Cache.SandboxByID(t.Context(), v.ID)
				if err != nil {
					t.Error(err)
					continue
				}
				got := s.Spec.PodTemplate.Spec.Containers[0].Image
				if got == "base" {
					got = imageOf(0)
				}
				if got < least {
					t.Errorf("a claim that began after %s was durable got %s", least, got)
				}
			}
		})
	}
	wg.Wait()
	close(done)
	updates.Wait()
	if latest.Load() == 0 {
		t.Error("the template was not updated")
	}
}

// imageOf names images in the order of their numbers.
func imageOf(n int64) string { return fmt.Sprintf("image-%09d", n) }

func (w *realAPI) setImage(ctx context.Context, image string) error {
	for {
		tmpl := &extensions.SandboxTemplate{}
		if err := w.objects.Live().Get(ctx, types.NamespacedName{Namespace: templates.PublicNamespace, Name: "base"}, tmpl); err != nil {
			return err
		}
		tmpl.Spec.PodTemplate.Spec.Containers[0].Image = image
		if err := w.objects.Live().Update(ctx, tmpl); !apierrors.IsConflict(err) {
			return err
		}
	}
}

// TestQuotaOnTheRealServer: 100 claims at once at a quota of 50 give exactly 50.
func TestQuotaOnTheRealServer(t *testing.T) {
	m, w := newRealAPI(t)
	w.fill(t, 30, m)
	ns, err := w.objects.Namespace(t.Context(), team)
	if err != nil {
		t.Fatal(err)
	}
	ns.Annotations = map[string]string{quota.AnnotationSandboxes: "50"}
	if err := w.objects.Live().Update(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool {
		ns, err := w.objects.Namespace(t.Context(), team)
		return err == nil && ns.Annotations[quota.AnnotationSandboxes] == "50"
	})
	var granted, refused atomic.Int64
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			switch _, err := m.Creates.Create(t.Context(), request("base")); {
			case err == nil:
				granted.Add(1)
			case errors.Is(err, errs.ErrExhausted):
				refused.Add(1)
			default:
				t.Errorf("Create: %v", err)
			}
		})
	}
	wg.Wait()
	if granted.Load() != 50 || refused.Load() != 50 {
		t.Errorf("%d granted, %d refused; want 50 and 50", granted.Load(), refused.Load())
	}
}

// TestOneKeyOnTheRealServer: the same request from two replicas at once starts one sandbox.
func TestOneKeyOnTheRealServer(t *testing.T) {
	first, w := newRealAPI(t)
	second, _ := w.manager(t, w.cache(t))
	await(t, func() bool { _, err := second.Templates.Get(t.Context(), team, "base"); return err == nil })
	ids := make([]sandbox.ID, 40)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			v, err := []*Manager{first, second}[i%2].Creates.Create(t.Context(), keyed("k"))
			if err != nil {
				t.Errorf("Create: %v", err)
			}
			ids[i] = v.ID
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Fatalf("two sandboxes: %s and %s", ids[0], id)
		}
	}
	// A manager that starts now finds it by the annotation.
	third, _ := w.manager(t, w.cache(t))
	if v, err := third.Creates.Create(t.Context(), keyed("k")); err != nil || v.ID != ids[0] {
		t.Errorf("Create after a restart = %s, %v; want %s", v.ID, err, ids[0])
	}
}

// TestTheAgentHearsOverHTTP has the real binder speak to a server that stands for the agent.
func TestTheAgentHearsOverHTTP(t *testing.T) {
	type call struct {
		path, token string
		req         envd.InitRequest
	}
	calls := make(chan call, 10)
	agent := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		h := call{path: r.Method + " " + r.URL.Path, token: r.Header.Get(envd.HeaderAccessToken)}
		if err := json.NewDecoder(r.Body).Decode(&h.req); err != nil {
			t.Error(err)
		}
		calls <- h
		rw.WriteHeader(http.StatusNoContent)
	}))
	t.Cleanup(agent.Close)
	_, w := newRealAPI(t)
	m, _ := w.manager(t, w.objects, func(c *Config) {
		c.Binder = agentclient.New(agentclient.Config{Tokens: c.Tokens, Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
			if want := net.JoinHostPort("127.0.0.1", fmt.Sprint(envd.Port)); address != want {
				t.Errorf("dialled %s, want %s", address, want)
			}
			return (&net.Dialer{}).DialContext(ctx, network, agent.Listener.Addr().String())
		}})
	})
	w.fill(t, 2, m)
	req := request("base")
	req.Env, req.Secure = map[string]string{"SECRET": "$(x)"}, false
	v, err := m.Creates.Create(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	want := call{"POST /init", m.Sandboxes.Tokens.Agent(v.ID), envd.InitRequest{EnvVars: req.Env, Open: true}}
	if got := <-calls; !reflect.DeepEqual(got, want) {
		t.Errorf("the agent received %+v, want %+v", got, want)
	}
	if _, err := m.Creates.Create(t.Context(), request("base")); err != nil {
		t.Fatal(err)
	}
	if len(calls) != 0 {
		t.Error("an agent received a claim without variables")
	}
}
