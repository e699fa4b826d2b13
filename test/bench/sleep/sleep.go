package sleep

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// Bars, in milliseconds or as a ratio to the floor.
const (
	smallPauseBar  = 120
	smallResumeBar = 150
	bigRatioBar    = 2
)

// loadTime is how long a sandbox that was woken is left alone before it sleeps again, for each MiB.
const loadTime = 2 * time.Millisecond

// sleeps are sandboxes of several sizes: so many MiB that cannot be compressed lie in their memory.
var sleeps = []struct {
	name   string
	mib    int
	rounds int
}{{"small", 0, 30}, {"256 MiB", 256, 10}, {"1 GiB", 1024, 5}}

const sleeper = "bench-sleep"

// Measure has sandboxes sleep and wake, beside dd of what goes to disk and back.
func Measure(ctx context.Context, b *harness.Bench) error {
	if err := b.Server.ApplyTemplate(ctx, harness.Template{Name: sleeper, Memory: "2Gi"}); err != nil {
		return err
	}
	if err := b.Server.RestartWith(ctx, "BARCHAN_STORE_AFTER=1ms"); err != nil {
		return err
	}
	for _, s := range sleeps {
		if err := sleepOf(ctx, b, s.name, s.mib, b.Rounds(s.rounds)); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	for _, f := range []func(context.Context, *harness.Bench) error{wakes, snapshots, forks, held} {
		if err := f(ctx, b); err != nil {
			return err
		}
	}
	return b.Server.RestartWith(ctx, "BARCHAN_STORE_AFTER=30s")
}

// slept is what one sleep took, in milliseconds.
type slept struct{ answered, stored, warm, cold report.Samples }

func sleepOf(ctx context.Context, b *harness.Bench, name string, mib, n int) error {
	x, err := b.Server.Claim(ctx, client.CreateOptions{TemplateID: sleeper, Timeout: time.Hour})
	if err != nil {
		return err
	}
	if mib > 0 {
		if err := hold(ctx, x, mib); err != nil {
			return err
		}
	}
	var took slept
	for i := range n + 1 {
		keep := &took
		if i == 0 { // the first one only warms
			keep = new(slept)
		}
		if err := harness.Rest(ctx, time.Duration(mib)*loadTime); err != nil { // what it was woken with is still being read
			return err
		}
		if err := sleepAndWake(ctx, b, x, keep, i%2 == 0); err != nil {
			return err
		}
	}
	written, read, readCold, err := floors(ctx, b, x, max(2, n/2))
	if err != nil {
		return err
	}
	b.Report.Add("sleep", "pause until answered, "+name, "ms", took.answered)
	stored := b.Report.Add("sleep", "pause until memory is on disk, "+name, "ms", took.stored).Over("dd with fsync of the same bytes", written.At(0.5))
	var warm, cold *report.Figure
	if len(took.warm) > 0 {
		warm = b.Report.Add("sleep", "resume to first command's output, "+name, "ms", took.warm).Over("dd of the same bytes", read.At(0.5))
	}
	if len(took.cold) > 0 {
		cold = b.Report.Add("sleep", "the same, nothing of it cached, "+name, "ms", took.cold).Over("dd of the same bytes", readCold.At(0.5))
	}
	if mib == 0 {
		stored.AtMost(smallPauseBar)
	} else {
		stored.AtMost(bigRatioBar * written.At(0.5))
	}
	for _, f := range []*report.Figure{warm, cold} {
		if f != nil {
			f.AtMost(smallResumeBar)
		}
	}
	return b.Server.Kill(ctx, x)
}

// hold has a program in the sandbox keep so many MiB, which differ from one another.
func hold(ctx context.Context, x harness.Sandbox, mib int) error {
	program := fmt.Sprintf("import os, time\nd = [os.urandom(1 << 20) for _ in range(%d)]\nopen('/tmp/held', 'w')\ntime.sleep(1e6)", mib)
	_, err := x.Run(ctx, "/bin/sh", "-c", "setsid python3 -c \"$1\" >/dev/null 2>&1 & while ! [ -e /tmp/held ]; do sleep 0.1; done", "sh", program)
	return err
}

// sleepAndWake takes a sandbox to disk and back.
func sleepAndWake(ctx context.Context, b *harness.Bench, x harness.Sandbox, took *slept, cold bool) error {
	count, err := storesDone(ctx, b)
	if err != nil {
		return err
	}
	unix.Sync() // what was written before is not to be paid for now
	began := time.Now()
	if err := b.Server.REST.Pause(ctx, x.ID, client.PauseOptions{}); err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	took.answered = append(took.answered, report.Millis(time.Since(began)))
	if err := awaitStores(ctx, b, count+1); err != nil {
		return err
	}
	took.stored = append(took.stored, report.Millis(time.Since(began)))
	if err := awaitStored(ctx, b, x.ID); err != nil {
		return err
	}
	if cold {
		if err := dropCaches(); err != nil {
			return err
		}
	}
	began = time.Now()
	if _, err := b.Server.REST.Connect(ctx, x.ID, client.ConnectOptions{Timeout: time.Hour}); err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	out, err := x.Run(ctx, "echo", "here")
	if err != nil {
		return err
	}
	if ms := report.Millis(out.First.Sub(began)); cold {
		took.cold = append(took.cold, ms)
	} else {
		took.warm = append(took.warm, ms)
	}
	return nil
}

// storesDone counts the memories that the server has written to disk.
func storesDone(ctx context.Context, b *harness.Bench) (float64, error) {
	times, err := b.Server.StepTimes(ctx, "gvisor")
	return times["store"].Count, err
}

func awaitStores(ctx context.Context, b *harness.Bench, n float64) error {
	return harness.Poll(ctx, time.Millisecond, "wait until memory is on disk", func(ctx context.Context) (bool, error) {
		count, err := storesDone(ctx, b)
		return count >= n, err
	})
}

// awaitStored waits until the object of a sandbox reports its memory on disk.
func awaitStored(ctx context.Context, b *harness.Bench, id string) error {
	return harness.Poll(ctx, harness.Tick, "wait until sandbox "+id+" sleeps", func(ctx context.Context) (bool, error) {
		d, err := b.Server.REST.Get(ctx, id)
		return d.State == client.StatePaused, err
	})
}

// pauseToDisk returns when the memory of a sandbox is on disk.
func pauseToDisk(ctx context.Context, b *harness.Bench, id string) error {
	count, err := storesDone(ctx, b)
	if err != nil {
		return err
	}
	if err := b.Server.REST.Pause(ctx, id, client.PauseOptions{}); err != nil {
		return err
	}
	return awaitStores(ctx, b, count+1)
}

// dropCaches has the kernel forget what it has of files.
func dropCaches() error {
	return os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0)
}

