package controllers

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// Work waits after a warm claim, at most MaxClaimDelay, and not if the claim emptied the pool.
func TestClaimDelay(t *testing.T) { synctest.Test(t, testClaimDelay) }

func testClaimDelay(t *testing.T) {
	for name, c := range map[string]struct {
		claimed, late time.Duration // ago
		wait          time.Duration
	}{
		"a claim just now":         {0, 0, ClaimPause},
		"a claim before that":      {ClaimPause / 2, time.Second, ClaimPause / 2},
		"a claim long ago":         {ClaimPause, 0, 0},
		"none, or an empty pool":   {time.Hour, 0, 0},
		"the end of the delay":     {0, MaxClaimDelay - time.Millisecond, time.Millisecond},
		"MaxClaimDelay has passed": {0, MaxClaimDelay, 0},
		"another clock is ahead":   {0, -time.Minute, 0},
		"that of the claim is":     {-time.Minute, 0, 0},
	} {
		now := time.Now()
		if wait := ClaimDelay(func() time.Time { return now.Add(-c.claimed) }, now.Add(-c.late)); max(wait, 0) != c.wait {
			t.Errorf("%s: waits %s, not %s", name, wait, c.wait)
		}
	}
	if wait := ClaimDelay(nil, time.Now()); wait != 0 {
		t.Errorf("without claims: waits %s", wait)
	}
}

// TestMemberStartWaits: the start of a member waits for a pause.
func TestMemberStartWaits(t *testing.T) { synctest.Test(t, testMemberStartWaits) }

func testMemberStartWaits(t *testing.T) {
	s, began := newSandbox(), time.Now()
	s.CreationTimestamp = metav1.NewTime(began)
	r := &sandboxReconciler{SandboxConfig: SandboxConfig{LastWarmClaim: func() time.Time { return began }}}
	r.awaitStartDelay(t.Context(), s)
	if waited := time.Since(began); waited != ClaimPause {
		t.Errorf("waited %s", waited)
	}
}

// Members start in order, at most limit at once; a deleted one blocks no other.
func TestStartLimiter(t *testing.T) {
	l := newStartLimiter(func(own, _ int) bool { return own < 2 }, 0, nil)
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	defer queue.ShutDown()
	if err := l.source().Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	key := func(i int) types.NamespacedName { return types.NamespacedName{Namespace: "a", Name: fmt.Sprint(i)} }
	for i := range 5 {
		if got, want := l.acquire(key(i)), i < 2; got != want {
			t.Errorf("member %d: acquire = %v", i, got)
		}
		if i >= 2 {
			l.release(key(i)) // as the end of its reconcile does
		}
	}
	if l.acquire(key(3)) || !l.acquire(key(1)) {
		t.Error("a waiting member acquired a slot, or an active one lost it")
	}
	enqueued := func(want int) {
		t.Helper()
		if n := queue.Len(); n != 1 {
			t.Fatalf("%d members enqueued, want 1", n)
		}
		r, _ := queue.Get()
		queue.Done(r)
		if r.NamespacedName != key(want) {
			t.Errorf("%s enqueued, want %d", r, want)
		}
	}
	l.release(key(0))
	enqueued(2)
	l.release(key(2)) // deleted: it does not acquire
	enqueued(3)
	if !l.acquire(key(3)) {
		t.Error("the enqueued member gets no slot")
	}
	l.release(key(9)) // unknown
	if n := queue.Len(); n != 0 {
		t.Errorf("%d members enqueued without a free slot", n)
	}
	l.release(key(1))
	enqueued(4)
}

// A start that takes long, because a registry hardly answers, stops no other for longer than that.
func TestStartLimiterForgetsLongStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newStartLimiter(func(own, _ int) bool { return own < 1 }, time.Minute, nil)
		queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
		defer queue.ShutDown()
		if err := l.source().Start(t.Context(), queue); err != nil {
			t.Fatal(err)
		}
		slow, next := types.NamespacedName{Namespace: "a", Name: "slow"}, types.NamespacedName{Namespace: "b", Name: "next"}
		if !l.acquire(slow) || l.acquire(next) {
			t.Fatal("the limit is not one")
		}
		if r, _ := queue.Get(); r.NamespacedName != next { // blocks until the minute is over
			t.Errorf("%s was enqueued", r)
		}
		if !l.acquire(next) {
			t.Error("a start of a minute keeps its slot")
		}
		l.release(slow)
		if l.acquire(slow) {
			t.Error("the end of the long start freed the slot of another")
		}
	})
}

// hogs is a model of a controller: reconciles of hostile namespaces never end, unless the test ends one.
type hogs struct {
	*startLimiter
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]
}

func newHogs(t *testing.T, workers, share int) hogs {
	t.Helper()
	l := newStartLimiter(func(own, all int) bool { return Fits(own, all, workers, share) }, 0, func(key types.NamespacedName) string { return key.Namespace })
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	t.Cleanup(queue.ShutDown)
	if err := l.source().Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	return hogs{l, queue}
}

