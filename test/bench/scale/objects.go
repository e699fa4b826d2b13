package scale

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/proc"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// Usual are the numbers of objects that are measured unless others are asked for.
const Usual = "100,1000,10000"

// Bars of a server with ten thousand sandboxes asleep, in milliseconds but for the memory of each, in KiB. They hold for fewer too.
const (
	pageBar    = 10
	watchBar   = 1000
	commandBar = 100 // beyond a command that asks no server
	readyBar   = 2000
	asleepBar  = 40
	barredSize = 10_000
)

// pools is how many warm pools without members a server reconciles.
const pools = 1000

// Sizes reads numbers of objects.
func Sizes(text string) (sizes []int, err error) {
	for word := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(word)
		if err != nil || n < 1 || len(sizes) > 0 && n <= sizes[len(sizes)-1] {
			return nil, fmt.Errorf("%q is no number that is greater than the one before", word)
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
}

// Objects measures what requests, a start and a rest cost beside growing numbers of sandboxes that sleep, and of empty pools. All but
// one of the sandboxes are copies: their objects, rows and files are as those of the one that has run.
func Objects(ctx context.Context, b *harness.Bench, sizes string) error {
	all, err := Sizes(sizes)
	if err != nil {
		return err
	}
	if err := b.Server.RestartWith(ctx, "BARCHAN_STORE_AFTER=1ms"); err != nil {
		return err
	}
	o := &objects{Bench: b}
	if err := o.boots(ctx, 0); err != nil {
		return err
	}
	if o.empty, err = o.weigh(ctx); err != nil {
		return err
	}
	if o.model, err = newModel(ctx, b); err != nil {
		return err
	}
	for _, n := range all {
		if err := o.measure(ctx, n); err != nil {
			return fmt.Errorf("%d objects: %w", n, err)
		}
	}
	return o.pools(ctx)
}

type objects struct {
	*harness.Bench
	model *model
	empty weight  // of the server without sandboxes
	boot  float64 // the same, until it is ready, in milliseconds
}

// weight is memory of the server, in KiB.
type weight struct{ rss, heap float64 }

// weigh restarts the server, and weighs it at rest.
func (o *objects) weigh(ctx context.Context) (w weight, err error) {
	if err := o.Server.RestartIdle(ctx); err != nil {
		return w, err
	}
	if err := o.settle(ctx); err != nil {
		return w, err
	}
	if err := harness.Rest(ctx, harness.Settle); err != nil { // a server returns memory after two seconds of rest
		return w, err
	}
	rss, err := proc.RSS(o.Server.PID())
	if err != nil {
		return w, err
	}
	heap, err := o.Server.Metric(ctx, "go_memstats_heap_alloc_bytes")
	return weight{rss: 1024 * rss, heap: heap / 1024}, err
}

// settle returns when the server and its containerd have next to nothing left to do.
func (o *objects) settle(ctx context.Context) error {
	const tick, little = time.Second, 0.1
	deadline := time.Now().Add(10 * time.Minute)
	for calm := 0; calm < 3; {
		used, err := o.load(ctx, tick)
		if err != nil {
			return err
		}
		if calm++; used > little {
			calm = 0
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the server uses %.2f processors after ten minutes", used)
		}
	}
	return nil
}

// load returns how many processors the server and its containerd use.
func (o *objects) load(ctx context.Context, over time.Duration) (float64, error) {
	other, err := proc.With("containerd", filepath.Join(o.Server.Data, "containerd", "config.toml"))
	if err != nil {
		return 0, err
	}
	both := []int{o.Server.PID(), other}
	before := proc.CPU(both)
	if err := harness.Rest(ctx, over); err != nil {
		return 0, err
	}
	return (proc.CPU(both) - before) / over.Seconds(), nil
}

// measure grows to n sandboxes and measures beside them.
func (o *objects) measure(ctx context.Context, n int) error {
	o.Logf("grow to %d sandboxes", n)
	began := time.Now()
	if err := o.model.grow(ctx, n); err != nil {
		return err
	}
	if err := o.settle(ctx); err != nil {
		return err
	}
	o.Logf("%d sandboxes sleep after %.0f s", n, time.Since(began).Seconds())
	if err := o.boots(ctx, n); err != nil {
		return err
	}
	full, err := o.weigh(ctx)
	if err != nil {
		return err
	}
	each := func(what string, full, empty float64) *report.Figure {
		return o.Report.One("objects", fmt.Sprintf("%s with %d asleep, beyond that with none, each", what, n), "KiB", (full-empty)/float64(n))
	}
	o.bar(each("server RSS", full.rss, o.empty.rss), n, asleepBar)
	each("heap", full.heap, o.empty.heap)
	used, err := o.load(ctx, 2*harness.Settle)
	if err != nil {
		return err
	}
	o.Report.One("objects", fmt.Sprintf("CPU of the server and containerd at rest, %d asleep", n), "% of a core", 100*used)
	for _, f := range []func(context.Context, int) error{o.lists, o.watches, o.commands} {
		if err := f(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// bar sets the bar of a figure, unless there are more objects than it is for.
func (o *objects) bar(f *report.Figure, n int, most float64) {
	if n <= barredSize {
		f.AtMost(most)
	}
}

// boots starts the server beside n sandboxes asleep, which is the floor of the others if there are none.
func (o *objects) boots(ctx context.Context, n int) error {
	var took report.Samples
	for range o.Rounds(3) {
		d, err := o.Server.Restart(ctx, nil)
		if err != nil {
			return err
		}
		took = append(took, report.Millis(d))
		if err := o.settle(ctx); err != nil { // of what the start left to do
			return err
		}
	}
	f := o.Report.Add("objects", fmt.Sprintf("boot to ready, %d asleep", n), "ms", took)
	if n == 0 {
		o.boot = took.At(0.5)
		return nil
	}
	o.bar(f.Over("with none", o.boot), n, readyBar)
	return nil
}

// commands lists by the command line, beside a command that asks no server.
func (o *objects) commands(ctx context.Context, n int) error {
	run := func(args ...string) (report.Samples, error) {
		return harness.Times(o.Rounds(15), func() error {
			_, err := o.Server.Command(ctx, args...)
			return err
		})
	}
	bare, err := run("help")
	if err != nil {
		return err
	}
	took, err := run("ls")
	if err != nil {
		return err
	}
	o.bar(o.Report.Add("objects", fmt.Sprintf("barchan ls, %d asleep", n), "ms", took).Over("barchan help", bare.At(0.5)), n, bare.At(0.5)+commandBar)
	return nil
}

// pools makes pools without members, and measures the server at rest beside them.
func (o *objects) pools(ctx context.Context) error {
	before, err := o.load(ctx, 2*harness.Settle)
	if err != nil {
		return err
	}
	n := o.Rounds(pools)
	began := time.Now()
	var manifests strings.Builder
	for i := range n {
		manifests.WriteString(harness.PoolManifest(fmt.Sprintf("empty-%d", i), harness.DefaultTemplate, 0) + "\n---\n")
	}
	if err := o.Server.Apply(ctx, manifests.String()); err != nil {
		return err
	}
	if err := o.settle(ctx); err != nil {
		return err
	}
	o.Report.One("objects", fmt.Sprintf("%d empty pools, until all are reconciled", n), "s", time.Since(began).Seconds())
	if _, err := o.weigh(ctx); err != nil { // after a restart
		return err
	}
	after, err := o.load(ctx, 2*harness.Settle)
	if err != nil {
		return err
	}
	o.Report.One("objects", fmt.Sprintf("CPU of the server and containerd at rest, %d pools", n), "% of a core", 100*after).Over("without pools", 100*before)
	return nil
}
