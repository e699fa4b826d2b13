package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	few = 20
	// serverBar is the resident memory, in MiB, that the server shall keep to with few sandboxes.
	serverBar = 200
	// idleBar is the same with none.
	idleBar    = 150
	idleServer = "idle"
	many       = 100
	// atOnce is how many requests fill the machine without many of them waiting.
	atOnce = 4
	// settle is how long a sandbox is left alone before it counts as idle.
	settle = 5 * time.Second
)

// measureMemory fills a fresh server with idle sandboxes and weighs all that runs.
func measureMemory(ctx context.Context, b *bench) error {
	if _, err := b.server.restart(ctx); err != nil {
		return err
	}
	if err := rest(ctx, settle); err != nil {
		return err
	}
	if err := b.weighServer(idleServer); err != nil {
		return err
	}
	var boxes []box
	for _, n := range []int{few, many} {
		began := time.Now()
		more, err := b.fill(ctx, "gvisor", n-len(boxes))
		if err != nil {
			return err
		}
		perSecond := float64(len(more)) / time.Since(began).Seconds()
		boxes = append(boxes, more...)
		if err := b.idle(ctx, n); err != nil {
			return err
		}
		if err := b.boots(ctx, fmt.Sprintf("boot to ready, %d sandboxes adopted", n), b.rounds(10)); err != nil {
			return err
		}
		if n == few {
			continue
		}
		b.report.one("density", fmt.Sprintf("cold creates a second, %d at once", atOnce), "/s", perSecond)
		if err := b.countLive(ctx, boxes); err != nil {
			return err
		}
	}
	return nil
}

// fill makes n sandboxes of a class.
func (b *bench) fill(ctx context.Context, class string, n int) ([]box, error) {
	var mu sync.Mutex
	var boxes []box
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for range n {
		group.Go(func() error {
			x, err := b.server.create(ctx, class)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			boxes = append(boxes, x)
			return nil
		})
	}
	return boxes, group.Wait()
}

// idle weighs the server and n idle sandboxes.
func (b *bench) idle(ctx context.Context, n int) error {
	if err := rest(ctx, settle); err != nil {
		return err
	}
	if err := b.weighServer(fmt.Sprintf("with %d sandboxes", n)); err != nil {
		return err
	}
	pids, err := processesIn(b.server.cgroup)
	if err != nil {
		return err
	}
	pss, err := pssOf(pids)
	if err != nil {
		return err
	}
	b.report.one("memory", fmt.Sprintf("an idle sandbox of %d, PSS of all its processes", n), "MiB", pss/float64(n))
	all := append(pids, b.server.cmd.Process.Pid) //nolint:gocritic // another list on purpose
	before := cpuOf(all)
	if err := rest(ctx, settle); err != nil {
		return err
	}
	used := (cpuOf(all) - before) / settle.Seconds()
	b.report.one("density", fmt.Sprintf("CPU of the server and %d idle sandboxes", n), "% of a core", 100*used)
	return nil
}

func (b *bench) weighServer(when string) error {
	pid := b.server.cmd.Process.Pid
	rss, err := residentMiB(pid)
	if err != nil {
		return err
	}
	f := b.report.one("memory", "server RSS, "+when, "MiB", rss)
	switch when {
	case idleServer:
		f.atMost(idleBar)
	case fmt.Sprintf("with %d sandboxes", few):
		f.atMost(serverBar)
	}
	// It outlives the server that started it, which is thus not its parent any more.
	other, err := processWith("containerd", filepath.Join(b.server.dir, "d", "containerd", "config.toml"))
	if err != nil {
		return err
	}
	if rss, err = residentMiB(other); err != nil {
		return err
	}
	b.report.one("memory", "containerd RSS, "+when, "MiB", rss)
	return nil
}

// countLive has each sandbox run a command.
func (b *bench) countLive(ctx context.Context, boxes []box) error {
	var live atomic.Int64
	var mu sync.Mutex
	var took samples
	var first error
	var group errgroup.Group // one that is dead does not keep the others from being counted
	group.SetLimit(atOnce)
	for _, x := range boxes {
		group.Go(func() error {
			began := time.Now()
			r, err := x.run(ctx, "echo", "alive")
			mu.Lock()
			defer mu.Unlock()
			if err == nil && strings.TrimSpace(r.stdout) == "alive" {
				live.Add(1)
				took = append(took, millis(time.Since(began)))
			} else if first == nil {
				first = fmt.Errorf("sandbox %s printed %q: %v", x.id, r.stdout, err) //nolint:errorlint // there may be none
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if first != nil {
		b.logf("not all live: %v", first)
	}
	b.report.one("density", "idle sandboxes live at once", "sandboxes", float64(live.Load())).atLeast(many)
	if len(took) > 0 {
		b.report.add("density", fmt.Sprintf("first command in each of %d, %d at once", many, atOnce), "ms", took)
	}
	return ctx.Err()
}

// rest waits, for what was begun to come to rest.
func rest(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
