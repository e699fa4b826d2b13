package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// The runtime may use a processor while it starts a sandbox or saves its memory; all else has the sandbox's limit.
func TestCPULimitIsNotThatOfStarts(t *testing.T) {
	t.Parallel()
	const low, raised = "25000", "100000"
	m := newMachine(t)
	var mu sync.Mutex
	var crash bool
	seen := map[string]string{} // the quota at the end of each step
	var quota func() string
	watched := func(c *Config) {
		c.DefaultLimits.MilliCPU = 250
		c.AfterStep = func(step string) error {
			mu.Lock()
			defer mu.Unlock()
			seen[step] = quota()
			if crash && step == "capture_copied" {
				return operation.ErrCrash
			}
			return nil
		}
	}
	n, stop := m.node(watched, atOnce)
	of := func(s *agents.Sandbox) func() string {
		cgroup := n.host.Cgroup(string(sandbox.IDOf(s.UID)))
		return func() string {
			b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup/cpu", cgroup, "cpu.cfs_quota_us"))
			if err != nil {
				b, _ = os.ReadFile(filepath.Join("/sys/fs/cgroup", cgroup, "cpu.max"))
			}
			quota, _, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
			return quota
		}
	}
	expect := func(what string, want map[string]string) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		for step, quota := range want {
			if seen[step] != quota {
				t.Errorf("%s: after %s it has %q us of 100 ms, want %s", what, step, seen[step], quota)
			}
		}
		if now := quota(); now != low {
			t.Errorf("%s: it is left with %q us of 100 ms, want %s", what, now, low)
		}
		clear(seen)
	}

	plain := object(class("runc"))
	quota = of(plain)
	ensure(t, n, plain)
	expect("create by runc", map[string]string{"start": raised, "agent": raised, "limit": low, "warmup": low})

	prepared := object(class("gvisor"), func(s *agents.Sandbox) {
		first := *container(s)
		first.Name, first.Command = "first", []string{"/bin/sh", "-c", "sleep 2"}
		pod(s).InitContainers = []corev1.Container{first}
	})
	quota = of(prepared)
	initialized := make(chan error, 1)
	go func() {
		_, err := n.Ensure(t.Context(), prepared)
		initialized <- err
	}()
	eventually.True(t, "a program of an init container runs with the limit", func() bool {
		mu.Lock()
		defer mu.Unlock()
		_, ended := seen["init"]
		return seen["init_started"] == raised && !ended && quota() == low
	})
	must(t, <-initialized)
	must(t, n.Remove(t.Context(), refOf(prepared)))

	s := object(class("gvisor"))
	quota = of(s)
	ensure(t, n, s)
	expect("create", map[string]string{"start": raised, "agent": raised, "limit": low, "warmup": low})
	suspendMemory(t, n, s)
	awaitStored(t, n, s)
	resume(t, n, s)
	expect("resume", map[string]string{"checkpoint": low, "restore": raised, "agent": raised, "limit": low})
	ask := checkpointOf(s)
	capture1(t, n, ask)
	expect("snapshot", map[string]string{"capture_held": low, "capture_copied": raised, "capture_memory": low})
	fork := forkOf(s, ask)
	quota = of(fork)
	ensure(t, n, fork)
	expect("fork", map[string]string{"start": raised, "agent": raised, "limit": low})

	quota = of(s)
	mu.Lock()
	crash = true
	mu.Unlock()
	if _, err := n.Capture(t.Context(), checkpointOf(s)); !errors.Is(err, operation.ErrCrash) {
		t.Fatalf("capture: %v", err)
	}
	if now := quota(); now != raised {
		t.Errorf("at the crash it has %q us of 100 ms, want %s", now, raised)
	}
	stop()
	n, _ = m.node()
	clean(t, n)
	if now := quota(); now != low {
		t.Errorf("after an adoption it has %q us of 100 ms, want %s", now, low)
	}
}
