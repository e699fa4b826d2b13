package migrate

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// journal notes which steps were run.
type journal struct{ ran []string }

func (j *journal) step(id, stage string, fail *error) Step {
	return Step{ID: id, Stage: stage, Do: func(context.Context) error {
		j.ran = append(j.ran, id)
		if fail != nil {
			return *fail
		}
		return nil
	}}
}

func (j *journal) took() string {
	ran := strings.Join(j.ran, " ")
	j.ran = nil
	return ran
}

func openAt(t *testing.T, file string, fresh bool, steps ...Step) *Migrations {
	t.Helper()
	m, err := Open(Config{File: file, Steps: steps, Fresh: fresh, Version: "1.2.3", Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func results(m *Migrations) string {
	var out []string
	for _, e := range m.Entries() {
		out = append(out, e.ID+"="+e.Result)
	}
	return strings.Join(out, " ")
}

func TestOldDataRunsAllOnceInOrder(t *testing.T) {
	file, j := filepath.Join(t.TempDir(), "migrations.json"), &journal{}
	steps := []Step{j.step("a", Storage, nil), j.step("o", Objects, nil), j.step("b", Storage, nil)}
	m := openAt(t, file, false, steps...)
	if err := m.Run(t.Context(), Objects); !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), "a, b must be done before") {
		t.Errorf("objects first: %v", err)
	}
	for _, stage := range []string{Storage, Objects, Storage, Objects} {
		if err := m.Run(t.Context(), stage); err != nil {
			t.Fatal(err)
		}
	}
	if got := j.took(); got != "a b o" {
		t.Errorf("ran %q", got)
	}
	again := openAt(t, file, true, append(steps, j.step("c", Storage, nil))...) // one that came with an upgrade
	if got := again.Pending(Storage); !slices.Equal(got, []string{"c"}) {
		t.Errorf("pending %q", got)
	}
	if err := errors.Join(again.Run(t.Context(), Storage), again.Run(t.Context(), Objects)); err != nil {
		t.Fatal(err)
	}
	if got := j.took(); got != "c" || results(again) != "a=done b=done o=done c=done" {
		t.Errorf("ran %q, ledger %s", got, results(again))
	}
	for _, e := range again.Entries() {
		if e.At.IsZero() || e.Version != "1.2.3" || e.Error != "" {
			t.Errorf("entry %+v", e)
		}
	}
}

func TestFreshRunsNothing(t *testing.T) {
	file, j := filepath.Join(t.TempDir(), "migrations.json"), &journal{}
	steps := []Step{j.step("a", Storage, nil), j.step("o", Objects, nil)}
	openAt(t, file, true, steps...)
	m := openAt(t, file, false, steps...) // it has data by now
	if err := errors.Join(m.Run(t.Context(), Storage), m.Run(t.Context(), Objects)); err != nil {
		t.Fatal(err)
	}
	if got := j.took(); got != "" || results(m) != "a=fresh o=fresh" {
		t.Errorf("ran %q, ledger %s", got, results(m))
	}
}

func TestFailureStopsWithItsName(t *testing.T) {
	file, j := filepath.Join(t.TempDir(), "migrations.json"), &journal{}
	boom := fmt.Errorf("disk full: %w", errs.ErrUnavailable)
	fail := boom
	steps := []Step{j.step("a", Storage, nil), j.step("b", Storage, &fail), j.step("c", Storage, nil), j.step("o", Objects, nil)}
	m := openAt(t, file, false, steps...)
	for range 2 {
		if err := m.Run(t.Context(), Storage); !errors.Is(err, boom) || !strings.Contains(err.Error(), "migration b: disk full") {
			t.Fatalf("error %v", err)
		}
		if err := m.Run(t.Context(), Objects); !errors.Is(err, errs.ErrConflict) {
			t.Errorf("objects after a failure: %v", err)
		}
		m = openAt(t, file, false, steps...)
	}
	if got := j.took(); got != "a b b" || results(m) != "a=done b=failed" || !strings.Contains(m.Entries()[1].Error, "disk full") {
		t.Errorf("ran %q, ledger %+v", got, m.Entries())
	}
	fail = nil
	if err := m.Run(t.Context(), Storage); err != nil || j.took() != "b c" || results(m) != "a=done b=done c=done" {
		t.Errorf("%v, ledger %s", err, results(m))
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.Run(ended, Objects); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "migration o") || j.took() != "" {
		t.Errorf("with a context that has ended: %v", err)
	}
}

func TestNewerLedgerIsRefused(t *testing.T) {
	file, j := filepath.Join(t.TempDir(), "migrations.json"), &journal{}
	newer, err := Open(Config{File: file, Steps: []Step{j.step("a", Storage, nil), j.step("later", Storage, nil)}, Version: "2.0.0", Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	if err := newer.Run(t.Context(), Storage); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Open(Config{File: file, Steps: []Step{j.step("a", Storage, nil)}, Version: "1.2.3", Log: telemetry.Discard()})
	if !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), "version 2.0.0, which is newer than this one, 1.2.3 (unknown here: later)") {
		t.Errorf("error %v", err)
	}
	if _, err = Open(Config{File: file, Log: telemetry.Discard()}); err == nil || !strings.Contains(err.Error(), "newer than this one, (of a build without a version) (unknown here: a, later)") {
		t.Errorf("error of a build without a version: %v", err)
	}
	if after, err := os.ReadFile(file); err != nil || string(after) != string(before) {
		t.Errorf("the ledger changed: %s, %v", after, err)
	}
}

func TestDamagedLedgerIsRefusedAndKept(t *testing.T) {
	j := &journal{}
	for name, content := range map[string]string{
		"empty": "", "cut off": `{"entries":[{"id":"a",`, "no result": `{"entries":[{"id":"a"}]}`,
		"twice": `{"entries":[{"id":"a","result":"done"},{"id":"a","result":"failed"}]}`, "no ID": `{"entries":[{"result":"done"}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "migrations.json")
			if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Open(Config{File: file, Steps: []Step{j.step("a", Storage, nil)}, Fresh: true, Log: telemetry.Discard()})
			if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), file) {
				t.Errorf("error %v", err)
			}
			if kept, err := os.ReadFile(file); err != nil || string(kept) != content {
				t.Errorf("kept %q, %v", kept, err)
			}
		})
	}
}

func TestLedgerThatCannotBeWritten(t *testing.T) {
	dir, j := filepath.Join(t.TempDir(), "d"), &journal{}
	file := filepath.Join(dir, "migrations.json")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	m := openAt(t, file, false, j.step("a", Storage, nil))
	if err := os.Rename(dir, dir+".away"); err != nil {
		t.Fatal(err)
	}
	if err := m.Run(t.Context(), Storage); !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(err.Error(), "migration a is done, but not recorded") {
		t.Errorf("error %v", err)
	}
	if err := os.Rename(dir+".away", dir); err != nil {
		t.Fatal(err)
	}
	if err := m.Run(t.Context(), Storage); err != nil || j.took() != "a a" {
		t.Errorf("what was not recorded is not run again: %v", err)
	}
}

func TestOpenRefuses(t *testing.T) {
	j, file := &journal{}, filepath.Join(t.TempDir(), "migrations.json")
	for name, cfg := range map[string]Config{
		"no file":    {Log: telemetry.Discard()},
		"no log":     {File: file},
		"no stage":   {File: file, Log: telemetry.Discard(), Steps: []Step{j.step("a", "", nil)}},
		"no work":    {File: file, Log: telemetry.Discard(), Steps: []Step{{ID: "a", Stage: Storage}}},
		"same twice": {File: file, Log: telemetry.Discard(), Steps: []Step{j.step("a", Storage, nil), j.step("a", Objects, nil)}},
	} {
		if _, err := Open(cfg); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// childEnv names the directory that a child process of TestKilledBeforeTheRecord works in.
const childEnv = "BARCHAN_TEST_MIGRATE_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		fmt.Fprintln(os.Stderr, child(dir))
		return
	}
	os.Exit(m.Run())
}

// work counts its runs in a file, one byte each.
func work(dir, id string) error {
	f, err := os.OpenFile(filepath.Join(dir, id), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString("x")
	return errors.Join(err, f.Close())
}

func killedSteps(dir string, die bool) []Step {
	do := func(id string) func(context.Context) error {
		return func(context.Context) error { return work(dir, id) }
	}
	return []Step{
		{ID: "first", Stage: Storage, Do: do("first")},
		{ID: "second", Stage: Storage, Do: func(context.Context) error {
			err := work(dir, "second")
			if die && err == nil {
				if err = syscall.Kill(os.Getpid(), syscall.SIGKILL); err == nil {
					select {} // it takes a moment
				}
			}
			return err
		}},
		{ID: "third", Stage: Storage, Do: do("third")},
	}
}

// child is killed in its second step, after the work and before its record.
func child(dir string) error {
	m, err := Open(Config{File: filepath.Join(dir, "migrations.json"), Steps: killedSteps(dir, true), Log: telemetry.Discard()})
	if err != nil {
		return err
	}
	return m.Run(context.Background(), Storage)
}

func TestKilledBeforeTheRecord(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		cmd := exec.CommandContext(t.Context(), os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+dir)
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(err.Error(), "killed") {
			t.Fatalf("the child was not killed: %v, %s", err, out)
		}
	}
	m := openAt(t, filepath.Join(dir, "migrations.json"), false, killedSteps(dir, false)...)
	if results(m) != "first=done" {
		t.Errorf("ledger %s", results(m))
	}
	if err := m.Run(t.Context(), Storage); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{"first": "x", "second": "xxx", "third": "x"} {
		if got, err := os.ReadFile(filepath.Join(dir, id)); err != nil || string(got) != want {
			t.Errorf("%s was run %d times, want %d; %v", id, len(got), len(want), err)
		}
	}
}
