package programs

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// Overwriting a program in place changes no running sandbox, and a truncated copy is replaced.
func TestCopiesOfTheRuntime(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "runsc")
	b := &Runtimes{dir: filepath.Join(dir, "runtimes"), older: map[string]*oci.Runtime{}, base: oci.Config{Class: oci.GVisor, Root: "/none"}}
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho one"), 0o755); err != nil {
		t.Fatal(err)
	}
	keep := func() (string, os.FileInfo) {
		t.Helper()
		sha, err := b.keep(program)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(b.path(sha))
		if err != nil {
			t.Fatal(err)
		}
		return sha, info
	}
	one, first := keep()
	again, second := keep()
	if again != one || !os.SameFile(first, second) {
		t.Errorf("copied as %s, then as %s, want once", one, again)
	}
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho two!"), 0o755); err != nil {
		t.Fatal(err)
	}
	two, _ := keep()
	text, err := os.ReadFile(b.path(one))
	if err != nil {
		t.Fatal(err)
	}
	if two == one || string(text) != "#!/bin/sh\necho one" {
		t.Errorf("the copy of %s has %q; then %s", one, text, two)
	}
	if err := os.Truncate(b.path(two), 3); err != nil {
		t.Fatal(err)
	}
	keep()
	if text, err = os.ReadFile(b.path(two)); err != nil || string(text) != "#!/bin/sh\necho two!" {
		t.Errorf("the copy has %q, %v", text, err)
	}
	if _, err := b.runtime("none"); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("a build without a copy: %v", err)
	}
}
