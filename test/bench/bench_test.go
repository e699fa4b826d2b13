package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

func TestParse(t *testing.T) {
	var talk bytes.Buffer
	if _, err := parse([]string{"-only", "exec,nope"}, &talk); err == nil || !strings.Contains(err.Error(), "nope") {
		t.Errorf("an unknown part = %v", err)
	}
	o, err := parse([]string{"--quick", "--only", "exec,api"}, &talk)
	if err != nil || len(o.wanted()) != 2 {
		t.Errorf("options = %+v, %v", o, err)
	}
}

// TestInterrupted ends a run in its second chapter: the first has been printed by then, and is in
// the table at the end.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var log, table bytes.Buffer
	b := &bench{Bench: &harness.Bench{Report: report.New(ctx), Log: &log}, parts: []part{
		{name: "first", alone: true, measure: func(_ context.Context, b *harness.Bench) error {
			b.Report.One("first", "what was measured", "ms", 12.3)
			return nil
		}},
		{name: "second", alone: true, measure: func(ctx context.Context, _ *harness.Bench) error {
			if !strings.Contains(log.String(), "what was measured  12.3 ms") {
				t.Errorf("the first chapter is not printed when the second begins:\n%s", log.String())
			}
			cancel()
			<-ctx.Done()
			return ctx.Err()
		}},
	}}
	if err := b.run(ctx, &table); !errors.Is(err, context.Canceled) {
		t.Errorf("run = %v, want canceled", err)
	}
	if !strings.Contains(table.String(), "what was measured  12.3 ms") {
		t.Errorf("the table lacks what was done:\n%s", table.String())
	}
}
