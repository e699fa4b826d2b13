package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// BenchmarkMemory measures checkpoints and restores, by the sandbox's memory and by options. Times
// are in milliseconds: "save" is Checkpoint, "still" how long the sandbox did not answer meanwhile,
// "restore" is Restore, "answer" from its begin to the first answer, "whole" to an answer that has
// read all memory, each of all copies. "pss" is mebibytes, of all processes of all copies.
//
//	go test -run '^$' -bench Memory -benchtime 5x ./internal/node/oci
func BenchmarkMemory(b *testing.B) {
	type variant struct {
		name    string
		save    CheckpointOptions
		restore RestoreOptions
		copies  int
	}
	plain := CheckpointOptions{LeaveRunning: true}
	background := RestoreOptions{Background: true}
	direct := RestoreOptions{Background: true, Direct: true}
	for _, size := range []struct {
		name, question string
		ways           []variant
	}{
		{"small", "hold 0", []variant{
			{"plain", plain, RestoreOptions{}, 1},
			{"paused", CheckpointOptions{}, RestoreOptions{}, 1},
			{"background", plain, background, 1},
			{"flate", CheckpointOptions{LeaveRunning: true, Compression: memimage.Flate}, RestoreOptions{}, 1},
			{"background", plain, background, 4},
		}},
		{"512MiB", "hold 512", []variant{
			{"plain", plain, RestoreOptions{}, 1},
			{"background", plain, background, 1},
			{"direct", CheckpointOptions{LeaveRunning: true, Direct: true}, direct, 1},
			{"flate", CheckpointOptions{LeaveRunning: true, Compression: memimage.Flate}, RestoreOptions{}, 1},
			{"background", plain, background, 4},
		}},
		{"512MiB-zeros", "zeros 512", []variant{
			{"plain", plain, RestoreOptions{}, 1}, {"exclude", CheckpointOptions{LeaveRunning: true, ExcludeCommittedZeroPages: true}, RestoreOptions{}, 1},
		}},
	} {
		for _, w := range size.ways {
			b.Run(fmt.Sprintf("%s/%s/%d", size.name, w.name, w.copies), func(b *testing.B) {
				benchmarkMemory(b, size.question, w.save, w.restore, w.copies)
			})
		}
	}
}

func benchmarkMemory(b *testing.B, question string, save CheckpointOptions, restore RestoreOptions, copies int) {
	l := newTestHost(b)
	first := l.newSandbox(b).run(b)
	first.query(b, question)
	_, err := l.Build(b.Context()) // once per server process
	must(b, err)
	copied := make([]*testSandbox, copies)
	for i := range copied {
		copied[i] = first.copyOf(b)
	}
	sums := map[string]time.Duration{}
	var size int64
	var pss float64
	for b.Loop() {
		image := filepath.Join(l.dir, "image")
		still := first.gap(b, func() {
			began := time.Now()
			img, err := l.Checkpoint(b.Context(), first.id, image, save)
			must(b, err)
			sums["save"] += time.Since(began)
			size = img.Size()
			if !save.LeaveRunning {
				must(b, l.Resume(b.Context(), first.id))
			}
		})
		sums["still"] += still
		began := time.Now()
		concurrently(b, copied, func(c *testSandbox) error {
			_, err := l.Restore(b.Context(), c.id, c.bundle, image, c.console, restore)
			return err
		})
		sums["restore"] += time.Since(began)
		concurrently(b, copied, func(c *testSandbox) error { c.query(b, "add"); return nil })
		sums["answer"] += time.Since(began)
		pss += l.pss(b, copied)
		concurrently(b, copied, func(c *testSandbox) error { c.query(b, "held"); return nil })
		sums["whole"] += time.Since(began)
		for _, c := range copied {
			must(b, l.Remove(b.Context(), c.id, c.spec.CgroupsPath))
			c.readdress(b)
		}
		must(b, memimage.Remove(image))
	}
	for name, sum := range sums {
		b.ReportMetric(float64(sum.Microseconds())/1000/float64(b.N), name+"-ms")
	}
	b.ReportMetric(float64(size)/(1<<20), "image-MiB")
	b.ReportMetric(pss/float64(b.N), "pss-MiB")
	b.ReportMetric(0, "ns/op")
}

func concurrently(b *testing.B, boxes []*testSandbox, do func(*testSandbox) error) {
	b.Helper()
	failures := make([]error, len(boxes))
	var wg sync.WaitGroup
	for i, c := range boxes {
		wg.Go(func() { failures[i] = do(c) })
	}
	wg.Wait()
	must(b, errors.Join(failures...))
}

// gap returns the longest time between two answers of a sandbox while f runs.
func (b *testSandbox) gap(t testing.TB, f func()) (longest time.Duration) {
	t.Helper()
	c := b.dial(t)
	defer c.close()
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for last := time.Now(); ctx.Err() == nil; {
			if _, err := c.request("pid"); err != nil {
				t.Error(err)
				return
			}
			longest, last = max(longest, time.Since(last)), time.Now()
		}
	})
	f()
	cancel()
	wg.Wait()
	return longest
}

// pss sums the proportional set sizes of the sandboxes' processes, in mebibytes.
func (l *testHost) pss(t testing.TB, boxes []*testSandbox) (sum float64) {
	t.Helper()
	for _, b := range boxes {
		for _, pid := range b.processes(t) {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
			if err != nil {
				continue // exited
			}
			for line := range strings.Lines(string(text)) {
				if words := strings.Fields(line); len(words) > 1 && words[0] == "Pss:" {
					kibi, err := strconv.Atoi(words[1])
					must(t, err)
					sum += float64(kibi) / 1024
				}
			}
		}
	}
	return sum
}
