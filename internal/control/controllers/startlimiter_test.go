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

// A member waits while claims are being served, but not for ever, and not for an empty stock.
func TestMembersWaitForCalm(t *testing.T) { synctest.Test(t, testMembersWaitForCalm) }

func testMembersWaitForCalm(t *testing.T) {
	fresh, old := newSandbox(), newSandbox()
	fresh.CreationTimestamp, old.CreationTimestamp = metav1.Now(), metav1.NewTime(time.Now().Add(-patience))
	for name, c := range map[string]struct {
		served time.Time
		s      *agents.Sandbox
		waits  bool
	}{
		"a claim just now":            {time.Now(), fresh, true},
		"a claim long ago":            {time.Now().Add(-calm), fresh, false},
		"none, or the stock ran out":  {time.Time{}, fresh, false},
		"it has waited for very long": {time.Now(), old, false},
	} {
		r := &sandboxReconciler{served: func() time.Time { return c.served }}
		if wait := r.untilCalm(c.s); (wait > 0) != c.waits || wait > calm {
			t.Errorf("%s: waits %s", name, wait)
		}
	}
}

// Members start few at a time, in their order, and one that has gone holds nobody up.
func TestGate(t *testing.T) {
	g := newGate(2)
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	defer queue.ShutDown()
	if err := g.source().Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	key := func(i int) types.NamespacedName { return types.NamespacedName{Namespace: "a", Name: fmt.Sprint(i)} }
	for i := range 5 {
		if got, want := g.enter(key(i)), i < 2; got != want {
			t.Errorf("member %d enters: %v", i, got)
		}
		if i >= 2 {
			g.pass(key(i)) // as the end of its reconcile does
		}
	}
	if g.enter(key(3)) || !g.enter(key(1)) {
		t.Error("who waits entered, or who is inside did not stay so")
	}
	called := func(want int) {
		t.Helper()
		if n := queue.Len(); n != 1 {
			t.Fatalf("%d were called, want 1", n)
		}
		r, _ := queue.Get()
		queue.Done(r)
		if r.NamespacedName != key(want) {
			t.Errorf("%s was called, want %d", r, want)
		}
	}
	g.pass(key(0))
	called(2)
	g.pass(key(2)) // it has gone: it does not enter
	called(3)
	if !g.enter(key(3)) {
		t.Error("the called one finds no room")
	}
	g.pass(key(9)) // somebody's who was never here
	if n := queue.Len(); n != 0 {
		t.Errorf("%d were called into a full gate", n)
	}
	g.pass(key(1))
	called(4)
}
