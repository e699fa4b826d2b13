package sandboxes

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
)

// memory is a cache whose events a listing gets.
type memory struct {
	Cache
	objects map[types.NamespacedName]*agents.Sandbox
	listing *Listing
	version int
}

func (m *memory) Sandboxes(_ context.Context, namespace string) (all []*agents.Sandbox, _ error) {
	for key, s := range m.objects {
		if key.Namespace == namespace {
			all = append(all, s)
		}
	}
	return all, nil
}

// put writes a sandbox as it is now.
func (m *memory) put(s *agents.Sandbox) {
	m.version++
	s.ResourceVersion = fmt.Sprint(m.version)
	key := client.ObjectKeyFromObject(s)
	m.listing.Observe(m.objects[key], s)
	m.objects[key] = s
}

func (m *memory) remove(s *agents.Sandbox) {
	delete(m.objects, client.ObjectKeyFromObject(s))
	m.listing.Observe(s, nil)
}

// stores returns a store with a listing, and one without, over the same objects.
func stores(tb testing.TB) (m *memory, fast, slow *Store) {
	tb.Helper()
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		tb.Fatal(err)
	}
	m = &memory{objects: map[types.NamespacedName]*agents.Sandbox{}, listing: NewListing()}
	none := func(context.Context, types.NamespacedName) (*agents.Sandbox, error) { return nil, NotFound("") }
	fast = &Store{Cache: m, Listing: m.listing, Assumed: assumecache.New(none), Templates: &templates.Catalog{}, Tokens: tokens}
	slow = &Store{Cache: m, Assumed: assumecache.New(none), Templates: &templates.Catalog{}, Tokens: tokens}
	return m, fast, slow
}

// shapes give a sandbox a state.
var shapes = []func(*agents.Sandbox){
	func(*agents.Sandbox) {}, // pending
	func(s *agents.Sandbox) { s.Labels = map[string]string{agents.LabelWarmPoolSandbox: "pool"}; run(s) },
	run, run,
	func(s *agents.Sandbox) {
		run(s)
		s.Spec.OperatingMode = agents.ModeSuspended
		s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionSuspended, Status: metav1.ConditionTrue}}
	},
	func(s *agents.Sandbox) {
		run(s)
		s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionFinished, Status: metav1.ConditionTrue, Reason: agents.ReasonPodFailed}}
	},
	func(s *agents.Sandbox) { run(s); s.DeletionTimestamp = new(metav1.Now()) },
}

func run(s *agents.Sandbox) {
	s.Spec.OperatingMode = agents.ModeRunning
	s.Status.PodIPs = []string{"10.0.0.2"}
	s.Status.Barchan = &agents.BarchanStatus{StartedAt: &s.CreationTimestamp}
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
}

func sandboxOf(namespace, name, uid string, at time.Time) *agents.Sandbox {
	return &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(uid), CreationTimestamp: metav1.NewTime(at)}}
}

// pages lists all pages of a request.
func pages(t *testing.T, st *Store, req ListRequest) (all []Page) {
	t.Helper()
	for {
		page, err := st.List(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, page)
		if req.Cursor = page.Next; page.Next == "" {
			return all
		}
	}
}

// TestListing: after any events lists with a listing are as those without, page for page.
func TestListing(t *testing.T) {
	m, fast, slow := stores(t)
	rng := rand.New(rand.NewPCG(1, 2))
	began := time.Now().Truncate(time.Second)
	for i := range 4000 {
		// Several begin in the same second; a name may be that of another sandbox later.
		namespace, name := fmt.Sprint("team", rng.IntN(2)), fmt.Sprint("s", rng.IntN(40))
		was := m.objects[types.NamespacedName{Namespace: namespace, Name: name}]
		switch {
		case was == nil || rng.IntN(8) == 0:
			s := sandboxOf(namespace, name, fmt.Sprint("uid", i), began.Add(time.Duration(rng.IntN(5))*time.Second))
			if was != nil && rng.IntN(2) == 0 {
				m.remove(was)
			}
			m.put(s)
		case rng.IntN(4) == 0:
			m.remove(was)
		default:
			s := sandboxOf(was.Namespace, was.Name, string(was.UID), was.CreationTimestamp.Time)
			shapes[rng.IntN(len(shapes))](s)
			if rng.IntN(3) == 0 {
				metav1.SetMetaDataAnnotation(&s.ObjectMeta, pool.AnnotationResumedAt, began.Add(time.Duration(rng.IntN(9000))*time.Millisecond).Format(time.RFC3339Nano))
			}
			m.put(s)
		}
		if i%7 != 0 {
			continue
		}
		req := ListRequest{Namespace: namespace, OldestFirst: rng.IntN(2) == 0, Limit: 1 + rng.IntN(12)}
		switch rng.IntN(4) {
		case 0:
			req.States = []State{StatePaused}
		case 1:
			req.States = []State{StateRunning, StatePaused}
		case 2:
			req.Name = name
		}
		if diff := cmp.Diff(pages(t, slow, req), pages(t, fast, req)); diff != "" {
			t.Fatalf("after %d events, %+v, without and with a listing: %s", i, req, diff)
		}
	}
	for _, s := range m.objects {
		m.remove(s)
	}
	if l := m.listing; len(l.of)+len(l.seen)+len(l.events) > 0 { //nolint:gocritic // no other goroutine
		t.Errorf("left after the last: %d namespaces, %d sandboxes, %d waits", len(l.of), len(l.seen), len(l.events))
	}
}

