package cache_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/cache"
)

func TestWaitIsForAllKinds(t *testing.T) {
	c, _ := start(t)
	key := types.NamespacedName{Namespace: "default", Name: "x"}
	done := make(chan error, 3)
	go func() { done <- waitFor[*extensions.SandboxTemplate](t.Context(), c, key, true) }()
	go func() { done <- waitFor[*extensions.SandboxWarmPool](t.Context(), c, key, false) }()
	go func() {
		done <- waitFor[*corev1.Namespace](t.Context(), c, types.NamespacedName{Name: "default"}, true)
	}()
	if err := c.Live().Create(t.Context(), template("x", "image")); err != nil {
		t.Fatal(err)
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if err := waitFor[*corev1.Pod](t.Context(), c, key, true); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("wait for a kind that is not held = %v", err)
	}
	if _, err := cache.On(t.Context(), c, func(_, _ *corev1.Pod) {}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("watch of a kind that is not held = %v", err)
	}
}

// waitFor waits until an object is there, or is not.
func waitFor[T client.Object](ctx context.Context, c *cache.Cache, key types.NamespacedName, want bool) error {
	var none T
	_, err := cache.Wait(ctx, c, key, func(o T) (bool, error) { return (client.Object(o) != client.Object(none)) == want, nil })
	return err
}

// waiting is how many goroutines wait for an object, or were started by such a wait. The server
// and the informers in the same process start and end their own at any time.
func waiting() int {
	stacks := make([]byte, 1<<24)
	stacks = stacks[:runtime.Stack(stacks, true)]
	n := 0
	for one := range strings.SplitSeq(string(stacks), "\n\n") {
		if strings.Contains(one, "barchan/internal/control/cache.Wait") {
			n++
		}
	}
	return n
}

func TestManyWaitsLeaveNothing(t *testing.T) {
	c, _ := start(t)
	key := client.ObjectKeyFromObject(create(t, c))
	if _, err := c.WaitSandbox(t.Context(), key, there); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var waits, entered sync.WaitGroup
	for range 200 {
		entered.Add(1)
		waits.Go(func() {
			var once sync.Once
			_, err := c.WaitSandbox(ctx, key, func(*agents.Sandbox) (bool, error) {
				once.Do(entered.Done)
				return false, nil
			})
			if !errors.Is(err, errs.ErrTimeout) || !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled wait = %v", err)
			}
		})
	}
	entered.Wait()
	if during := waiting(); during < 200 {
		t.Errorf("%d goroutines wait, want 200", during)
	}
	cancel()
	waits.Wait()
	if after := waiting(); after != 0 {
		t.Errorf("%d goroutines still wait", after)
	}
	if n := cache.Waiting(c); n != 0 {
		t.Errorf("%d waits are left", n)
	}
}

func TestOnTellsAll(t *testing.T) {
	c, _ := start(t)
	made := create(t, c)
	if _, err := c.WaitSandbox(t.Context(), client.ObjectKeyFromObject(made), there); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var received []string
	synced, err := cache.On(t.Context(), c, func(old, now *agents.Sandbox) {
		mu.Lock()
		defer mu.Unlock()
		received = append(received, map[[2]bool]string{{false, true}: "new", {true, true}: "changed", {true, false}: "gone"}[[2]bool{old != nil, now != nil}])
	})
	if err != nil {
		t.Fatal(err)
	}
	<-synced
	mu.Lock()
	defer mu.Unlock()
	if len(received) == 0 || received[0] != "new" {
		t.Errorf("received %q once synced", received)
	}
}
