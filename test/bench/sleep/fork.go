package sleep

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// stillBar is for how many milliseconds a snapshot may stop a sandbox.
const stillBar = 60

// forkBars are the milliseconds in which so many forks shall be made.
var forkBars = map[int]float64{1: 200, 10: 1000, 100: 8000}

// snapshots takes snapshots of a running sandbox, and reads from it how long it stood still.
func snapshots(ctx context.Context, b *harness.Bench) error {
	x, err := b.Server.Create(ctx, "gvisor")
	if err != nil {
		return err
	}
	if err := b.Server.Serve(ctx, x, gapProgram); err != nil {
		return err
	}
	gap := func() (float64, error) {
		text, err := b.Server.Visit(ctx, x.ID)
		if err != nil {
			return 0, err
		}
		return strconv.ParseFloat(text, 64)
	}
	var took, still, idle report.Samples
	for i := range b.Rounds(20) + 1 {
		if _, err := gap(); err != nil {
			return err
		}
		if err := harness.Rest(ctx, 200*time.Millisecond); err != nil {
			return err
		}
		before, err := gap()
		if err != nil {
			return err
		}
		began := time.Now()
		made, err := b.Server.REST.CreateSnapshot(ctx, x.ID, client.SnapshotOptions{})
		if err != nil {
			return err
		}
		whole := report.Millis(time.Since(began))
		after, err := gap()
		if err != nil {
			return err
		}
		if i > 0 { // the first one only warms
			took, still, idle = append(took, whole), append(still, after), append(idle, before)
		}
		if err := b.Server.REST.DeleteSnapshot(ctx, made.SnapshotID); err != nil {
			return err
		}
	}
	b.Report.Add("sleep", "snapshot until answered, small", "ms", took)
	b.Report.Add("sleep", "greatest gap inside meanwhile, small", "ms", still).Over("the same without a snapshot", idle.At(0.5)).AtMost(stillBar)
	return b.Server.Kill(ctx, x)
}

// forks multiplies a sandbox, and has each fork run a command.
func forks(ctx context.Context, b *harness.Bench) error {
	x, err := b.Server.Create(ctx, "gvisor")
	if err != nil {
		return err
	}
	if err := hold(ctx, x, 1); err != nil { // a program that rests: a hundred that do not are all that is measured
		return err
	}
	for _, n := range []int{1, 10, 100} {
		rounds := map[int]int{1: 20, 10: 5, 100: 2}[n]
		if b.Quick {
			rounds = 1
		}
		var all, each, output report.Samples
		for range rounds {
			whole, first, err := fork(ctx, b, x, n)
			if err != nil {
				return fmt.Errorf("%d forks: %w", n, err)
			}
			all, each, output = append(all, whole), append(each, whole/float64(n)), append(output, first)
		}
		b.Report.Add("sleep", fmt.Sprintf("fork %d, until answered", n), "ms", all).AtMost(forkBars[n])
		b.Report.Add("sleep", fmt.Sprintf("fork %d, per fork", n), "ms", each)
		b.Report.Add("sleep", fmt.Sprintf("fork %d, until each has run a command", n), "ms", output)
	}
	return b.Server.Kill(ctx, x)
}

// fork makes n forks, has each run a command, and removes them.
func fork(ctx context.Context, b *harness.Bench, x harness.Sandbox, n int) (whole, output float64, err error) {
	began := time.Now()
	var made []client.Forked
	if err := b.Server.REST.Call(ctx, http.MethodPost, "/sandboxes/"+x.ID+"/fork", nil, map[string]int{"count": n, "timeout": 3600}, &made); err != nil {
		return 0, 0, err
	}
	whole = report.Millis(time.Since(began))
	var forks []harness.Sandbox
	for _, f := range made {
		if f.Error != nil || f.Sandbox == nil {
			return 0, 0, fmt.Errorf("a fork failed: %+v", f.Error)
		}
		y, err := b.Server.Open(f.Sandbox)
		if err != nil {
			return 0, 0, err
		}
		forks = append(forks, y)
	}
	if len(forks) != n {
		return 0, 0, fmt.Errorf("%d forks instead of %d", len(forks), n)
	}
	err = harness.Each(ctx, forks, func(ctx context.Context, y harness.Sandbox) error {
		_, err := y.Run(ctx, "echo", "here")
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	output = report.Millis(time.Since(began))
	return whole, output, b.Server.Clear(ctx, forks...)
}
