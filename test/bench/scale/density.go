package scale

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/proc"
	"github.com/barchan-dev/barchan/test/bench/report"
)

const (
	// DefaultFill is the memory that Density fills by default, in MiB.
	DefaultFill = 1 << 10
	// spareMemory stays available to other programs, in MiB.
	spareMemory = 3 << 10
	// whole is the memory for which a result is given beside that of what was filled, in MiB.
	whole = 16 << 10
	// one of activePart sandboxes is used.
	activePart = 10
	// useEvery is the time between two requests to one that is used.
	useEvery = 3 * time.Second
	// settleTime is how long sandboxes need to return memory after their start.
	settleTime = 25 * time.Second
	// fewer than batch sandboxes are made between two looks at the memory.
	batch = 8
	// pssBar is the PSS that an idle sandbox shall keep to, in MiB.
	pssBar = 14
)

const densityTemplate = "bench-density"

// pythonProgram is a program as agents leave it: an interpreter with some modules that waits for requests. It answers with a word of its
// own, by which it is known after a resume.
const pythonProgram = `
import asyncio, csv, datetime, email, http.server, json, re, sqlite3, subprocess, urllib.request, uuid
word = uuid.uuid4().hex
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(word.encode())
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever(poll_interval=None)
`

// python is a sandbox with pythonProgram.
type python struct {
	harness.Sandbox
	word string
}

// density fills memory with sandboxes.
type density struct {
	*harness.Bench
	fill  float64 // MiB
	empty float64 // what was available before, in MiB

	mu  sync.Mutex
	all []python // +checklocks:mu
}

// Density fills so many MiB of memory with sandboxes of Python programs: idle ones, and then many more, a tenth of which is used, while
// idleMemory moves others to disk.
func Density(ctx context.Context, b *harness.Bench, fill int) error {
	if err := b.Server.ApplyTemplate(ctx, harness.Template{
		Name: densityTemplate, Sandbox: `{"idle":{"afterSeconds":86400},"wake":{"onTraffic":true}}`,
	}); err != nil {
		return err
	}
	if err := b.Server.RestartIdle(ctx); err != nil {
		return err
	}
	free, err := proc.Available()
	if err != nil {
		return err
	}
	d := &density{Bench: b, fill: float64(fill), empty: free}
	if b.Quick {
		d.fill /= 4
	}
	if most := free - spareMemory; d.fill > most {
		b.Logf("%.0f MiB are available: only %.0f are filled", free, most)
		d.fill = most
	}
	if d.fill <= 0 {
		return fmt.Errorf("%.0f MiB of memory are available, and %d are left to other programs", free, spareMemory)
	}
	n, err := d.idle(ctx)
	if err != nil {
		return err
	}
	if err := d.clear(ctx); err != nil {
		return err
	}
	return d.open(ctx, activePart*n)
}

// idle measures how many idle sandboxes fit.
func (d *density) idle(ctx context.Context) (n int, err error) {
	for {
		used, err := d.used()
		if err != nil {
			return 0, err
		}
		if used < d.fill {
			if err := d.more(ctx, batch); err != nil {
				return 0, err
			}
			continue
		}
		// Those that have just started return some of it.
		if err := harness.Rest(ctx, settleTime); err != nil {
			return 0, err
		}
		if used, err = d.used(); err != nil {
			return 0, err
		}
		if used > 0.97*d.fill {
			break
		}
	}
	used, err := d.used()
	if err != nil {
		return 0, err
	}
	pids, err := proc.InCgroup(d.Server.Cgroup)
	if err != nil {
		return 0, err
	}
	pss, err := proc.PSS(pids)
	if err != nil {
		return 0, err
	}
	all := d.list()
	n = len(all)
	each := used / float64(n)
	d.Report.One("density", fmt.Sprintf("idle Python sandboxes in %.1f GiB", used/1024), "sandboxes", float64(n))
	d.Report.One("density", "memory of the machine that each of them takes", "MiB", each)
	d.Report.One("density", "PSS of the processes of each", "MiB", pss/float64(n))
	d.Report.One("density", fmt.Sprintf("in %d GiB, at as much for each", whole/1024), "sandboxes", whole/each)
	return int(float64(n) * d.fill / used), d.same(ctx, all)
}

