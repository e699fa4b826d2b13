package scale

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/proc"
	"github.com/barchan-dev/barchan/test/bench/report"
)

const (
	few  = 20
	many = 100
)

// serverBars are the resident memory, in MiB, that the server shall keep to with so many sandboxes.
var serverBars = map[int]float64{0: 150, few: 200}

// Memory fills a fresh server with idle sandboxes and weighs all that runs.
func Memory(ctx context.Context, b *harness.Bench) error {
	if err := b.Server.RestartIdle(ctx); err != nil {
		return err
	}
	if err := weighServer(b, 0); err != nil {
		return err
	}
	var sandboxes []harness.Sandbox
	for _, n := range []int{few, many} {
		began := time.Now()
		more, err := b.Server.Fill(ctx, "gvisor", n-len(sandboxes))
		if err != nil {
			return err
		}
		perSecond := float64(len(more)) / time.Since(began).Seconds()
		sandboxes = append(sandboxes, more...)
		if err := idle(ctx, b, n); err != nil {
			return err
		}
		if err := b.Boots(ctx, fmt.Sprintf("boot to ready, %d sandboxes adopted", n), b.Rounds(10)); err != nil {
			return err
		}
		if n == few {
			continue
		}
		b.Report.One("density", fmt.Sprintf("cold creates a second, %d at once", harness.AtOnce), "/s", perSecond)
		if err := countLive(ctx, b, sandboxes); err != nil {
			return err
		}
	}
	return nil
}

// idle weighs the server and n idle sandboxes.
func idle(ctx context.Context, b *harness.Bench, n int) error {
	if err := harness.Rest(ctx, settleTime); err != nil {
		return err
	}
	if err := weighServer(b, n); err != nil {
		return err
	}
	pids, err := proc.InCgroup(b.Server.Cgroup)
	if err == nil && len(pids) == 0 {
		err = fmt.Errorf("no process is in the cgroup %s", b.Server.Cgroup)
	}
	if err != nil {
		return err
	}
	pss, err := proc.PSS(pids)
	if err != nil {
		return err
	}
	b.Report.One("memory", fmt.Sprintf("an idle sandbox of %d, PSS of all its processes", n), "MiB", pss/float64(n)).AtMost(pssBar)
	all := append(pids, b.Server.PID()) //nolint:gocritic // another list on purpose
	before := proc.CPU(all)
	if err := harness.Rest(ctx, harness.Settle); err != nil {
		return err
	}
	used := (proc.CPU(all) - before) / harness.Settle.Seconds()
	b.Report.One("density", fmt.Sprintf("CPU of the server and %d idle sandboxes", n), "% of a core", 100*used)
	return nil
}

// weighServer weighs the server and its containerd with n sandboxes.
func weighServer(b *harness.Bench, n int) error {
	when := fmt.Sprintf("with %d sandboxes", n)
	if n == 0 {
		when = "idle"
	}
	rss, err := proc.RSS(b.Server.PID())
	if err != nil {
		return err
	}
	f := b.Report.One("memory", "server RSS, "+when, "MiB", rss)
	if bar, ok := serverBars[n]; ok {
		f.AtMost(bar)
	}
	// It outlives the server that started it, which is thus not its parent any more.
	other, err := proc.With("containerd", filepath.Join(b.Server.Data, "containerd", "config.toml"))
	if err != nil {
		return err
	}
	if rss, err = proc.RSS(other); err != nil {
		return err
	}
	b.Report.One("memory", "containerd RSS, "+when, "MiB", rss)
	return nil
}

// countLive has each sandbox run a command.
func countLive(ctx context.Context, b *harness.Bench, sandboxes []harness.Sandbox) error {
	var mu sync.Mutex
	var took report.Samples
	var first error
	var group errgroup.Group // one that is dead does not keep the others from being counted
	group.SetLimit(harness.AtOnce)
	for _, x := range sandboxes {
		group.Go(func() error {
			began := time.Now()
			out, err := x.Run(ctx, "echo", "alive")
			mu.Lock()
			defer mu.Unlock()
			if err == nil && strings.TrimSpace(out.Text) == "alive" {
				took = append(took, report.Millis(time.Since(began)))
			} else if first == nil {
				first = fmt.Errorf("sandbox %s printed %q: %v", x.ID, out.Text, err) //nolint:errorlint // there may be none
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if first != nil {
		b.Logf("not all live: %v", first)
	}
	b.Report.One("density", "idle sandboxes live at once", "sandboxes", float64(len(took))).AtLeast(many)
	if len(took) > 0 {
		b.Report.Add("density", fmt.Sprintf("first command in each of %d, %d at once", many, harness.AtOnce), "ms", took)
	}
	return ctx.Err()
}
