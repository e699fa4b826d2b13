package oci

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Sandboxes and their gofers use the seccomp filters that were compiled with runsc, at start and
// restore, whether a gofer serves files itself or not. Compiling them takes 10 ms each.
func TestFiltersArePrecompiled(t *testing.T) {
	l := newTestHost(t)
	logs := filepath.Join(l.dir, "logs") + "/"
	verbose, err := New(Config{
		Class: GVisor, Binary: l.cfg.Binary, Root: l.cfg.Root, ExtraArgs: []string{"--debug", "--debug-log=" + logs + "%COMMAND%"},
	})
	must(t, err)
	l.Runtime = verbose
	// use counts the precompiled and the other filters of a command's process.
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
				t.Errorf("%s: %d filters of %s were precompiled, %d not, want 1, 0: is runsc the one that `make runtimes` builds?",
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
