package harness

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/test/bench/report"
)

const (
	// AtOnce is how many requests fill the machine without many of them waiting.
	AtOnce = 4
	// Settle is how long a server or sandbox is left alone before it counts as idle.
	Settle = 5 * time.Second
	// Tick is how often the server is polled for the end of something.
	Tick = 5 * time.Millisecond

	// pollTime bounds a wait.
	pollTime = 3 * time.Minute
	// emptyBootBar and bootBar are times, in milliseconds, that boots shall keep to.
	emptyBootBar = 2000
	bootBar      = 5000
)

// Bench is what a chapter has of the run that it is part of.
type Bench struct {
	Quick  bool   // measure a tenth of the rounds, for a trial
	Dir    string // where data lie while it runs
	Report *report.Report
	Log    io.Writer
	Server *Server // nil in a chapter that needs none
}

// Rounds returns how often to measure: n times, or a few times for a trial.
func (b *Bench) Rounds(n int) int {
	if b.Quick {
		return max(2, n/10)
	}
	return n
}

// Logf tells the user what is going on.
func (b *Bench) Logf(format string, args ...any) {
	fmt.Fprintf(b.Log, "==> "+format+"\n", args...)
}

// Prepare starts the server for the first time and gives it the base image and a template of
// each runtime class.
func (b *Bench) Prepare(ctx context.Context) error {
	took, err := b.Server.start(ctx)
	if err != nil {
		return err
	}
	b.Report.One("boot", "boot to ready, empty data directory", "ms", report.Millis(took)).AtMost(emptyBootBar)
	b.Logf("make the base image, or take it from the cache")
	if _, err := b.Server.Command(ctx, "image", "build", "base"); err != nil {
		return err
	}
	version, err := b.Server.Command(ctx, "version")
	if err != nil {
		return err
	}
	b.Report.Version = strings.TrimSpace(version)
	for _, class := range b.Server.Classes {
		if err := b.Server.ApplyTemplate(ctx, Template{Name: templateOf(class), Class: class}); err != nil {
			return err
		}
	}
	return nil
}

// Boots starts the server n times over what is there.
func (b *Bench) Boots(ctx context.Context, name string, n int) error {
	var took report.Samples
	for range n {
		d, err := b.Server.restart(ctx)
		if err != nil {
			return err
		}
		took = append(took, report.Millis(d))
	}
	b.Report.Add("boot", name, "ms", took).AtMost(bootBar)
	return nil
}

// Times measures f n times, in milliseconds, after a few times that only warm.
func Times(n int, f func() error) (report.Samples, error) {
	const warm = 5
	var took report.Samples
	for i := range n + warm {
		began := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		if i >= warm {
			took = append(took, report.Millis(time.Since(began)))
		}
	}
	return took, nil
}

// Rest waits, for what was begun to come to rest.
func Rest(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Poll calls done at each tick until it returns true or an error, for three minutes at most. The action is for the error.
func Poll(ctx context.Context, tick time.Duration, action string, done func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, pollTime)
	defer cancel()
	for {
		if ok, err := done(ctx); ok || err != nil {
			return err
		}
		if err := Rest(ctx, tick); err != nil {
			return fmt.Errorf("%s: %w", action, err)
		}
	}
}
