// Package migrate converts data of older versions to the current form: ordered steps, and a ledger of
// those done. It undoes nothing: the only way back is an earlier copy.
//
// A step is run until its success is in the ledger, and then never again. A crash between the two runs
// it once more, so each must be idempotent.
package migrate

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// Stages at which steps run, in their order.
const (
	Storage = "storage" // before the API server starts: files and databases of the machine's own
	Objects = "objects" // once the API server serves, and nothing else does: objects
)

// Results of steps, in the ledger.
const (
	Done   = "done"
	Failed = "failed" // it will be retried
	Fresh  = "fresh"  // there was no older data, so it was not run
)

// Step is one change of data. Do must be idempotent, also after an interruption.
type Step struct {
	// ID is permanent: it is in ledgers. It begins with year and month.
	ID    string
	Stage string
	Do    func(ctx context.Context) error
}

// Entry is a step's entry in the ledger.
type Entry struct {
	ID string `json:"id"`
	// Result is Done, Failed or Fresh.
	Result string `json:"result"`
	// At is when the step began, and Milli its duration in milliseconds.
	At    time.Time `json:"at"`
	Milli float64   `json:"milliseconds"`
	// Version is the version of the program that wrote this.
	Version string `json:"version"`
	// Error is why the step failed.
	Error string `json:"error,omitempty"`
}

// ledger is the file's content.
type ledger struct {
	Entries []Entry `json:"entries"`
}

// ledgerMode is the mode of the file: errors may name private data.
const ledgerMode = 0o600

// Config names the ledger and the steps.
type Config struct {
	// File is the ledger; its directory must exist.
	File string
	// Steps are all steps of all versions, in order.
	Steps []Step
	// Fresh means that there is no older data. Without a ledger, all steps are then recorded as not
	// needed; otherwise all are run. With a ledger it has no effect.
	Fresh bool
	// Version is the version of this program.
	Version string
	Log     *slog.Logger
}

// Migrations runs steps. It is safe for concurrent use; only one process may use a ledger.
type Migrations struct {
	cfg Config
	log *slog.Logger

	runMu   sync.Mutex // serializes runs
	mu      sync.Mutex
	entries []Entry // +checklocks:mu
}

