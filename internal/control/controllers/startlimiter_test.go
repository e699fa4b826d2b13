package controllers

import (
	"context"
	"fmt"
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
	l := newStartLimiter(2, 0, nil)
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
		l := newStartLimiter(1, time.Minute, nil)
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

// TestNamespaceHasAShareOfTheWorkers has one namespace with more work that hangs than there are workers for it.
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
	for i := range workers {
		enqueue("hog", fmt.Sprint(i))
	}
	enqueue("other", "s")
	got := map[string]int{}
	for range workers {
		got[<-began]++
	}
	if got["hog"] != share || got["other"] != 1 {
		t.Errorf("the workers are at %v", got)
	}
	finish <- struct{}{} // of the hog or of the other; then all can go on
	close(finish)
	if who := <-began; who != "hog" {
		t.Errorf("%s follows", who)
	}
	cancel()
	running.Wait()
}
