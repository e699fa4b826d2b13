// Command bench measures a whole server from outside, as its users meet it, and prints one
// table in which each figure stands beside the floor measured in the same run. It starts a
// server of its own and removes it with everything that it made. It judges bars, and fails
// only where it could not measure: speed is never an error.
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
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer context.AfterFunc(ctx, stop)() // a second signal ends the program at once
	var err error
	switch args := os.Args[1:]; {
	case len(args) > 0 && args[0] == compareCommand && (len(args) == 2 || len(args) == 3):
		err = runCompare(args[1:], os.Stdout)
	case len(args) == 2 && args[0] == gatewayCommand:
		err = serveGateway(ctx, args[1])
	case len(args) == 4 && args[0] == attackCommand:
		err = runAttack(ctx, args[1], args[2], args[3])
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
	html     string
	history  string
	note     string
	dir      string
	programs string
}

// rounds returns how often to measure: n times, or a few times for a trial.
func (o options) rounds(n int) int {
	if o.quick {
		return max(2, n/10)
	}
	return n
}

// part is one chapter of the table.
type part struct {
	name    string
	measure func(context.Context, *bench) error
	alone   bool // it needs no server
	// source says that it needs the source tree with Go, or installs packages: it is measured only where it is asked for.
	source bool
}

// parts lists the chapters in their order. Those that leave the server busy come last.
func parts() []part {
	return []part{
		{name: "gateway", source: true, measure: measureGateway, alone: true},
		{name: "boot", measure: measureBoot},
		{name: "api", source: true, measure: measureAPI},
		{name: "create", measure: measureCreate},
		{name: "exec", measure: measureExec},
		{name: "claim", measure: measureClaim},
		{name: "image", measure: measureImage},
		{name: "build", measure: measureBuild},
		{name: "interpreter", measure: measureInterpreter},
		{name: "transfer", measure: measureTransfer},
		{name: "volume", measure: measureVolume},
		{name: "address", source: true, measure: measureAddress},
		{name: "peers", source: true, measure: measurePeers},
		{name: "neighbors", source: true, measure: measureNeighbors},
		{name: "sleep", measure: measureSleep},
		{name: "scale", measure: measureScale},
		{name: "memory", measure: measureMemory},
	}
}

// bench is one run.
type bench struct {
	options
	parts  []part
	server *server
	report *report
	log    io.Writer
}

func (b *bench) logf(format string, args ...any) {
	fmt.Fprintf(b.log, "==> "+format+"\n", args...)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("a whole server needs root")
	}
	r := newReport()
	r.Quick, r.Note = o.quick, o.note
	return (&bench{options: o, parts: parts(), report: r, log: stderr}).run(ctx, stdout)
}

// run measures and writes what it has found out, also if it was interrupted or a part failed.
func (b *bench) run(ctx context.Context, stdout io.Writer) error {
	err := b.measure(ctx)
	if err != nil && len(b.report.Figures) == 0 {
		return err
	}
	if b.html != "" {
		err = errors.Join(err, b.report.savePage(b.html))
	}
	if b.history != "" {
		err = errors.Join(err, b.report.saveHistory(b.history))
	}
	if b.json {
		return errors.Join(err, b.report.writeJSON(stdout))
	}
	return errors.Join(err, b.report.writeTable(stdout))
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.BoolVar(&o.json, "json", false, "print JSON instead of a table")
	f.BoolVar(&o.quick, "quick", false, "a tenth of the rounds, to try whether it works")
	f.BoolVar(&o.all, "all", false, "measure also what needs the source tree with Go, or packages that it installs")
	f.StringVar(&o.only, "only", "", "measure only these `parts`, separated by commas: "+strings.Join(names(), ", "))
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
	for _, p := range parts() {
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
	b.report.Machine = describeMachine(ctx)
	defer func() { b.report.Ended = time.Now() }()
	if err := b.measureParts(ctx, true); err != nil || !b.needsServer() {
		return err
	}
	if b.server, err = newServer(ctx, b.dir, b.programs); err != nil {
		return err
	}
	b.logf("a server of its own in %s", b.server.dir)
	defer func() {
		b.logf("remove the server and all that it made")
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTime)
		defer cancel()
		err = errors.Join(err, b.server.remove(undo))
	}()
	if err := b.prepare(ctx); err != nil {
		return err
	}
	return b.measureParts(ctx, false)
}

func (b *bench) wants(p part) bool {
	w := b.wanted()
	if w == nil {
		return b.all || !p.source
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
		began, before := time.Now(), len(b.report.Figures)
		b.logf("measure: %s", p.name)
		if err := p.measure(ctx, b); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx) // regardless of its effect
			}
			if alone {
				return fmt.Errorf("measure %s: %w", p.name, err)
			}
			return fmt.Errorf("measure %s: %w\nend of the server's log:\n%s", p.name, err, b.server.tail())
		}
		b.logf("measure: %s: done in %.0f s", p.name, time.Since(began).Seconds())
		if err := writeFigures(b.log, b.report.Figures[before:]); err != nil {
			return err
		}
	}
	return nil
}

// prepare starts the server for the first time and gives it the base image and a template of
// each runtime class.
func (b *bench) prepare(ctx context.Context) error {
	took, err := b.server.start(ctx)
	if err != nil {
		return err
	}
	b.report.one("boot", "boot to ready, empty data directory", "ms", millis(took)).atMost(emptyBootBar)
	b.logf("make the base image, or take it from the cache")
	if _, err := b.server.command(ctx, "", "image", "build", "base"); err != nil {
		return err
	}
	b.report.Version, err = b.server.command(ctx, "", "version")
	b.report.Version = strings.TrimSpace(b.report.Version)
	if err != nil {
		return err
	}
	for _, class := range b.server.classes {
		if _, err := b.server.command(ctx, templateOf(class), "apply", "-f", "-"); err != nil {
			return err
		}
	}
	return nil
}

// templateOf is a template as the default one, but for its runtime class.
func templateOf(class string) string {
	return fmt.Sprintf(`{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate",
"metadata":{"name":"bench-%s","namespace":"default"},
"spec":{"podTemplate":{"spec":{"runtimeClassName":%q,"containers":[{"name":"sandbox","image":"barchan.local/base:latest",
"resources":{"limits":{"cpu":"2","memory":"512Mi"}}}]}}}}`, class, class)
}