// Open reads the ledger, or creates one. One with an unknown step is an errs.ErrConflict that names
// the version that wrote it: this program might misread its data. An unreadable one is an
// errs.ErrInvalid.
func Open(cfg Config) (*Migrations, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	m := &Migrations{cfg: cfg, log: cfg.Log.With(telemetry.Component, "migrate")}
	entries, found, err := read(cfg.File)
	switch {
	case err != nil:
		return nil, err
	case !found && cfg.Fresh:
		now := time.Now().UTC()
		for _, s := range cfg.Steps {
			entries = append(entries, Entry{ID: s.ID, Result: Fresh, At: now, Version: cfg.Version})
		}
	}
	if err := cfg.checkKnown(entries); err != nil {
		return nil, err
	}
	if !found {
		if err := write(cfg.File, entries); err != nil {
			return nil, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.entries = entries
	return m, nil
}

func (c *Config) check() error {
	if c.File == "" || c.Log == nil {
		return fmt.Errorf("migrations: a file and a logger are needed: %w", errs.ErrInvalid)
	}
	seen := map[string]bool{}
	for _, s := range c.Steps {
		if s.ID == "" || seen[s.ID] || s.Do == nil || (s.Stage != Storage && s.Stage != Objects) {
			return fmt.Errorf("migration %q: want an ID of its own, a stage and something to do: %w", s.ID, errs.ErrInvalid)
		}
		seen[s.ID] = true
	}
	return nil
}

// unnamed is the version of a build without one.
const unnamed = "(of a build without a version)"

// checkKnown rejects entries that only another version can have written.
func (c *Config) checkKnown(entries []Entry) error {
	var unknown, versions []string
	for _, e := range entries {
		if !slices.ContainsFunc(c.Steps, func(s Step) bool { return s.ID == e.ID }) {
			unknown = append(unknown, e.ID)
			if v := cmp.Or(e.Version, unnamed); !slices.Contains(versions, v) {
				versions = append(versions, v)
			}
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	return fmt.Errorf("%s: the data has been migrated by version %s, which is newer than this one, %s (unknown here: %s); start that version or a later one: %w",
		c.File, strings.Join(versions, " and "), cmp.Or(c.Version, unnamed), strings.Join(unknown, ", "), errs.ErrConflict)
}

func read(file string) (entries []Entry, found bool, err error) {
	content, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read ledger of migrations: %w: %w", err, errs.ErrUnavailable)
	}
	var l ledger
	dec := json.NewDecoder(bytes.NewReader(content))
	if err := dec.Decode(&l); err != nil {
		return nil, false, fmt.Errorf("read ledger of migrations %s: %w; it is kept as it is, and nothing starts: %w", file, err, errs.ErrInvalid)
	}
	for i, e := range l.Entries {
		known := e.Result == Done || e.Result == Failed || e.Result == Fresh
		if e.ID == "" || !known || slices.ContainsFunc(l.Entries[:i], func(o Entry) bool { return o.ID == e.ID }) {
			return nil, false, fmt.Errorf("read ledger of migrations %s: entry %d, %+v, makes no sense; it is kept as it is, and nothing starts: %w", file, i, e, errs.ErrInvalid)
		}
	}
	return l.Entries, true, nil
}

func write(file string, entries []Entry) error {
	content, err := json.MarshalIndent(ledger{entries}, "", "  ")
	if err == nil {
		err = durable.WriteFile(file, append(content, '\n'), ledgerMode)
	}
	if err != nil {
		return fmt.Errorf("write ledger of migrations: %w: %w", err, errs.ErrUnavailable)
	}
	return nil
}

// Entries returns the ledger in the order in which its steps were first run.
func (m *Migrations) Entries() []Entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.entries)
}

// Pending lists the steps of a stage that are not done.
func (m *Migrations) Pending(stage string) (ids []string) {
	for _, s := range m.cfg.Steps {
		if s.Stage == stage && !m.isDone(s.ID) {
			ids = append(ids, s.ID)
		}
	}
	return ids
}

func (m *Migrations) isDone(id string) bool {
	return slices.ContainsFunc(m.Entries(), func(e Entry) bool { return e.ID == id && e.Result != Failed })
}

// Run runs the pending steps of a stage in order. The first failure ends it; its ID is in the error,
// and the next run begins with it. Stages are ordered too: objects before storage is done is an
// errs.ErrConflict.
func (m *Migrations) Run(ctx context.Context, stage string) error {
	m.runMu.Lock()
	defer m.runMu.Unlock()
	if before := m.Pending(Storage); stage == Objects && len(before) > 0 {
		return fmt.Errorf("migrations of objects: %s must be done before: %w", strings.Join(before, ", "), errs.ErrConflict)
	}
	for _, s := range m.cfg.Steps {
		if s.Stage != stage || m.isDone(s.ID) {
			continue
		}
		if err := m.do(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// do runs one step and records its result.
func (m *Migrations) do(ctx context.Context, s Step) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("migration %s: %w", s.ID, context.Cause(ctx))
	}
	m.log.InfoContext(ctx, "migration begins", "id", s.ID, "stage", s.Stage)
	began := time.Now()
	err := s.Do(ctx)
	took := time.Since(began)
	e := Entry{ID: s.ID, Result: Done, At: began.UTC(), Milli: float64(took.Microseconds()) / 1000, Version: m.cfg.Version}
	if err != nil {
		e.Result, e.Error = Failed, err.Error()
		return fmt.Errorf("migration %s: %w", s.ID, errors.Join(err, m.record(e)))
	}
	if err := m.record(e); err != nil {
		return fmt.Errorf("migration %s is done, but not recorded: %w", s.ID, err)
	}
	m.log.InfoContext(ctx, "migration done", "id", s.ID, "stage", s.Stage, telemetry.Duration, took)
	return nil
}

// record adds an entry to the ledger, or replaces an earlier one of the same step.
func (m *Migrations) record(e Entry) error {
	entries := m.Entries()
	if at := slices.IndexFunc(entries, func(o Entry) bool { return o.ID == e.ID }); at >= 0 {
		entries[at] = e
	} else {
		entries = append(entries, e)
	}
	if err := write(m.cfg.File, entries); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.entries = entries
	return nil
}
