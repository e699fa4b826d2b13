package oci

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/go-runc"
)

// TestTableOfDescriptors: the sentry that a runtime starts begins with a table that has room for its output, and no process of the
// sandbox has anything else of it.
func TestTableOfDescriptors(t *testing.T) {
	l := newTestHost(t)
	first := l.newSandbox(t).run(t)
	restored := first.copyOf(t).restore(t, first.checkpoint(t, CheckpointOptions{}), RestoreOptions{})
	for _, pid := range restored.processes(t) {
		if _, err := os.Readlink(filepath.Join("/proc", fmt.Sprint(pid), "fd", fmt.Sprint(lastDescriptor))); !os.IsNotExist(err) {
			t.Errorf("process %d has descriptor %d: %v", pid, lastDescriptor, err)
		}
	}

	// In place of runsc, a program that writes how large the table of a process is that it starts.
	sizes, program := filepath.Join(l.dir, "sizes"), filepath.Join(l.dir, "program")
	must(t, os.WriteFile(program, []byte("#!/bin/sh\ngrep FDSize /proc/self/status >>"+sizes+"\n"), 0o755)) //nolint:gosec // a program
	stand, err := New(Config{Class: GVisor, Binary: program, Root: filepath.Join(l.dir, "s")})
	must(t, err)
	_, err = stand.cli(first.bundle).Run(t.Context(), "x", first.bundle, &runc.CreateOpts{IO: first.console, Detach: true})
	must(t, err)
	_, err = stand.cli(first.bundle).Restore(t.Context(), "x", first.bundle, &runc.RestoreOpts{IO: first.console, Detach: true})
	must(t, err)
	if text, err := os.ReadFile(sizes); err != nil || string(text) != "FDSize:\t256\nFDSize:\t256\n" {
		t.Errorf("%q, %v; want a table of 256 after each start", text, err)
	}
}
