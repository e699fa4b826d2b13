package create

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// Bars of cold creates.
const (
	coldCreateBar = 250 // ms, median
	coldBurst     = 100 // creates at once
	coldBurstBar  = 1.3 // of as many bare containers
)

// outside names what a create takes beside the node's work: the API's writes, the controller,
// the watch.
const outside = "outside the node"

// Cold makes sandboxes one after another, has each print something, and kills it; then many at once.
func Cold(ctx context.Context, b *harness.Bench) error {
	for _, class := range b.Server.Classes {
		err := withBare(ctx, b, class, func(c bare) error {
			one, err := c.oneByOne(ctx, b.Rounds(20))
			if err != nil {
				return err
			}
			if err := createOf(ctx, b, class, one.At(0.5)); err != nil {
				return err
			}
			return coldAtOnce(ctx, b, class, c)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// coldAtOnce makes many sandboxes at once, beside as many bare containers.
func coldAtOnce(ctx context.Context, b *harness.Bench, class string, c bare) error {
	n := b.Rounds(coldBurst)
	began := time.Now()
	if err := c.atOnce(ctx, n); err != nil {
		return err
	}
	floor := report.Millis(time.Since(began))
	made := make([]harness.Sandbox, n)
	group, burst := errgroup.WithContext(ctx)
	began = time.Now()
	for i := range made {
		group.Go(func() (err error) {
			made[i], err = b.Server.Create(burst, class)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("%d creates at once: %w", n, err)
	}
	took := report.Millis(time.Since(began))
	name := fmt.Sprintf("the last of %d cold creates at once, %s", n, class)
	b.Report.One("create", name, "ms", took).Over(fmt.Sprintf("%d bare containers at once", n), floor).AtMost(coldBurstBar * floor)
	if err := b.Server.KillAll(ctx, made); err != nil {
		return err
	}
	return b.Server.AwaitGone(ctx, class)
}

func createOf(ctx context.Context, b *harness.Bench, class string, bare float64) error {
	if err := warm(ctx, b, class); err != nil {
		return err
	}
	before, err := b.Server.StepTimes(ctx, class)
	if err != nil {
		return err
	}
	var created, output, killed, gone report.Samples
	for range b.Rounds(50) {
		began := time.Now()
		x, err := b.Server.Create(ctx, class)
		if err != nil {
			return err
		}
		created = append(created, report.Millis(time.Since(began)))
		out, err := x.Run(ctx, "echo", "here")
		if err != nil {
			return err
		}
		output = append(output, report.Millis(out.First.Sub(began)))
		began = time.Now()
		if err := b.Server.Kill(ctx, x); err != nil {
			return err
		}
		killed = append(killed, report.Millis(time.Since(began)))
		if err := b.Server.AwaitGone(ctx, class); err != nil {
			return err
		}
		gone = append(gone, report.Millis(time.Since(began)))
	}
	after, err := b.Server.StepTimes(ctx, class)
	if err != nil {
		return err
	}
	name := "bare " + class + " container, run to its end"
	f := b.Report.Add("create", "cold create by REST to agent ready, "+class, "ms", created).Over(name, bare)
	if class == "gvisor" {
		f.AtMost(coldCreateBar)
	}
	b.Report.Add("create", "create to first output, "+class, "ms", output).Over(name, bare)
	b.Report.Add("create", "kill, until answered, "+class, "ms", killed)
	b.Report.Add("create", "kill, until nothing of it is left, "+class, "ms", gone)
	shares(b, class, before, after, created.Mean())
	return nil
}

// warm makes one sandbox, so that the first to come meets the caches that all others meet.
func warm(ctx context.Context, b *harness.Bench, class string) error {
	x, err := b.Server.Create(ctx, class)
	if err != nil {
		return err
	}
	if err := b.Server.Kill(ctx, x); err != nil {
		return err
	}
	return b.Server.AwaitGone(ctx, class)
}

// stepNames are the reported steps, in their order.
var stepNames = []string{
	"image", "journal", "address", "network", "snapshot", "mount", "bundle", "record", "start", "agent", "hold",
}

// shares puts the mean of each step per create into the report. whole is the mean of a create
// as its client sees it, in milliseconds.
func shares(b *harness.Bench, class string, before, after map[string]harness.StepTime, whole float64) {
	creates := after["total"].Count - before["total"].Count
	per := func(name string) float64 { return 1000 * (after[name].Seconds - before[name].Seconds) / creates }
	add := func(name string, mean float64) {
		b.Report.Steps = append(b.Report.Steps, report.Step{Class: class, Name: name, Mean: mean, Share: mean / whole})
	}
	for _, name := range stepNames {
		add(name, per(name))
	}
	add("the node's whole", per("total"))
	add(outside, whole-per("total"))
	add("create by REST", whole)
}
