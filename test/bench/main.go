// Command bench measures a whole server from outside, as its users meet it, and prints one
// table in which each figure stands beside the floor measured in the same run. It starts a
// server of its own and removes it with everything that it made. It judges bars, and fails
// only where it could not measure: speed is never an error.
//
// This package has the flags and the order of the chapters. Each package below it has chapters of one subject, but for harness,
// gobench and proc, which they measure with, and report, which holds what they find out.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/test/bench/create"
	"github.com/barchan-dev/barchan/test/bench/files"
	"github.com/barchan-dev/barchan/test/bench/gateway"
	"github.com/barchan-dev/barchan/test/bench/gobench"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/images"
	"github.com/barchan-dev/barchan/test/bench/neighbors"
	"github.com/barchan-dev/barchan/test/bench/report"
	"github.com/barchan-dev/barchan/test/bench/scale"
	"github.com/barchan-dev/barchan/test/bench/sleep"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer context.AfterFunc(ctx, stop)() // a second signal ends the program at once
	var err error
	switch args := os.Args[1:]; {
	case len(args) > 0 && args[0] == "compare" && (len(args) == 2 || len(args) == 3):
		err = report.Compare(args[1:], os.Stdout)
	case len(args) == 2 && args[0] == gateway.Command:
		err = gateway.Serve(ctx, args[1])
	case len(args) == 4 && args[0] == neighbors.Command:
		err = neighbors.Attack(ctx, args[1], args[2], args[3])
	default:
		err = run(ctx, args, os.Stdout, os.Stderr)
	}
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench: %v\n", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	json     bool
	quick    bool
	all      bool
	only     string
	attacks  string
	fill     int
	objects  string
	html     string
	history  string
	note     string
	dir      string
	programs string
}

// part is one chapter of the table.
type part struct {
	name    string
	measure func(context.Context, *harness.Bench) error
	alone   bool // it needs no server
	// source says that it needs the source tree with Go, or installs packages: it is measured only where it is asked for.
	source bool
	// named says that it is measured only where --only names it, since it takes long or much memory.
	named bool
}

// parts lists the chapters in their order. Those that leave the server busy come last.
func parts(o options) []part {
	return []part{
		{name: "gateway", source: true, measure: gateway.Proxies, alone: true},
		{name: "boot", measure: scale.Boot},
		{name: "api", source: true, measure: gobench.API},
		{name: "create", measure: create.Cold},
		{name: "exec", measure: create.Exec},
		{name: "claim", measure: create.Claim},
		{name: "image", measure: images.Import},
		{name: "build", measure: images.Build},
		{name: "interpreter", measure: images.Interpreter},
		{name: "transfer", measure: files.Transfer},
		{name: "volume", measure: files.Volume},
		{name: "address", source: true, measure: gobench.Address},
		{name: "peers", source: true, measure: gateway.Peers},
		{name: "neighbors", source: true, measure: func(ctx context.Context, b *harness.Bench) error { return neighbors.Measure(ctx, b, o.attacks) }},
		{name: "sleep", measure: sleep.Measure},
		{name: "scale", measure: scale.Scale},
		{name: "memory", measure: scale.Memory},
		{name: "density", named: true, measure: func(ctx context.Context, b *harness.Bench) error { return scale.Density(ctx, b, o.fill) }},
		{name: "objects", named: true, measure: func(ctx context.Context, b *harness.Bench) error { return scale.Objects(ctx, b, o.objects) }},
	}
}

// bench is one run.
type bench struct {
	options
	*harness.Bench
	parts []part
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("a whole server needs root")
	}
	r := report.New(ctx)
	r.Quick, r.Note = o.quick, o.note
	return (&bench{options: o, parts: parts(o), Bench: &harness.Bench{Quick: o.quick, Dir: o.dir, Report: r, Log: stderr}}).run(ctx, stdout)
}