// begin takes all workers that a namespace gets, and returns how many.
func (h hogs) begin(namespace string) (got int) {
	for i := range 100 { // some wait
		if h.acquire(types.NamespacedName{Namespace: namespace, Name: fmt.Sprint(i)}) {
			got++
		}
	}
	return got
}

// TestTenantsThatActTogether has more and more namespaces take all workers that they get, and keep them.
func TestTenantsThatActTogether(t *testing.T) {
	for name, c := range map[string]struct{ workers, share int }{
		"sandboxes": {64, 16}, "checkpoints": {16, 3}, "builds": {4, 2}, "a cluster": {64, 32},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHogs(t, c.workers, c.share)
			if got := h.begin("hog 0"); got != c.share {
				t.Errorf("alone a namespace got %d workers, its share is %d", got, c.share)
			}
			for n := 1; n <= Reserve; n++ {
				quiet := types.NamespacedName{Namespace: "quiet", Name: "s"}
				if !h.acquire(quiet) {
					t.Fatalf("%d namespaces keep another from its first worker", n)
				}
				h.release(quiet)
				h.begin(fmt.Sprint("hog ", n))
			}
			h.mu.Lock()
			if most := c.workers + Reserve; h.all > most {
				t.Errorf("%d are active, there are %d workers", h.all, most)
			}
			h.mu.Unlock()
			if h.begin("last") != 1 {
				t.Error("a namespace got a second worker beyond the configured number")
			}
		})
	}
}

// TestFewTenantsLeaveMoreThanOne: four namespaces once had all workers.
func TestFewTenantsLeaveMoreThanOne(t *testing.T) {
	h := newHogs(t, 64, 16)
	for i := range 4 {
		h.begin(fmt.Sprint("hog ", i))
	}
	if got := h.begin("quiet"); got < 5 {
		t.Errorf("beside four namespaces another gets %d workers", got)
	}
}

// TestWorkersGoToThoseWithFewest ends reconciles at random. None that waits is forgotten, the rule always holds, and a namespace that
// waits has a worker.
func TestWorkersGoToThoseWithFewest(t *testing.T) {
	const workers, share, namespaces, each = 16, 4, 9, 40
	h, random := newHogs(t, workers, share), rand.New(rand.NewPCG(15, 0))
	var active []types.NamespacedName
	for i := range each {
		for n := range namespaces {
			if key := (types.NamespacedName{Namespace: fmt.Sprint(n), Name: fmt.Sprint(i)}); h.acquire(key) {
				active = append(active, key)
			}
		}
	}
	for ended := range namespaces * each {
		if len(active) == 0 {
			t.Fatalf("after %d ends nothing is active", ended)
		}
		i := random.IntN(len(active))
		key := active[i]
		active = slices.Delete(active, i, i+1)
		h.release(key)
		for h.queue.Len() > 0 {
			next, _ := h.queue.Get()
			h.queue.Done(next)
			if !h.acquire(next.NamespacedName) {
				t.Fatalf("%s was enqueued without a worker", next)
			}
			active = append(active, next.NamespacedName)
		}
		h.mu.Lock()
		if len(active) != h.all || h.all > workers+namespaces {
			t.Fatalf("%d are active, the limiter has %d", len(active), h.all)
		}
		for name, g := range h.groups {
			if len(g.active) == 0 {
				t.Fatalf("namespace %s waits without a worker", name)
			}
		}
		h.mu.Unlock()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(active) != 0 || len(h.groups) != 0 || h.all != 0 {
		t.Errorf("left behind: %v, %v, %d", active, h.groups, h.all)
	}
}

// TestNamespaceHasAShareOfTheWorkers has namespaces with more work that hangs than there are workers for it.
func TestNamespaceHasAShareOfTheWorkers(t *testing.T) {
	const workers, share = 3, 2
	began, finish := make(chan string), make(chan struct{})
	requests := make(chan event.TypedGenericEvent[*agents.Sandbox])
	c, err := New(Work{
		Name: "slow", Log: telemetry.Discard(), Workers: workers, Share: share, RetryFirst: time.Millisecond, RetryMost: time.Second,
		Reconciler: reconcile.Func(func(_ context.Context, r reconcile.Request) (reconcile.Result, error) {
			began <- r.Namespace
			<-finish
			return reconcile.Result{}, nil
		}),
		Sources: []source.Source{source.Channel(requests, &handler.TypedEnqueueRequestForObject[*agents.Sandbox]{})},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = c.Start(ctx) })
	enqueue := func(namespace, name string) {
		requests <- event.TypedGenericEvent[*agents.Sandbox]{Object: &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}}
	}
	got := map[string]int{}
	for i := range workers {
		enqueue("hog", fmt.Sprint(i))
	}
	for range share {
		got[<-began]++
	}
	for n := range workers { // more in all than there are workers
		enqueue(fmt.Sprint("other ", n), "s")
		got[<-began]++
	}
	if got["hog"] != share || len(got) != 1+workers {
		t.Errorf("the workers are at %v", got)
	}
	close(finish)
	if who := <-began; who != "hog" {
		t.Errorf("%s follows", who)
	}
	cancel()
	running.Wait()
}
