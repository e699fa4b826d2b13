package cache_test

import (
	"slices"
	"strconv"
	"sync"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/testkit/lag"
)

// TestLag shows that the fault injector for caches holds back, and neither loses nor reorders.
func TestLag(t *testing.T) {
	cfg, hold, release := lag.New(serve(t), lag.Only("sandboxes"))
	c, _ := startOn(t, cfg)
	t.Cleanup(release)
	made := create(t, c)
	key := client.ObjectKeyFromObject(made)
	if _, err := c.WaitSandbox(t.Context(), key, there); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var steps []string
	last := make(chan struct{})
	synced, err := cache.On(t.Context(), c, func(_, now *agents.Sandbox) {
		mu.Lock()
		defer mu.Unlock()
		if now != nil {
			steps = append(steps, now.Labels["step"])
			if now.Labels["step"] == "49" {
				close(last)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	<-synced
	hold()
	hold()
	want := []string{""}
	for i := range 50 {
		step := strconv.Itoa(i)
		made.Labels = map[string]string{"step": step}
		if err := c.Live().Update(t.Context(), made); err != nil {
			t.Fatal(err)
		}
		want = append(want, step)
	}
	other := template("t", "image") // another kind flows: later than all of it, and seen first
	if err := c.Live().Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if err := waitFor[*extensions.SandboxTemplate](t.Context(), c, client.ObjectKeyFromObject(other), true); err != nil {
		t.Fatal(err)
	}
	if got, err := c.Sandbox(t.Context(), key); err != nil || got.Labels["step"] != "" {
		t.Fatalf("held back, the cache shows %v, %v", got.Labels, err)
	}
	release()
	release()
	<-last
	if got, err := c.Sandbox(t.Context(), key); err != nil || got.Labels["step"] != "49" {
		t.Errorf("released, the cache shows %v, %v", got.Labels, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(steps, want) {
		t.Errorf("after release: %q, want %q", steps, want)
	}
}