// run measures and writes what it has found out, also if it was interrupted or a part failed.
func (b *bench) run(ctx context.Context, stdout io.Writer) error {
	err := b.measure(ctx)
	if err != nil && len(b.Report.Figures) == 0 {
		return err
	}
	if b.html != "" {
		err = errors.Join(err, b.Report.SavePage(b.html))
	}
	if b.history != "" {
		err = errors.Join(err, b.Report.SaveHistory(b.history))
	}
	if b.json {
		return errors.Join(err, b.Report.WriteJSON(stdout))
	}
	return errors.Join(err, b.Report.WriteTable(stdout))
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.BoolVar(&o.json, "json", false, "print JSON instead of a table")
	f.BoolVar(&o.quick, "quick", false, "a tenth of the rounds, to try whether it works")
	f.BoolVar(&o.all, "all", false, "measure also what needs the source tree with Go, or packages that it installs")
	f.StringVar(&o.only, "only", "", "measure only these `parts`, separated by commas: "+strings.Join(names(), ", "))
	f.StringVar(&o.attacks, "attacks", "", "of the part neighbors, only the `attacks` of these names, separated by commas, such as packets,descriptors")
	f.IntVar(&o.fill, "fill", scale.DefaultFill, "of the part density, the `MiB` of memory that sandboxes fill, such as 16384; 3 GiB stay available in any case")
	f.StringVar(&o.objects, "objects", scale.Usual, "of the part objects, how many sandboxes sleep beside what is measured: `numbers` separated by commas, of which each is greater than the one before")
	f.StringVar(&o.html, "html", "", "write the report with plots to this `file` too")
	f.StringVar(&o.history, "history", "", "append the report to this `file` too, as a line of JSON; compare FILE shows what changed in the last run")
	f.StringVar(&o.note, "note", "", "a `sentence` on the run for its readers, such as \"Other work was running.\"")
	f.StringVar(&o.dir, "dir", "/var/tmp", "where the server's data lie while it runs; on a disk, or the figures are of memory")
	f.StringVar(&o.programs, "programs", ownDir(), "directory of barchan and barchan-agent")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	known := names()
	for _, name := range o.wanted() {
		if !slices.Contains(known, name) {
			return o, fmt.Errorf("--only: %q is none of %s", name, strings.Join(known, ", "))
		}
	}
	if err := neighbors.Check(o.attacks); err != nil {
		return o, fmt.Errorf("--attacks: %w", err)
	}
	if _, err := scale.Sizes(o.objects); err != nil {
		return o, fmt.Errorf("--objects: %w", err)
	}
	return o, nil
}

// ownDir is the directory of this program.
func ownDir() string {
	program, err := os.Executable()
	if err != nil {
		return "."
	}
	return filepath.Dir(program)
}

func names() []string {
	var names []string
	for _, p := range parts(options{}) {
		names = append(names, p.name)
	}
	return names
}

func (o options) wanted() []string {
	if o.only == "" {
		return nil
	}
	return strings.Split(o.only, ",")
}

// measure does the wanted parts, and always removes the server.
func (b *bench) measure(ctx context.Context) (err error) {
	defer func() { b.Report.Ended = time.Now() }()
	if err := b.measureParts(ctx, true); err != nil || !b.needsServer() {
		return err
	}
	if b.Server, err = harness.NewServer(ctx, b.Dir, b.programs); err != nil {
		return err
	}
	b.Logf("a server of its own in %s", b.Server.Dir)
	defer func() {
		b.Logf("remove the server and all that it made")
		err = errors.Join(err, b.Server.Remove(ctx))
	}()
	if err := b.Prepare(ctx); err != nil {
		return err
	}
	return b.measureParts(ctx, false)
}

func (b *bench) wants(p part) bool {
	w := b.wanted()
	if w == nil {
		return !p.named && (b.all || !p.source)
	}
	return slices.Contains(w, p.name)
}

func (b *bench) needsServer() bool {
	return slices.ContainsFunc(b.parts, func(p part) bool { return !p.alone && b.wants(p) })
}

// measureParts measures the wanted parts that need the server, or those that do not.
func (b *bench) measureParts(ctx context.Context, alone bool) error {
	for _, p := range b.parts {
		if p.alone != alone || !b.wants(p) {
			continue
		}
		began, before := time.Now(), len(b.Report.Figures)
		b.Logf("measure: %s", p.name)
		if err := p.measure(ctx, b.Bench); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx) // regardless of its effect
			}
			if alone {
				return fmt.Errorf("measure %s: %w", p.name, err)
			}
			return fmt.Errorf("measure %s: %w\nend of the server's log:\n%s", p.name, err, b.Server.Tail())
		}
		b.Logf("measure: %s: done in %.0f s", p.name, time.Since(began).Seconds())
		if err := report.WriteFigures(b.Log, b.Report.Figures[before:]); err != nil {
			return err
		}
	}
	return nil
}
