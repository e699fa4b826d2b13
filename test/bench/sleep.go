package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/client"
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

// measureSleep has sandboxes sleep and wake, beside dd of what goes to disk and back.
func measureSleep(ctx context.Context, b *bench) error {
	if _, err := b.server.command(ctx, templateFor(sleeper, "2Gi"), "apply", "-f", "-"); err != nil {
		return err
	}
	if err := b.restartWith(ctx, "BARCHAN_STORE_AFTER=1ms"); err != nil {
		return err
	}
	for _, s := range sleeps {
		if err := b.sleepOf(ctx, s.name, s.mib, b.rounds(s.rounds)); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	for _, f := range []func(context.Context) error{b.wakes, b.snapshots, b.forks, b.held} {
		if err := f(ctx); err != nil {
			return err
		}
	}
	return b.restartWith(ctx, "BARCHAN_STORE_AFTER=30s")
}

// templateFor is a template of gVisor with so much memory.
func templateFor(name, memory string) string {
	return strings.NewReplacer("bench-gvisor", name, "512Mi", memory).Replace(templateOf("gvisor"))
}

// restartWith restarts the server with a setting of its own.
func (b *bench) restartWith(ctx context.Context, setting string) error {
	b.server.env = append(b.server.env, setting) // the last of a name counts
	_, err := b.server.restart(ctx)
	return err
}

// slept is what one sleep took, in milliseconds.
type slept struct{ answered, stored, warm, cold samples }

func (b *bench) sleepOf(ctx context.Context, name string, mib, n int) error {
	x, err := b.server.claim(ctx, client.CreateOptions{TemplateID: sleeper, Timeout: time.Hour})
	if err != nil {
		return err
	}
	if mib > 0 {
		if err := x.hold(ctx, mib); err != nil {
			return err
		}
	}
	var took slept
	for i := range n + 1 {
		keep := &took
		if i == 0 { // the first one only warms
			keep = new(slept)
		}
		if err := rest(ctx, time.Duration(mib)*loadTime); err != nil { // what it was woken with is still being read
			return err
		}
		if err := b.sleepAndWake(ctx, x, keep, i%2 == 0); err != nil {
			return err
		}
	}
	written, read, readCold, err := b.floors(ctx, x, max(2, n/2))
	if err != nil {
		return err
	}
	b.report.add("sleep", "pause until answered, "+name, "ms", took.answered)
	stored := b.report.add("sleep", "pause until memory is on disk, "+name, "ms", took.stored).over("dd with fsync of the same bytes", written.at(0.5))
	var warm, cold *figure
	if len(took.warm) > 0 {
		warm = b.report.add("sleep", "resume to first command's output, "+name, "ms", took.warm).over("dd of the same bytes", read.at(0.5))
	}
	if len(took.cold) > 0 {
		cold = b.report.add("sleep", "the same, nothing of it cached, "+name, "ms", took.cold).over("dd of the same bytes", readCold.at(0.5))
	}
	if mib == 0 {
		stored.atMost(smallPauseBar)
	} else {
		stored.atMost(bigRatioBar * written.at(0.5))
	}
	for _, f := range []*figure{warm, cold} {
		if f != nil {
			f.atMost(smallResumeBar)
		}
	}
	return b.server.kill(ctx, x)
}

// hold has a program in the sandbox keep so many MiB, which differ from one another.
func (x box) hold(ctx context.Context, mib int) error {
	program := fmt.Sprintf("import os, time\nd = [os.urandom(1 << 20) for _ in range(%d)]\nopen('/tmp/held', 'w')\ntime.sleep(1e6)", mib)
	_, err := x.run(ctx, "/bin/sh", "-c", "setsid python3 -c \"$1\" >/dev/null 2>&1 & while ! [ -e /tmp/held ]; do sleep 0.1; done", "sh", program)
	return err
}

// sleepAndWake takes a sandbox to disk and back.
func (b *bench) sleepAndWake(ctx context.Context, x box, took *slept, cold bool) error {
	count, err := b.storesDone(ctx)
	if err != nil {
		return err
	}
	unix.Sync() // what was written before is not to be paid for now
	began := time.Now()
	if err := b.server.rest.Pause(ctx, x.id, client.PauseOptions{}); err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	took.answered = append(took.answered, millis(time.Since(began)))
	if err := b.awaitStores(ctx, count+1); err != nil {
		return err
	}
	took.stored = append(took.stored, millis(time.Since(began)))
	if err := b.awaitStored(ctx, x.id); err != nil {
		return err
	}
	if cold {
		if err := dropCaches(); err != nil {
			return err
		}
	}
	began = time.Now()
	if _, err := b.server.rest.Connect(ctx, x.id, client.ConnectOptions{Timeout: time.Hour}); err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	first, err := x.run(ctx, "echo", "here")
	if err != nil {
		return err
	}
	if ms := millis(first.output.Sub(began)); cold {
		took.cold = append(took.cold, ms)
	} else {
		took.warm = append(took.warm, ms)
	}
	return nil
}

// storesDone counts the memories that the server has written to disk.
func (b *bench) storesDone(ctx context.Context) (float64, error) {
	times, err := b.stepTimes(ctx, "gvisor")
	return times["store"].count, err
}

func (b *bench) awaitStores(ctx context.Context, n float64) error {
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	for {
		count, err := b.storesDone(ctx)
		if err != nil {
			return err
		}
		if count >= n {
			return nil
		}
		if err := rest(ctx, time.Millisecond); err != nil {
			return errors.Join(errors.New("memory was not written to disk"), err)
		}
	}
}

// awaitStored waits until the object of a sandbox reports its memory on disk.
func (b *bench) awaitStored(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	for {
		d, err := b.server.rest.Get(ctx, id)
		if err != nil {
			return err
		}
		if d.State == client.StatePaused {
			return nil
		}
		if err := rest(ctx, goneTick); err != nil {
			return fmt.Errorf("sandbox %s does not sleep: %w", id, err)
		}
	}
}

// floors copy and read the bytes of a sandbox's memory on disk by dd.
func (b *bench) floors(ctx context.Context, x box, n int) (written, read, readCold samples, err error) {
	count, err := b.storesDone(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	if err := b.server.rest.Pause(ctx, x.id, client.PauseOptions{}); err != nil {
		return nil, nil, nil, err
	}
	if err := b.awaitStores(ctx, count+1); err != nil {
		return nil, nil, nil, err
	}
	dir := filepath.Join(b.server.dir, "d", "node", "memory", x.id)
	from, to := filepath.Join(b.server.dir, "memory"), filepath.Join(b.server.dir, "memory.copy")
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
		return millis(time.Since(began)), nil
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
