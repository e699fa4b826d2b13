package node

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// BenchmarkColdCreate makes sandboxes until their agents answer, and reports the share of each step.
func BenchmarkColdCreate(b *testing.B) {
	for _, c := range []string{"gvisor", "runc"} {
		b.Run(c, func(b *testing.B) {
			m := newMachine(b)
			var mu sync.Mutex
			took := map[string][]time.Duration{}
			n, _ := m.node(func(cfg *Config) {
				cfg.ObserveStep = func(_, step string, d time.Duration) {
					mu.Lock()
					defer mu.Unlock()
					took[step] = append(took[step], d)
				}
			})
			var removed []time.Duration
			for b.Loop() {
				s := object(class(c))
				ensure(b, n, s)
				b.StopTimer()
				began := time.Now()
				if err := n.Remove(b.Context(), refOf(s)); err != nil {
					b.Fatal(err)
				}
				removed = append(removed, time.Since(began))
				b.StartTimer()
			}
			mu.Lock()
			defer mu.Unlock()
			b.ReportMetric(millis(took["total"], 50), "p50-ms")
			b.ReportMetric(millis(took["total"], 99), "p99-ms")
			b.ReportMetric(millis(removed, 50), "remove-p50-ms")
			var shares strings.Builder
			for _, step := range slices.Sorted(maps.Keys(took)) {
				fmt.Fprintf(&shares, "\n%-16s p50 %8.2f ms  %3.0f %% of the whole", step, millis(took[step], 50), 100*millis(took[step], 50)/millis(took["total"], 50))
			}
			b.Log(shares.String())
		})
	}
}

func millis(all []time.Duration, percentile int) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.SortFunc(all, cmp.Compare[time.Duration])
	return float64(all[min(len(all)-1, len(all)*percentile/100)].Microseconds()) / 1000
}

// BenchmarkSleepOnDisk moves the memory of a sandbox to disk and back, by what it holds, and
// reports the share of each step. "answered" is a command's output after the resume was requested
// for; "dd" writes as many bytes as the memory has and syncs them, the floor.
//
//	go test -run '^$' -bench SleepOnDisk -benchtime 10x ./internal/node
func BenchmarkSleepOnDisk(b *testing.B) {
	for _, mebi := range []int{0, 256} {
		b.Run(fmt.Sprintf("%dMiB", mebi), func(b *testing.B) {
			m := newMachine(b)
			var mu sync.Mutex
			took := map[string][]time.Duration{}
			note := func(step string, d time.Duration) {
				mu.Lock()
				defer mu.Unlock()
				took[step] = append(took[step], d)
			}
			n, _ := m.node(atOnce, func(cfg *Config) {
				cfg.ObserveStep = func(_, step string, d time.Duration) { note(step, d) }
			})
			s := object()
			ensure(b, n, s)
			run(b, n, s, fmt.Sprintf("dd if=/dev/urandom of=/dev/shm/x bs=1M count=%d", mebi))
			var size int64
			used := usageOf(b, n, s)
			mu.Lock()
			clear(took)
			mu.Unlock()
			for b.Loop() {
				began := time.Now()
				suspendMemory(b, n, s)
				note("suspend", time.Since(began))
				awaitStored(b, n, s)
				size = n.handles.Lookup(s.UID).Row().Memory.Size
				began = time.Now()
				resume(b, n, s)
				note("resume", time.Since(began))
				run(b, n, s, "echo hi")
				note("answered", time.Since(began))
				note("dd", floor(b, m.cfg.DataDir, size))
			}
			mu.Lock()
			defer mu.Unlock()
			b.ReportMetric(float64(size)/(1<<20), "image-MiB")
			b.ReportMetric(float64(used.Memory)/(1<<20), "freed-MiB")
			for _, name := range []string{"suspend", "store", "resume", "answered", "dd"} {
				b.ReportMetric(millis(took[name], 50), name+"-p50-ms")
			}
			var shares strings.Builder
			for _, step := range slices.Sorted(maps.Keys(took)) {
				fmt.Fprintf(&shares, "\n%-16s p50 %8.2f ms  p99 %8.2f ms", step, millis(took[step], 50), millis(took[step], 99))
			}
			b.Log(shares.String())
		})
	}
}

// floor is how long it takes to write and sync as many bytes.
func floor(b *testing.B, dir string, size int64) time.Duration {
	b.Helper()
	path := filepath.Join(dir, "floor")
	defer func() { _ = os.Remove(path) }()
	began := time.Now()
	mebi := max(1, size>>20)
	cmd := exec.CommandContext(b.Context(), "dd", "if=/dev/zero", "of="+path, "bs=1M", fmt.Sprintf("count=%d", mebi), "conv=fsync")
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("dd: %v: %s", err, out)
	}
	return time.Since(began)
}

// BenchmarkAdopt starts a node over sandboxes that live, with stand-ins for their processes: all
// else of them, network, record, snapshot and mount, is real.
func BenchmarkAdopt(b *testing.B) {
	for _, count := range []int{0, 100} {
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			m := newMachine(b)
			n, stop := m.node()
			for range count {
				standIn(b, n)
			}
			for b.Loop() {
				stop()
				n, stop = m.node()
				if list, err := n.List(b.Context()); err != nil || len(list) != count {
					b.Fatalf("%d sandboxes, %v", len(list), err)
				}
			}
			if left, err := n.Audit(b.Context()); err != nil || len(left) > 0 {
				b.Errorf("left: %v, %v", left, err)
			}
		})
	}
}

// standIn is a sandbox whose only process sleeps, in its cgroup.
func standIn(b *testing.B, n *Node) {
	b.Helper()
	s := object(class("runc"))
	u := n.handles.Of(refOf(s))
	p, err := n.planOf(s)
	must(b, err)
	w := n.host.Operation(&journal.Row{Stage: journal.Making, Plan: p})
	must(b, w.FindImage(b.Context()))
	must(b, n.handles.Note(u, w.Row, journal.Making))
	for _, name := range []string{"address", "network", "snapshot", "mount", "bundle", "record", "hold"} {
		must(b, w.DoStep(b.Context(), name))
	}
	child, err := lifecycle.StartChild(exec.Command("sleep", "1000")) //nolint:noctx // outlives the server
	must(b, err)
	go child.Reap() // as init would, when the sandbox is removed
	w.Row.Process, w.Row.StartedAt = child.Process, time.Now()
	cgroup := cgroupDir(n.host.Cgroup(w.ID()))
	must(b, os.MkdirAll(cgroup, 0o755))
	must(b, os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(fmt.Sprint(child.PID)), 0o644))
	must(b, n.handles.Note(u, w.Row, journal.Live))
	n.supervisor.SetRunning(u, w.Row)
}
