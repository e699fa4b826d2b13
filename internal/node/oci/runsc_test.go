package oci

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// writeLogs has the commands of runsc write logs from now on: each into a file of its name, after the prefix returned.
func (l *testHost) writeLogs(t *testing.T, args ...string) (prefix string) {
	t.Helper()
	prefix = filepath.Join(l.dir, "logs") + "/"
	logging, err := New(Config{Class: GVisor, Binary: l.cfg.Binary, Root: l.cfg.Root, ExtraArgs: append(args, "--debug-log="+prefix+"%COMMAND%")})
	must(t, err)
	l.Runtime = logging
	return prefix
}

// Sandboxes, their stub processes and gofers use the seccomp filters that were compiled with runsc, at start and
// restore, whether a gofer serves files itself or not. Compiling them takes 2 to 10 ms each.
func TestFiltersArePrecompiled(t *testing.T) {
	l := newTestHost(t)
	logs := l.writeLogs(t, "--debug")
	// use counts the precompiled and the other filters of a command's process.
	use := func(command string) (ahead, late int) {
		t.Helper()
		text, err := os.ReadFile(logs + command)
		must(t, err)
		must(t, os.Remove(logs+command))
		return strings.Count(string(text), "Loaded precompiled seccomp instructions"), strings.Count(string(text), "Seccomp program optimized")
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

// No thread of a sandbox's processes can get a capability that it has not, though they drop none from their bounding sets
// and do not clear their ambient ones.
func TestNoNewPrivileges(t *testing.T) {
	b := newTestHost(t).newSandbox(t).run(t)
	for _, pid := range b.processes(t) {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		must(t, err)
		for _, thread := range threads {
			status, err := os.ReadFile(thread)
			if err != nil {
				continue // exited
			}
			for _, want := range []string{"NoNewPrivs:\t1\n", "Seccomp:\t2\n", "CapAmb:\t0000000000000000\n"} {
				if !strings.Contains(string(status), want) {
					t.Errorf("%s lacks %q:\n%s", thread, want, status)
				}
			}
			for _, name := range []string{"CapPrm:\t", "CapEff:\t", "CapInh:\t"} {
				_, value, _ := strings.Cut(string(status), name)
				set, err := strconv.ParseUint(value[:16], 16, 64)
				must(t, err)
				if set&(1<<unix.CAP_SYS_ADMIN|1<<unix.CAP_SETPCAP|1<<unix.CAP_NET_ADMIN) != 0 {
					t.Errorf("%s has %s%x", thread, name, set)
				}
			}
		}
	}
}

// A sandbox collects no garbage as it starts or is restored, but once it has run for a second.
func TestGarbageIsCollectedAfterStart(t *testing.T) {
	l := newTestHost(t)
	logs := l.writeLogs(t)
	check := func(what string) {
		t.Helper()
		eventually.NoError(t, what+": a collection", func() error {
			text, err := os.ReadFile(logs + "boot")
			must(t, err)
			_, count, ok := strings.Cut(string(text), "Garbage collections during the start: ")
			if !ok {
				return errors.New("none in the log of the sandbox; is runsc the one that `make runtimes` builds?")
			}
			if !strings.HasPrefix(count, "0\n") {
				t.Errorf("%s: it collected while it started, times: %.2s", what, count)
			}
			return nil
		})
		must(t, os.Remove(logs+"boot"))
	}
	first := l.newSandbox(t).run(t)
	check("start")
	first.copyOf(t).restore(t, first.checkpoint(t, CheckpointOptions{}), RestoreOptions{})
	check("restore")
}

// A checkpoint reads no page that a sandbox has not written, and what it has written is restored. A page that was read and is zero is
// given back, with those beside it.
func TestHolesAreNotRead(t *testing.T) {
	const mebi, written = 256, 256 << 20 / (300 * 4096)
	l := newTestHost(t)
	logs := l.writeLogs(t)
	first := l.newSandbox(t).run(t)
	first.expect(t, fmt.Sprintf("sparse %d", mebi), "ok")
	first.copyOf(t).restore(t, first.checkpoint(t, CheckpointOptions{}), RestoreOptions{}).expect(t, "spared", strconv.Itoa(mebi<<20))
	text, err := os.ReadFile(logs + "boot")
	must(t, err)
	saves, given := regexp.MustCompile(`decommitted in (\d+) syscalls`).FindAllStringSubmatch(string(text), -1), 0
	for _, m := range saves {
		n, err := strconv.Atoi(m[1])
		must(t, err)
		given += n
	}
	if len(saves) == 0 || given >= written {
		t.Errorf("%d scans gave back pages %d times, with holes between %d: is runsc the one that `make runtimes` builds?", len(saves), given, written)
	}
}

// The log of a restore that someone reads has what is left out of one that is discarded.
func TestLogsAreWhole(t *testing.T) {
	l := newTestHost(t)
	logs := l.writeLogs(t)
	first := l.newSandbox(t).run(t)
	first.copyOf(t).restore(t, first.checkpoint(t, CheckpointOptions{}), RestoreOptions{}).query(t, "add")
	text, err := os.ReadFile(logs + "boot")
	must(t, err)
	for _, want := range []string{"Kernel save stats", "Kernel load stats", "pkg/sentry/kernel.Task\n"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the log of a sandbox lacks %q", want)
		}
	}
}

// A sandbox registers no trace points as it starts.
func TestNoTracePoints(t *testing.T) {
	l := newTestHost(t)
	logs := l.writeLogs(t, "--debug")
	l.newSandbox(t).run(t)
	text, err := os.ReadFile(logs + "boot")
	must(t, err)
	if !strings.Contains(string(text), "reached midpoint RNG initialized") || strings.Contains(string(text), "reached midpoint seccheck initialized") {
		t.Error("the log of a start tells no steps, or of trace points")
	}
}

// The process that umounts /proc for a sandbox that starts ends before gVisor's packages are initialized.
func TestProcUmounter(t *testing.T) {
	l := newTestHost(t)
	signal, end, err := os.Pipe()
	must(t, err)
	must(t, end.Close()) // it reads no byte, so it umounts nothing
	defer func() { _ = signal.Close() }()
	umounter := exec.CommandContext(t.Context(), l.cfg.Binary)
	umounter.Env, umounter.ExtraFiles = []string{"RUNSC_PROC_UMOUNTER=1", "GODEBUG=inittrace=1"}, []*os.File{signal}
	text, err := umounter.CombinedOutput()
	if failed, ok := errors.AsType[*exec.ExitError](err); !ok || failed.ExitCode() != 1 {
		t.Errorf("without a signal it ends with %v, want status 1", err)
	}
	if !strings.Contains(string(text), "init syscall") || strings.Contains(string(text), "init gvisor.dev/gvisor/pkg/sentry") {
		t.Errorf("it initialized gVisor's packages, or none, is runsc the one that `make runtimes` builds?\n%s", text)
	}
}

// A process of runsc without a kernel builds no table of system calls, and the counter of those that a kernel lacks is exported with
// the other metrics.
func TestSyscallTablesAreBuiltLate(t *testing.T) {
	l := newTestHost(t)
	runsc := exec.CommandContext(t.Context(), l.cfg.Binary, "--version")
	runsc.Env = []string{"GODEBUG=inittrace=1"}
	text, err := runsc.CombinedOutput()
	must(t, err)
	found := regexp.MustCompile(`init gvisor.dev/gvisor/pkg/sentry/syscalls/linux .* (\d+) allocs`).FindSubmatch(text)
	if found == nil {
		t.Fatalf("the initialization has no package of system calls:\n%s", text)
	}
	if allocs, err := strconv.Atoi(string(found[1])); err != nil || allocs > 100 {
		t.Errorf("its initialization made %s allocations, want at most 100; is runsc the one that `make runtimes` builds?", found[1])
	}
	metrics, err := exec.CommandContext(t.Context(), l.cfg.Binary, "metric-metadata").Output()
	must(t, err)
	if !strings.Contains(string(metrics), "/unimplemented_syscalls") {
		t.Error("the metrics have no counter of unimplemented system calls")
	}
}

// A restored sandbox has no more threads than one that was started, with a few to read pages: they leave processors to it.
func TestFewPageReaders(t *testing.T) {
	first := newTestHost(t).newSandbox(t).run(t)
	threads := func(b *testSandbox) (n int) {
		for _, pid := range b.processes(t) {
			all, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
			must(t, err)
			n += len(all)
		}
		return n
	}
	before := threads(first)
	next := first.copyOf(t).restore(t, first.checkpoint(t, CheckpointOptions{LeaveRunning: true}), RestoreOptions{Background: true})
	next.query(t, "add")
	if got, limit := threads(next), before+8+runtime.NumCPU()/2; got > limit {
		t.Errorf("%d threads after a restore, %d after a start, want at most %d: is runsc the one that `make runtimes` builds?", got, before, limit)
	}
}