// floors copy and read the bytes of a sandbox's memory on disk by dd.
func floors(ctx context.Context, b *harness.Bench, x harness.Sandbox, n int) (written, read, readCold report.Samples, err error) {
	if err := pauseToDisk(ctx, b, x.ID); err != nil {
		return nil, nil, nil, err
	}
	dir := filepath.Join(b.Server.Data, "node", "memory", x.ID)
	from, to := filepath.Join(b.Server.Dir, "memory"), filepath.Join(b.Server.Dir, "memory.copy")
	defer func() { _, _ = os.Remove(from), os.Remove(to) }()
	if out, err := exec.CommandContext(ctx, "sh", "-c", "cat "+dir+"/* > "+from).CombinedOutput(); err != nil {
		return nil, nil, nil, fmt.Errorf("gather memory: %w: %s", err, out)
	}
	dd := func(args ...string) (float64, error) {
		began := time.Now()
		out, err := exec.CommandContext(ctx, "dd", args...).CombinedOutput()
		if err != nil {
			return 0, fmt.Errorf("dd: %w: %s", err, out)
		}
		return report.Millis(time.Since(began)), nil
	}
	for range n {
		unix.Sync()
		w, err1 := dd("if="+from, "of="+to, "bs=1M", "conv=fsync")
		r, err2 := dd("if="+from, "of=/dev/null", "bs=1M")
		err3 := dropCaches()
		c, err4 := dd("if="+from, "of=/dev/null", "bs=1M")
		if err := errors.Join(err1, err2, err3, err4); err != nil {
			return nil, nil, nil, err
		}
		written, read, readCold = append(written, w), append(read, r), append(readCold, c)
	}
	return written, read, readCold, nil
}
