package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/inventory"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// upgraded has a node find another build of gVisor installed: the same with a byte more at the end.
func upgraded(t *testing.T, m *machine) func(*Config) {
	t.Helper()
	other := filepath.Join(filepath.Dir(m.cfg.DataDir), "other-runsc")
	b, err := os.ReadFile(m.cfg.Runtimes[0].Binary)
	must(t, err)
	must(t, os.WriteFile(other, append(b, 'x'), 0o755))
	return func(c *Config) {
		c.Runtimes = slices.Clone(c.Runtimes)
		c.Runtimes[0].Binary = other
	}
}

func keptBuilds(t *testing.T, n *Node) []string {
	t.Helper()
	names, err := inventory.Entries(n.runtimesDir())
	must(t, err)
	return slices.DeleteFunc(names, func(name string) bool { return name == "installed.json" })
}

// What an older build of the runtime runs or has written is driven and restored by that build, for
// as long as there is such a thing.
func TestOlderBuilds(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(atOnce)
	older := n.runtimes.BuildOf(oci.GVisor)
	stored, frozen, lives := object(), object(), object()
	programs := map[*agents.Sandbox]*program{}
	for _, s := range []*agents.Sandbox{stored, frozen, lives} {
		ensure(t, n, s)
		programs[s] = startProgram(t, n, s)
	}
	suspendMemory(t, n, stored)
	awaitStored(t, n, stored)
	n.suspender.StoreAfter = time.Hour
	suspendMemory(t, n, frozen)
	stop()

	n, stop = m.node(atOnce, upgraded(t, m))
	newer := n.runtimes.BuildOf(oci.GVisor)
	buildOf := func(s *agents.Sandbox, want string) {
		t.Helper()
		if got := n.handles.Lookup(s.UID).Row().Build; got != want {
			t.Errorf("%s is of build %.12s, want %.12s", s.Name, got, want)
		}
	}
	if got := keptBuilds(t, n); newer == older || len(got) != 2 || !slices.Contains(got, older) || !slices.Contains(got, newer) {
		t.Fatalf("kept %v; older %s, newer %s", got, older, newer)
	}
	awaitStored(t, n, frozen) // by the build that runs it
	for s, p := range programs {
		if s == lives {
			suspendMemory(t, n, s)
			awaitStored(t, n, s)
		}
		if got := n.handles.Lookup(s.UID).Row().Memory.Build.SHA256; got != older {
			t.Errorf("its memory is of build %.12s", got)
		}
		resume(t, n, s)
		p.continues(n)
		buildOf(s, older)
	}
	young := object()
	ensure(t, n, young)
	buildOf(young, newer)

	// Restarted, a sandbox is of the newer build; the older one stays for the others.
	suspendAs(t, n, frozen, agents.SuspendFiles)
	resume(t, n, frozen)
	buildOf(frozen, newer)
	must(t, n.Remove(t.Context(), refOf(lives)))
	suspendMemory(t, n, stored)
	awaitStored(t, n, stored)
	n.runtimes.Sweep(t.Context(), n.needsBuild)
	if got := keptBuilds(t, n); len(got) != 2 {
		t.Errorf("kept %v although something needs both", got)
	}
	refusesWithout(t, n, stored, older)
	resumeFiles(t, n, stored)
	buildOf(stored, newer)
	if out, code := run(t, n, stored, "cat /www/x"); code != 0 || out != "hi\n" {
		t.Errorf("its file: %d %q", code, out)
	}

	// What nothing names goes at the next start, and the copy in use stays.
	must(t, os.MkdirAll(filepath.Join(n.runtimesDir(), older), 0o755))
	stop()
	n, stop = m.node(atOnce, upgraded(t, m))
	defer stop()
	eventually.True(t, "the older build is removed", func() bool { return slices.Equal(keptBuilds(t, n), []string{newer}) })
}

// refusesWithout fails unless a sandbox on disk stays there for want of a build, and its files are offered.
func refusesWithout(t *testing.T, n *Node, s *agents.Sandbox, build string) {
	t.Helper()
	was := *n.handles.Lookup(s.UID).Row()
	must(t, os.RemoveAll(filepath.Join(n.runtimesDir(), build)))
	_, err := n.Resume(t.Context(), refOf(s), false)
	if errs.Kind(err) != errs.ErrConflict { //nolint:errorlint // this kind, and no other before it
		t.Errorf("resume: %v", err)
	}
	for _, text := range []string{build[:12], "no longer on this host", "spec.barchan.resume: Files", "memory=false"} {
		if !strings.Contains(errs.Text(err), text) {
			t.Errorf("error %v does not contain %q", err, text)
		}
	}
	atRest(t, n, s, &was)
}

func TestMemoryOfABetterProcessor(t *testing.T) {
	here := memimage.Build{SHA256: "a", CPUFeatures: []string{"sse"}}
	there := here
	there.CPUFeatures = []string{"sse", "avx512f"}
	err := operation.OrFiles(here.Restores(there))
	for _, text := range []string{"avx512f", "spec.barchan.resume: Files"} {
		if !errors.Is(err, errs.ErrConflict) || !strings.Contains(errs.Text(err), text) {
			t.Errorf("error %v does not contain %q", err, text)
		}
	}
}
