package controllers

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// A member waits after a warm claim, at most maxStartDelay, and not if the claim emptied the pool.
func TestMembersWaitAfterWarmClaim(t *testing.T) { synctest.Test(t, testMembersWaitAfterWarmClaim) }

func testMembersWaitAfterWarmClaim(t *testing.T) {
	fresh, old := newSandbox(), newSandbox()
	fresh.CreationTimestamp, old.CreationTimestamp = metav1.Now(), metav1.NewTime(time.Now().Add(-maxStartDelay))
	for name, c := range map[string]struct {
		lastClaim time.Time
		s         *agents.Sandbox
		waits     bool
	}{
		"a claim just now":         {time.Now(), fresh, true},
		"a claim long ago":         {time.Now().Add(-startDelay), fresh, false},
		"none, or an empty pool":   {time.Time{}, fresh, false},
		"maxStartDelay has passed": {time.Now(), old, false},
	} {
		r := &sandboxReconciler{SandboxConfig: SandboxConfig{LastWarmClaim: func() time.Time { return c.lastClaim }}}
		if wait := r.remainingDelay(c.s); (wait > 0) != c.waits || wait > startDelay {
			t.Errorf("%s: waits %s", name, wait)
		}
	}
}

// Members start in order, at most limit at once; a deleted one blocks no other.
func TestStartLimiter(t *testing.T) {
	l := newStartLimiter(2)
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
