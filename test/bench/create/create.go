package create

import (
	"context"
	"time"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// coldCreateBar is the median, in milliseconds, that a cold create shall keep to.
const coldCreateBar = 250

// outside names what a create takes beside the node's work: the API's writes, the controller,
// the watch.
const outside = "outside the node"

// Cold makes sandboxes one after another, has each print something, and kills it.
func Cold(ctx context.Context, b *harness.Bench) error {
	for _, class := range b.Server.Classes {
		bare, err := bareContainers(ctx, b, class, b.Rounds(20))
		if err != nil {
			return err
		}
		if err := createOf(ctx, b, class, bare.At(0.5)); err != nil {
			return err
		}
	}
	return nil
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
