package node

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// BenchmarkFork makes a checkpoint of a small sandbox that runs, and as many sandboxes of it at once,
// and reports the time of each step. "still" is how long the source was paused, "cpu" what one of them
// needs of the processors, the server's part and its own.
//
//	go test -run '^$' -bench Fork -benchtime 5x ./internal/node
func BenchmarkFork(b *testing.B) {
	for _, count := range []int{1, 10, 100} {
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			m := newMachine(b)
			var mu sync.Mutex
			took := map[string][]time.Duration{}
			note := func(step string, d time.Duration) {
				mu.Lock()
				defer mu.Unlock()
				took[step] = append(took[step], d)
			}
			n, _ := m.node(func(cfg *Config) {
				cfg.ObserveStep = func(_, step string, d time.Duration) { note(step, d) }
				cfg.Network.Spares = 16
			})
			s := object()
			ensure(b, n, s)
			run(b, n, s, "(exec > /dev/null 2>&1; sleep 1000000 &)")
			mu.Lock()
			clear(took)
			mu.Unlock()
			for b.Loop() {
				ask := checkpointOf(s)
				note("still", capture1(b, n, ask).Paused)
				forks := make([]*v1beta1.Sandbox, count)
				began, used := time.Now(), processorTime(b)
				var making sync.WaitGroup
				for i := range forks {
					forks[i] = forkOf(s, ask)
					making.Go(func() {
						if _, err := n.Ensure(b.Context(), forks[i]); err != nil {
							b.Error(err)
						}
					})
				}
				making.Wait()
				note("all", time.Since(began))
				b.StopTimer()
				used = processorTime(b) - used
				for _, f := range forks {
					used += time.Duration(usageOf(b, n, f).CPU)
				}
				note("cpu", used/time.Duration(count))
				for _, f := range forks {
					must(b, n.Remove(b.Context(), refOf(f)))
				}
				must(b, n.DropCheckpoint(b.Context(), ask.Checkpoint))
				b.StartTimer()
			}
			mu.Lock()
			defer mu.Unlock()
			for step := range took {
				b.ReportMetric(millis(took[step], 50), step+"-p50-ms")
			}
			b.ReportMetric(millis(took["all"], 50)/float64(count), "per-fork-ms")
		})
	}
}

// processorTime is what this process and those that it has waited for have used.
func processorTime(b *testing.B) (sum time.Duration) {
	b.Helper()
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var used unix.Rusage
		must(b, unix.Getrusage(who, &used))
		sum += time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	return sum
}