// open has n sandboxes at once, if the memory suffices: a tenth is used, and the server moves others to disk to keep the memory that is to
// be filled.
func (d *density) open(ctx context.Context, n int) error {
	free, err := proc.Available()
	if err != nil {
		return err
	}
	d.empty = free // other programs may use more than before, or less
	limit := fmt.Sprintf("BARCHAN_IDLE_MEMORY=%.0fMi", d.empty-d.fill)
	if err := d.Server.RestartWith(ctx, limit); err != nil {
		return err
	}
	using, stop := context.WithCancel(ctx)
	u := &usage{server: d.Server}
	var used sync.WaitGroup
	used.Go(func() { u.run(using, d) })
	err = d.openAll(ctx, n)
	if err == nil {
		err = harness.Rest(ctx, settleTime)
	}
	var memory float64
	var phases map[string]int
	if err == nil {
		memory, err = d.used()
	}
	if err == nil {
		phases, err = d.Server.Phases(ctx)
	}
	stop()
	used.Wait()
	if err != nil {
		return err
	}
	all := d.list()
	if len(all) == 0 {
		return errors.New("no sandbox could be opened: other programs use the memory; measure with nothing else running")
	}
	d.Report.One("density", fmt.Sprintf("open Python sandboxes in %.1f GiB, one of %d in use", memory/1024, activePart), "sandboxes", float64(len(all)))
	d.Report.One("density", "of them in RAM", "sandboxes", float64(phases["Running"]))
	d.Report.Add("density", "request to one in use meanwhile", "ms", u.took)
	d.Report.One("density", "of these, failed", "", float64(u.failed))
	var asleep []python
	for i, x := range all {
		if i%activePart == activePart/2 {
			asleep = append(asleep, x)
		}
	}
	if err := d.same(ctx, asleep[:min(len(asleep), 20)]); err != nil {
		return err
	}
	if err := d.clear(ctx); err != nil {
		return err
	}
	return d.Server.RestartWith(ctx, "BARCHAN_IDLE_MEMORY=0")
}

// openAll makes n sandboxes. While more memory is used than shall be filled, it waits: if it is too long, no more fit.
func (d *density) openAll(ctx context.Context, n int) error {
	const patience = time.Minute
	for since := time.Now(); len(d.list()) < n; {
		used, err := d.used()
		if err != nil {
			return err
		}
		switch {
		case used < d.fill:
			if err := d.more(ctx, min(batch, n-len(d.list()))); err != nil {
				return err
			}
			since = time.Now()
		case time.Since(since) > patience:
			d.Logf("memory was not returned within %s", patience)
			return nil
		default:
			if err := harness.Rest(ctx, 100*harness.Tick); err != nil {
				return err
			}
		}
	}
	return nil
}

// used returns the memory that the machine uses more than before, in MiB.
func (d *density) used() (float64, error) {
	free, err := proc.Available()
	if err == nil && free < spareMemory {
		err = fmt.Errorf("%.0f MiB of memory are available, less than %d: other programs need it", free, spareMemory)
	}
	return d.empty - free, err
}

// more makes n sandboxes with the program.
func (d *density) more(ctx context.Context, n int) error {
	return harness.Each(ctx, make([]harness.Sandbox, n), func(ctx context.Context, _ harness.Sandbox) error {
		x, err := d.Server.Claim(ctx, client.CreateOptions{TemplateID: densityTemplate, Timeout: 24 * time.Hour})
		if err != nil {
			return err
		}
		if err := d.Server.Serve(ctx, x, pythonProgram); err != nil {
			return err
		}
		word, err := d.Server.Visit(ctx, x.ID)
		if err != nil {
			return err
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		d.all = append(d.all, python{Sandbox: x, word: word})
		return nil
	})
}

func (d *density) list() []python {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.all
}

// same verifies that programs answer, and are the ones that were started.
func (d *density) same(ctx context.Context, some []python) error {
	for _, x := range some {
		word, err := d.Server.Visit(ctx, x.ID)
		if err != nil {
			return err
		}
		if word != x.word {
			return fmt.Errorf("sandbox %s answered %q, want %q", x.ID, word, x.word)
		}
	}
	return nil
}

// clear removes all sandboxes.
func (d *density) clear(ctx context.Context) error {
	var all []harness.Sandbox
	for _, x := range d.list() {
		all = append(all, x.Sandbox)
	}
	if err := d.Server.KillAll(ctx, all); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = nil
	return nil
}

// usage is the use of a part of all sandboxes.
type usage struct {
	server *harness.Server
	took   report.Samples
	failed int
}

// run requests one of activePart sandboxes every useEvery, until ctx is done.
func (u *usage) run(ctx context.Context, d *density) {
	for round := time.Now(); ; round = round.Add(useEvery) {
		if harness.Rest(ctx, time.Until(round)) != nil {
			return
		}
		for i, x := range d.list() {
			if i%activePart != 0 {
				continue
			}
			began := time.Now()
			word, err := u.server.Visit(ctx, x.ID)
			if ctx.Err() != nil {
				return
			}
			if err != nil || strings.TrimSpace(word) != x.word {
				d.Logf("sandbox %s answered %q, want %q: %v", x.ID, word, x.word, err)
				u.failed++
				continue
			}
			u.took = append(u.took, report.Millis(time.Since(began)))
		}
	}
}