// TestCostOfAPage: it has no part that grows with the number of sandboxes.
func TestCostOfAPage(t *testing.T) {
	cost := func(n int) uint64 {
		m, fast, _ := stores(t)
		fill(m, n)
		req := ListRequest{Namespace: "team", States: []State{StateRunning, StatePaused}}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		page, err := fast.List(t.Context(), req)
		runtime.ReadMemStats(&after)
		if err != nil || len(page.Items) != 100 || page.Next == "" || page.Running != n {
			t.Fatalf("%d items of %d running, next %q: %v", len(page.Items), page.Running, page.Next, err)
		}
		return after.TotalAlloc - before.TotalAlloc
	}
	few, many := cost(200), cost(20_000)
	t.Logf("a page of 200 sandboxes allocates %d bytes, of 20,000 %d", few, many)
	if many > few+few/2 {
		t.Errorf("a page of 200 sandboxes allocates %d bytes, of 20,000 %d", few, many)
	}
}

func fill(m *memory, n int) {
	began := time.Now().Add(-time.Hour).Truncate(time.Second)
	for i := range n {
		s := sandboxOf("team", fmt.Sprint("s", i), fmt.Sprint("uid", i), began.Add(time.Duration(i)*time.Millisecond))
		run(s)
		metav1.SetMetaDataAnnotation(&s.ObjectMeta, pool.AnnotationClaimedAt, s.CreationTimestamp.Format(time.RFC3339Nano))
		m.put(s)
	}
}

// TestWaitForTheListing: a wait for the cache ends no sooner than the listing has its event, and does not wait without an end.
func TestWaitForTheListing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewListing()
		s := sandboxOf("team", "s", "one", time.Now())
		run(s)
		s.ResourceVersion = "7"
		key := client.ObjectKeyFromObject(s)
		waited := func(shown *agents.Sandbox) time.Duration {
			began := time.Now()
			_, err := l.Over(shows{shown: shown}).WaitSandbox(t.Context(), key, func(*agents.Sandbox) (bool, error) { return true, nil })
			if err != nil {
				t.Error(err)
			}
			return time.Since(began)
		}
		const late = 20 * time.Millisecond
		go func() { time.Sleep(late); l.Observe(nil, s) }()
		if took := waited(s); took != late {
			t.Errorf("waited for %s, want %s", took, late)
		}
		if took := waited(s); took != 0 {
			t.Errorf("waited for %s for what it has", took)
		}
		go func() { time.Sleep(late); l.Observe(s, nil) }()
		if took := waited(nil); took != late {
			t.Errorf("waited for a deletion for %s, want %s", took, late)
		}
		if took := waited(s); took != listingLag {
			t.Errorf("waited for an event that does not come for %s, want %s", took, listingLag)
		}
	})
}

// shows is a cache that shows a sandbox at once.
type shows struct {
	Cache
	shown *agents.Sandbox
}

func (s shows) WaitSandbox(context.Context, types.NamespacedName, func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error) {
	return s.shown, nil
}

// BenchmarkPage lists the first page of a namespace, with and without a listing.
func BenchmarkPage(b *testing.B) {
	for _, n := range []int{100, 1000, 10_000, 100_000} {
		m, fast, slow := stores(b)
		fill(m, n)
		for name, st := range map[string]*Store{"listing": fast, "all": slow} {
			b.Run(fmt.Sprintf("%d/%s", n, name), func(b *testing.B) {
				for b.Loop() {
					if _, err := st.List(b.Context(), ListRequest{Namespace: "team"}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
