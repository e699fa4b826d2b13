package oci

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Filters of sandboxes and of what serves files to them are those that were compiled when runsc was
// built, at a start and at a restore, whether a gofer serves files itself or not. To compile them takes
// 10 ms of each.
func TestFiltersArePrecompiled(t *testing.T) {
	l := newTestHost(t)
	logs := filepath.Join(l.dir, "logs") + "/"
	verbose, err := New(Config{
		Class: GVisor, Binary: l.cfg.Binary, Root: l.cfg.Root, ExtraArgs: []string{"--debug", "--debug-log=" + logs + "%COMMAND%"},
	})
	must(t, err)
	l.Runtime = verbose
	// use says how often filters of a command's process were there, and were not.
	use := func(command string) (ahead, late int) {
		t.Helper()
		text, err := os.ReadFile(logs + command)
		must(t, err)
		must(t, os.Remove(logs+command))
		return strings.Count(string(text), "Loaded precompiled seccomp instructions"),
			strings.Count(string(text), "building seccomp program from scratch")
	}
	check := func(what string) {
		t.Helper()
		for _, command := range []string{"boot", "gofer"} {
			if ahead, late := use(command); ahead != 1 || late != 0 {
				t.Errorf("%s: %d filters of %s were compiled ahead, %d late, want 1, 0: is runsc the one that `make runtimes` builds?",
					what, ahead, command, late)
			}
		}
	}
	first := l.newSandbox(t).run(t)
	check("start")
	image := first.checkpoint(t, CheckpointOptions{})
	first.copyOf(t).restore(t, image, RestoreOptions{}).query(t, "add")
	check("restore")
}
