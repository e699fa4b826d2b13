package cache_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
)

// serve returns how to reach a real API server that runs until the test ends.
func serve(t testing.TB) *rest.Config {
	t.Helper()
	return startAPI(t, t.TempDir()).RESTConfig(apiserver.UserController)
}

// start returns a synced cache over a real API server, and what stops the cache.
func start(t testing.TB) (*cache.Cache, func()) {
	t.Helper()
	return startOn(t, serve(t))
}

func startOn(t testing.TB, cfg *rest.Config) (*cache.Cache, func()) {
	t.Helper()
	return synced(t, cache.Config{REST: cfg})
}

// synced returns a synced cache, and what stops it.
func synced(t testing.TB, cfg cache.Config) (*cache.Cache, func()) {
	t.Helper()
	c, err := cache.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := c.Run(ctx); err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	stop := func() {
		cancel()
		running.Wait()
	}
	t.Cleanup(stop)
	if err := c.WaitSynced(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c, stop
}

func create(t *testing.T, c *cache.Cache) *agents.Sandbox {
	t.Helper()
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}}
	s.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "x"}}
	if err := c.Live().Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	return s
}

func there(s *agents.Sandbox) (bool, error) { return s != nil, nil }

func gone(s *agents.Sandbox) (bool, error) { return s == nil, nil }

func TestReads(t *testing.T) {
	c, _ := start(t)
	ctx := t.Context()
	made := create(t, c)
	key := client.ObjectKeyFromObject(made)
	if _, err := c.WaitSandbox(ctx, key, there); err != nil {
		t.Fatal(err)
	}
	got, err := c.SandboxByID(ctx, sandbox.IDOf(made.UID))
	if err != nil || got.UID != made.UID {
		t.Errorf("SandboxByID = %v, %v", got, err)
	}
	if _, err := c.SandboxByID(ctx, "i0000000000000000000"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("SandboxByID of none = %v", err)
	}
	if _, err := c.Sandbox(ctx, types.NamespacedName{Namespace: "default", Name: "none"}); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("Sandbox of none = %v", err)
	}
	if _, err := c.APIKeyByHash(ctx, barchan.HashKey("none")); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("APIKeyByHash of none = %v", err)
	}
}

// Promise 7: a caller's changes to its result affect no other caller. The race detector verifies it.
func TestReadsAreCopies(t *testing.T) {
	c, _ := start(t)
	made := create(t, c)
	key := client.ObjectKeyFromObject(made)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				s, err := c.WaitSandbox(t.Context(), key, there)
				if err != nil {
					t.Error(err)
					return
				}
				if s.Spec.PodTemplate.Spec.Containers[0].Image != "x" || s.Labels["mine"] != "" {
					t.Error("another caller's change shows")
					return
				}
				s.Spec.PodTemplate.Spec.Containers[0].Image = "changed"
				s.Labels = map[string]string{"mine": "yes"}
			}
		})
	}
	wg.Wait()
}

func TestWaitsAreWokenByTheirOwnEvent(t *testing.T) {
	c, _ := start(t)
	made := create(t, c)
	key := client.ObjectKeyFromObject(made)
	labelled := func(want string) func(*agents.Sandbox) (bool, error) {
		return func(s *agents.Sandbox) (bool, error) { return s != nil && s.Labels["step"] == want, nil }
	}
	var entered sync.WaitGroup
	waiters := map[string]*sync.WaitGroup{"1": {}, "2": {}}
	for _, want := range []string{"1", "2", "2"} {
		entered.Add(1)
		waiters[want].Go(func() {
			in := sync.OnceFunc(entered.Done)
			defer in()
			s, err := c.WaitSandbox(t.Context(), key, func(s *agents.Sandbox) (bool, error) {
				in()
				return labelled(want)(s)
			})
			if err != nil || s.Labels["step"] != want {
				t.Errorf("wait for %s = %v, %v", want, s, err)
			}
		})
	}
	entered.Wait()
	for _, step := range []string{"1", "2"} {
		s, err := c.WaitSandbox(t.Context(), key, there)
		if err != nil {
			t.Fatal(err)
		}
		s.Labels = map[string]string{"step": step}
		if err := c.Live().Update(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		waiters[step].Wait() // a late waiter does not see the event
	}
}

func TestWaitSeesTheEnd(t *testing.T) {
	c, _ := start(t)
	made := create(t, c)
	key := client.ObjectKeyFromObject(made)
	done := make(chan error, 1)
	go func() {
		_, err := c.WaitSandbox(t.Context(), key, gone)
		done <- err
	}()
	if err := c.Live().Delete(t.Context(), made); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("wait for the end = %v", err)
	}
	if _, err := c.WaitSandbox(t.Context(), key, gone); err != nil {
		t.Errorf("wait for what has ended = %v", err)
	}
}

func TestWaitEndsWithItsContextOrTheCache(t *testing.T) {
	c, stop := start(t)
	key := client.ObjectKeyFromObject(create(t, c))
	never := func(*agents.Sandbox) (bool, error) { return false, nil }
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := c.WaitSandbox(ctx, key, never); !errors.Is(err, errs.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait that is too long = %v", err)
	}
	boom := errors.New("boom")
	if _, err := c.WaitSandbox(t.Context(), key, func(*agents.Sandbox) (bool, error) { return false, boom }); !errors.Is(err, boom) {
		t.Errorf("wait whose condition fails = %v", err)
	}
	entered, done := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		_, err := c.WaitSandbox(context.WithoutCancel(t.Context()), key, func(*agents.Sandbox) (bool, error) {
			select {
			case entered <- struct{}{}:
			default:
			}
			return false, nil
		})
		done <- err
	}()
	<-entered
	stop()
	if err := <-done; !errors.Is(err, cache.ErrStopped) {
		t.Errorf("wait of a cache that stops = %v", err)
	}
}
