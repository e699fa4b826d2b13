package node

import (
	"errors"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

var errBroken = errors.New("broken on purpose")

func breakAfter(step string, with error) func(*Config) {
	return func(c *Config) {
		c.AfterStep = func(s string) error {
			if s == step {
				return with
			}
			return nil
		}
	}
}

// If any step fails, nothing is left, and the next attempt succeeds.
func TestFailureAtEachStepLeaksNothing(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	for _, c := range []string{"gvisor", "runc"} {
		for _, name := range operation.StepNames() {
			t.Run(c+"/"+name, func(t *testing.T) {
				sampled(t)
				n, stop := m.node(breakAfter(name, errBroken))
				defer stop()
				s := object(class(c))
				if _, err := n.Ensure(t.Context(), s); !errors.Is(err, errBroken) {
					t.Fatalf("error %v, want the broken step's", err)
				}
				if left, err := n.Audit(t.Context()); err != nil || len(left) > 0 {
					t.Errorf("left: %v, %v", left, err)
				}
				if seen, err := n.Observe(t.Context(), refOf(s)); err != nil || seen.State != sandbox.ContainerAbsent {
					t.Errorf("%+v, %v", seen, err)
				}
			})
		}
	}
}

// Wherever the process dies, the next one makes it as if nothing had been begun.
func TestDeathAfterEachStepConverges(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	for _, name := range operation.StepNames() {
		t.Run(name, func(t *testing.T) {
			n, stop := m.node(breakAfter(name, operation.ErrCrash))
			s := object()
			if _, err := n.Ensure(t.Context(), s); !errors.Is(err, operation.ErrCrash) {
				t.Fatalf("error %v, want the crash", err)
			}
			stop()
			n, stop = m.node()
			defer stop()
			if left, err := n.Audit(t.Context()); err != nil || len(left) > 0 {
				t.Errorf("left after the restart: %v, %v", left, err)
			}
			if seen := ensure(t, n, s); seen.State != sandbox.ContainerRunning {
				t.Errorf("%+v", seen)
			}
			must(t, n.Remove(t.Context(), refOf(s)))
		})
	}
}

func TestRemoveWhileStarting(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	for _, name := range operation.StepNames() {
		t.Run(name, func(t *testing.T) {
			reached, goOn := make(chan struct{}), make(chan struct{})
			var once sync.Once
			n, stop := m.node(func(c *Config) {
				c.AfterStep = func(s string) error {
					if s == name {
						once.Do(func() { close(reached) })
						<-goOn
					}
					return nil
				}
			})
			defer stop()
			s := object()
			ended := make(chan error, 1)
			go func() {
				_, err := n.Ensure(t.Context(), s)
				ended <- err
			}()
			awaitHit(t, reached)
			removed := make(chan error, 1)
			go func() { removed <- n.Remove(t.Context(), refOf(s)) }()
			eventually.True(t, "the start is interrupted", func() bool { return interrupted(n, s.UID) })
			close(goOn)
			if err := <-removed; err != nil {
				t.Errorf("remove: %v", err)
			}
			if err := <-ended; err != nil && !errors.Is(err, errs.ErrUnavailable) {
				t.Errorf("ensure: %v", err)
			}
			if left, err := n.Audit(t.Context()); err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}

func TestContainerdDiesAndComesBack(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	s := object()
	before := ensure(t, n, s)
	b, err := os.ReadFile(filepath.Join(filepath.Dir(m.supervisor.Address()), "containerd.pid"))
	must(t, err)
	pid, err := strconv.Atoi(strings.TrimLeft(strings.Split(string(b), ",")[0], `{"pid:`))
	must(t, err)
	p, err := os.FindProcess(pid)
	must(t, err)
	must(t, p.Kill())
	if out, code := run(t, n, s, "echo still"); code != 0 || out != "still\n" {
		t.Errorf("without containerd: %d %q", code, out)
	}
	// Calls made meanwhile wait for its return; a call that was in progress at its end reports that another
	// try may help.
	other := object()
	eventually.True(t, "another is made", func() bool {
		seen, err := n.Ensure(t.Context(), other)
		if err != nil && !errors.Is(err, errs.ErrUnavailable) {
			t.Fatal(err)
		}
		return err == nil && seen.State == sandbox.ContainerRunning
	})
	if seen := ensure(t, n, s); seen != before {
		t.Errorf("before %+v, after %+v", before, seen)
	}
	must(t, n.Remove(t.Context(), refOf(s)))
}

// An address that a live sandbox has although it is not leased is not given again.
func TestAddressOfALiveSandboxIsQuarantined(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	first := object()
	taken := ensure(t, n, first).Address
	n.handles.Lookup(first.UID).SetRow(func() *journal.Row { // the lease is lost, and the next would get it
		r := *n.handles.Lookup(first.UID).Row()
		r.Address = taken.Next()
		return &r
	}())
	second := ensure(t, n, object()).Address
	if second == taken.Next() {
		t.Errorf("address %s was given although a live sandbox has it", second)
	}
	quarantined := false
	for _, l := range n.allocator.List() {
		quarantined = quarantined || (l.Address == taken.Next() && l.State == "quarantined")
	}
	if !quarantined {
		t.Errorf("leases: %+v", n.allocator.List())
	}
	n.handles.Lookup(first.UID).SetRow(func() *journal.Row {
		r := *n.handles.Lookup(first.UID).Row()
		r.Address = taken
		return &r
	}())
}

// A removal that fails keeps the address, and can be repeated.
func TestFailedRemovalKeepsTheAddress(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	s := object()
	addr := ensure(t, n, s).Address
	busy := filepath.Join(n.host.Dir(string(sandbox.IDOf(s.UID))), "busy")
	must(t, os.Mkdir(busy, 0o700))
	must(t, unix.Mount("tmpfs", busy, "tmpfs", 0, "")) // its files cannot be removed
	err := n.Remove(t.Context(), refOf(s))
	lease, ok := n.allocator.Of(string(s.UID)) // before the node can try again and succeed
	must(t, unix.Unmount(busy, 0))
	if err == nil {
		t.Fatal("the removal of a busy directory succeeded")
	}
	if !ok || lease.Address != addr {
		t.Errorf("lease %+v, %v after a failed removal", lease, ok)
	}
	must(t, n.Remove(t.Context(), refOf(s)))
	if _, ok := n.allocator.Of(string(s.UID)); ok {
		t.Error("the lease outlived the removal")
	}
}

func TestSecondNodeOnTheSameDataIsRefused(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	_, _ = m.node()
	if _, err := New(m.cfg); err == nil || !strings.Contains(err.Error(), "only one server") {
		t.Errorf("error %v", err)
	}
}

// sampled skips two thirds of the steps in make test, other ones each day; make test-all tries all.
func sampled(t *testing.T) {
	t.Helper()
	if os.Getenv("TEST_PART") != "fast" {
		return
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(t.Name()))
	if (h.Sum32()+uint32(time.Now().YearDay()))%3 != 0 { //nolint:gosec // it is positive
		t.Skip("SKIPPED: make test-all runs it")
	}
}
