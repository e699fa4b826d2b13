package node

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/inventory"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/suspend"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// What is done on the way to files only and back, and to volume claims only. After "decided" there
// is no way back to the memory.
var (
	shelveSteps  = []string{"sync", "flush", "decided", "stop", "unmount", "detach", "discard", "stored"}
	anewSteps    = []string{"network", "mount", "readdress", "start", "agent", "sidecars", "limit", "running"}
	deleteSteps  = append(slices.Clone(shelveSteps), "released")
	createSteps  = []string{"address", "network", "snapshot", "mount", "bundle", "sidecar_files", "record", "start", "agent", "sidecars", "limit", "hold", "running"}
	givingUpMade = []string{"decided", "stop", "unmount", "detach", "discard", "stored"}
)

// keeper is a sandbox with files of all kinds.
func keeper(change ...func(*agents.Sandbox)) *agents.Sandbox {
	return object(append(change, func(s *agents.Sandbox) {
		s.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{{EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: "data"}}}
		pod(s).Volumes = []corev1.Volume{{Name: "disk", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		container(s).VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}, {Name: "disk", MountPath: "/disk"}}
		container(s).Env = []corev1.EnvVar{
			{Name: "PATH", Value: "/bin"},
			{Name: "IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
		}
	})...)
}

// leaves has a sandbox leave traces in its files, none of them synced, and in memory.
func leaves(t testing.TB, n *Node, s *agents.Sandbox) {
	t.Helper()
	if out, code := run(t, n, s, "for d in /root /data /disk /dev/shm; do echo here > $d/trace; done; (sleep 1000 > /dev/null 2>&1 &)"); code != 0 {
		t.Fatalf("traces: %d %q", code, out)
	}
}

// finds fails unless the traces are in these directories and in no others.
func finds(t testing.TB, n *Node, s *agents.Sandbox, want ...string) {
	t.Helper()
	out, _ := run(t, n, s, "for d in /root /data /disk /dev/shm; do [ \"$(cat $d/trace 2>/dev/null)\" = here ] && echo $d; done; true")
	if got := strings.Fields(out); !slices.Equal(got, want) {
		t.Errorf("traces in %v, want %v", got, want)
	}
}

func suspendAs(t testing.TB, n *Node, s *agents.Sandbox, mode agents.SuspendMode) sandbox.Observed {
	t.Helper()
	seen, err := n.Suspend(t.Context(), refOf(s), mode)
	if err != nil {
		t.Fatalf("suspend %s: %v", mode, err)
	}
	return seen
}

func resumeFiles(t testing.TB, n *Node, s *agents.Sandbox) {
	t.Helper()
	if seen, err := n.Resume(t.Context(), refOf(s), true); err != nil || seen.State != sandbox.ContainerRunning || seen.Message != "" {
		t.Fatalf("resume from files: %+v, %v", seen, err)
	}
}

// restsOnFiles fails unless a sandbox is nothing but files.
func restsOnFiles(t testing.TB, n *Node, s *agents.Sandbox, was *journal.Row) {
	t.Helper()
	u := n.handles.Lookup(s.UID)
	filesSeen(t, n, s, was.Address)
	if r := u.Row(); r.Stage != journal.Stored || r.Kept != agents.SuspendFiles || r.Memory != nil || r.Build != "" {
		t.Errorf("journal has %+v", r)
	}
	if was.Process.Alive() {
		t.Errorf("process %d lives", was.Process.PID)
	}
	nothingRuns(t, n, string(u.ID))
	noMemory(t, n)
	clean(t, n)
}

// filesSeen fails unless a sandbox is observed as suspended to files, and has its address.
func filesSeen(t testing.TB, n *Node, s *agents.Sandbox, addr netip.Addr) {
	t.Helper()
	seen, err := n.Observe(t.Context(), refOf(s))
	if err != nil || seen.State != sandbox.ContainerPaused || !strings.HasPrefix(seen.Message, suspend.FilesKept) || seen.Address != addr {
		t.Errorf("%+v, %v", seen, err)
	}
	if lease, ok := n.allocator.Of(string(s.UID)); !ok || lease.State != ipam.Held || lease.Address != addr {
		t.Errorf("lease %+v, %v", lease, ok)
	}
	diskUsed(t, n, s)
}

func TestFilesOnly(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	for _, c := range []string{"gvisor", "runc"} {
		t.Run(c, func(t *testing.T) {
			n, stop := m.node(atOnce)
			defer func() { stop() }()
			s := keeper(class(c))
			before := ensure(t, n, s)
			leaves(t, n, s)
			mode := agents.SuspendFiles
			if c == "runc" {
				mode = agents.SuspendMemory // it cannot, and reports that
			}
			for range 2 {
				was := *n.handles.Lookup(s.UID).Row()
				suspended := suspendAs(t, n, s, mode)
				if filesOnly := strings.Contains(suspended.Message, "class runc keeps files only"); filesOnly != (c == "runc") {
					t.Errorf("got %q", suspended.Message)
				}
				restsOnFiles(t, n, s, &was)
				if again := suspendAs(t, n, s, agents.SuspendDelete); again != suspended {
					t.Errorf("the mode matters only for a running sandbox: %+v", again)
				}
				if seen := ensure(t, n, s); seen.State != sandbox.ContainerPaused {
					t.Errorf("ensure of a suspended sandbox: %+v", seen)
				}
				stop()
				n, stop = m.node(atOnce)
				restsOnFiles(t, n, s, &was)
				resume(t, n, s)
				finds(t, n, s, "/root", "/data", "/disk")
				after := n.handles.Lookup(s.UID).Observed()
				if after.Address != before.Address || !after.StartedAt.After(before.StartedAt) || after.Message != "" {
					t.Errorf("before %+v, after %+v", before, after)
				}
				if r := n.handles.Lookup(s.UID).Row(); r.Kept != "" || r.Stage != journal.Live {
					t.Errorf("journal has %+v", r)
				}
				leaves(t, n, s)
			}
			if _, err := n.Suspend(t.Context(), refOf(s), "Dreams"); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "spec.barchan.suspend") {
				t.Errorf("an unknown mode: %v", err)
			}
			// It is watched as before.
			must(t, n.handles.Lookup(s.UID).Row().Process.Signal(9))
			eventually.True(t, "its end is seen", func() bool { return n.handles.Lookup(s.UID).Observed().State == sandbox.ContainerExited })
		})
	}
}

// Of memory in RAM or on disk nothing is left after a resume from files, and all files are there,
// those too that a frozen kernel had not written yet.
func TestMemoryGivenUp(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(func(c *Config) { c.StoreAfter = time.Hour })
	for name, after := range map[string]time.Duration{"in RAM": time.Hour, "on disk": time.Nanosecond} {
		t.Run(name, func(t *testing.T) {
			n.suspender.StoreAfter = after
			s := keeper()
			before := ensure(t, n, s)
			leaves(t, n, s)
			was := *n.handles.Lookup(s.UID).Row()
			suspendMemory(t, n, s)
			if after < time.Second {
				awaitStored(t, n, s)
			}
			resumeFiles(t, n, s)
			resumeFiles(t, n, s) // it runs
			finds(t, n, s, "/root", "/data", "/disk")
			if now := n.handles.Lookup(s.UID).Observed(); now.Address != before.Address || was.Process.Alive() {
				t.Errorf("%+v, its process lives: %t", now, was.Process.Alive())
			}
			noMemory(t, n)
			clean(t, n)
		})
	}
}

// Only volume claims outlive the mode Delete, and the sandbox is made again of them and its object.
func TestVolumesOnly(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s, other := keeper(), object()
	ensure(t, n, s)
	leaves(t, n, s)
	was := *n.handles.Lookup(s.UID).Row()
	gone := func() {
		t.Helper()
		seen, err := n.Observe(t.Context(), refOf(s))
		if err != nil || seen.State != sandbox.ContainerAbsent || seen.Message != suspend.ClaimsKept || seen.Address.IsValid() {
			t.Errorf("%+v, %v", seen, err)
		}
		if _, leased := n.allocator.Of(string(s.UID)); leased {
			t.Error("it has a lease")
		}
		v, err := n.inventory.Scan(t.Context())
		must(t, err)
		for _, x := range v.Resources {
			if x.ID == string(was.Plan.ID) && x.Kind != inventory.KindClaims {
				t.Errorf("left: %s", x)
			}
		}
		clean(t, n)
	}
	suspendAs(t, n, s, agents.SuspendDelete)
	gone()
	suspendAs(t, n, s, agents.SuspendMemory) // it is suspended
	n.Sweep(t.Context())
	n.Sweep(t.Context())
	if _, err := n.CheckAddresses(t.Context()); err != nil {
		t.Error(err)
	}
	gone()
	stop()
	n, stop = m.node()
	gone()
	ensure(t, n, other)
	container(s).Env = append(container(s).Env, corev1.EnvVar{Name: "NEW", Value: "yes"})
	if seen := ensure(t, n, s); seen.State != sandbox.ContainerRunning || seen.Message != "" {
		t.Errorf("%+v", seen)
	}
	finds(t, n, s, "/data")
	if out, _ := run(t, n, s, "echo $NEW"); out != "yes\n" {
		t.Errorf("its object is as it was: %q", out)
	}
	// Without its object it is made as it was.
	suspendAs(t, n, s, agents.SuspendDelete)
	gone()
	resume(t, n, s)
	finds(t, n, s, "/data")
	suspendAs(t, n, s, agents.SuspendDelete)
	must(t, n.Remove(t.Context(), refOf(s)))
	clean(t, n)
	stop()
}

// If any step fails once, nothing that was to be kept is lost, and the next try succeeds. Until it
// is decided that memory goes, it stays.
func TestFailureOfAStepWithoutMemory(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	s := keeper()
	ensure(t, n, s)
	leaves(t, n, s)
	for i, name := range shelveSteps {
		f.arm(name, errBroken)
		if _, err := n.Suspend(t.Context(), refOf(s), agents.SuspendFiles); !errors.Is(err, errBroken) {
			t.Errorf("%s: suspend: %v", name, err)
		}
		if i < slices.Index(shelveSteps, "decided") {
			finds(t, n, s, "/root", "/data", "/disk", "/dev/shm")
			continue
		}
		if seen := suspendAs(t, n, s, agents.SuspendFiles); seen.State != sandbox.ContainerPaused {
			t.Errorf("%s: %+v", name, seen)
		}
		n.Sweep(t.Context()) // retries it
		restsOnFiles(t, n, s, &journal.Row{Address: n.handles.Lookup(s.UID).Row().Address})
		resume(t, n, s)
		finds(t, n, s, "/root", "/data", "/disk")
		leaves(t, n, s)
	}
	for _, name := range anewSteps {
		suspendAs(t, n, s, agents.SuspendFiles)
		f.arm(name, errBroken)
		if _, err := n.Resume(t.Context(), refOf(s), false); !errors.Is(err, errBroken) || !errors.Is(err, errs.ErrUnavailable) {
			t.Errorf("%s: resume: %v", name, err)
		}
		restsOnFiles(t, n, s, &journal.Row{Address: n.handles.Lookup(s.UID).Row().Address})
		resume(t, n, s)
		finds(t, n, s, "/root", "/data", "/disk")
	}
}

func TestFailureWhileMemoryIsGivenUp(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	s := keeper()
	ensure(t, n, s)
	leaves(t, n, s)
	for _, name := range givingUpMade {
		suspendMemory(t, n, s)
		awaitStored(t, n, s)
		f.arm(name, errBroken)
		if _, err := n.Resume(t.Context(), refOf(s), true); !errors.Is(err, errBroken) {
			t.Errorf("%s: resume from files: %v", name, err)
		}
		if r := n.handles.Lookup(s.UID).Row(); r.Kept != agents.SuspendFiles || !r.OnDisk() {
			t.Errorf("%s: journal has %+v", name, r)
		}
		resume(t, n, s)
		finds(t, n, s, "/root", "/data", "/disk")
		noMemory(t, n)
	}
}

func TestFailureOfAStepFromVolumes(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	s := keeper()
	ensure(t, n, s)
	leaves(t, n, s)
	for _, name := range createSteps {
		suspendAs(t, n, s, agents.SuspendDelete)
		f.arm(name, errBroken)
		if _, err := n.Ensure(t.Context(), s); !errors.Is(err, errBroken) {
			t.Errorf("%s: ensure: %v", name, err)
		}
		if r := n.handles.Lookup(s.UID).Row(); r.Stage != journal.Stored || !r.KeepsClaims() || r.Address.IsValid() {
			t.Errorf("%s: journal has %+v", name, r)
		}
		ensure(t, n, s)
		finds(t, n, s, "/data")
		leaves(t, n, s)
		clean(t, n)
	}
}

// Wherever the process dies, the next one has the sandbox with what it was to keep.
func TestDeathAfterAStepWithoutMemory(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := keeper()
	n, stop := m.node()
	ensure(t, n, s)
	stop()
	dies := func(t *testing.T, at string, do func(n *Node) error) *Node {
		t.Helper()
		var f fault
		n, stop := m.node(f.into, func(c *Config) { c.StoreAfter = time.Hour })
		leaves(t, n, s)
		f.arm(at, operation.ErrCrash)
		if err := do(n); !errors.Is(err, operation.ErrCrash) {
			t.Fatalf("error %v, want the crash", err)
		}
		stop()
		n, stop = m.node()
		t.Cleanup(stop)
		clean(t, n)
		return n
	}
	shelve := func(mode agents.SuspendMode) func(n *Node) error {
		return func(n *Node) error {
			_, err := n.Suspend(t.Context(), refOf(s), mode)
			return err
		}
	}
	for i, name := range shelveSteps {
		t.Run("files/"+name, func(t *testing.T) {
			sampled(t)
			n := dies(t, name, shelve(agents.SuspendFiles))
			if i < slices.Index(shelveSteps, "decided") {
				finds(t, n, s, "/root", "/data", "/disk", "/dev/shm")
				return
			}
			restsOnFiles(t, n, s, &journal.Row{Address: n.handles.Lookup(s.UID).Row().Address})
			resume(t, n, s)
			finds(t, n, s, "/root", "/data", "/disk")
		})
	}
	for _, name := range anewSteps {
		t.Run("recreate/"+name, func(t *testing.T) {
			sampled(t)
			n := dies(t, name, func(n *Node) error {
				suspendAs(t, n, s, agents.SuspendFiles)
				_, err := n.Resume(t.Context(), refOf(s), false)
				return err
			})
			if name != "running" {
				restsOnFiles(t, n, s, &journal.Row{Address: n.handles.Lookup(s.UID).Row().Address})
				resume(t, n, s)
			}
			finds(t, n, s, "/root", "/data", "/disk")
		})
	}
	for _, name := range givingUpMade {
		t.Run("giving up/"+name, func(t *testing.T) {
			sampled(t)
			n := dies(t, name, func(n *Node) error {
				suspendMemory(t, n, s)
				_, err := n.Resume(t.Context(), refOf(s), true)
				return err
			})
			restsOnFiles(t, n, s, &journal.Row{Address: n.handles.Lookup(s.UID).Row().Address})
			resume(t, n, s)
			finds(t, n, s, "/root", "/data", "/disk")
		})
	}
	for i, name := range deleteSteps {
		t.Run("delete/"+name, func(t *testing.T) {
			sampled(t)
			n := dies(t, name, shelve(agents.SuspendDelete))
			if i < slices.Index(deleteSteps, "decided") {
				finds(t, n, s, "/root", "/data", "/disk", "/dev/shm")
				return
			}
			if _, leased := n.allocator.Of(string(s.UID)); leased || n.handles.Lookup(s.UID).Observed().State != sandbox.ContainerAbsent {
				t.Errorf("%+v, leased: %t", n.handles.Lookup(s.UID).Observed(), leased)
			}
			ensure(t, n, s)
			finds(t, n, s, "/data")
		})
	}
	for _, name := range createSteps {
		t.Run("made again/"+name, func(t *testing.T) {
			sampled(t)
			n := dies(t, name, func(n *Node) error {
				suspendAs(t, n, s, agents.SuspendDelete)
				_, err := n.Ensure(t.Context(), s)
				return err
			})
			if _, leased := n.allocator.Of(string(s.UID)); leased != (name == "running") {
				t.Errorf("leased: %t", leased)
			}
			ensure(t, n, s)
			finds(t, n, s, "/data")
		})
	}
}

// Concurrent removals, suspends and resumes end in the state of the last one, or with a reason.
func TestRacesWithoutMemory(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	for _, name := range []string{"flush", "stop", "discard"} {
		t.Run("remove while "+name, func(t *testing.T) {
			s := keeper()
			ensure(t, n, s)
			hit, release := f.hold(t, name)
			ended := make(chan error, 1)
			go func() {
				_, err := n.Suspend(t.Context(), refOf(s), agents.SuspendFiles)
				ended <- err
			}()
			awaitHit(t, hit)
			removed := make(chan error, 1)
			go func() { removed <- n.Remove(t.Context(), refOf(s)) }()
			eventually.True(t, "it is interrupted", func() bool { return interrupted(n, s.UID) })
			release()
			must(t, <-removed)
			<-ended //nolint:errcheck // it may have been cut short
			if n.handles.Lookup(s.UID) != nil {
				t.Error("it is still there")
			}
			clean(t, n)
		})
	}
	t.Run("two resumes", func(t *testing.T) {
		s := keeper()
		ensure(t, n, s)
		leaves(t, n, s)
		for _, filesOnly := range []bool{false, true} {
			suspendMemory(t, n, s)
			awaitStored(t, n, s)
			var all [2]error
			var resuming sync.WaitGroup
			for i := range all {
				resuming.Go(func() { _, all[i] = n.Resume(t.Context(), refOf(s), filesOnly) })
			}
			resuming.Wait()
			must(t, errors.Join(all[:]...))
			if seen := n.handles.Lookup(s.UID).Observed(); seen.State != sandbox.ContainerRunning {
				t.Errorf("%+v", seen)
			}
		}
		finds(t, n, s, "/root", "/data", "/disk")
		must(t, n.Remove(t.Context(), refOf(s)))
		clean(t, n)
	})
}

// Rows of before there were modes: a sandbox of class runc that was frozen in RAM continues where it was.
func TestFrozenByAnOlderServer(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(atOnce)
	s := object(class("runc"))
	ensure(t, n, s)
	run(t, n, s, "echo x > /dev/shm/x")
	u := n.handles.Lookup(s.UID)
	must(t, runtimeOf(t, n, oci.Runc).Pause(t.Context(), string(u.ID)))
	old := *u.Row()
	old.PausedAt = time.Now()
	must(t, n.handles.Note(u, &old, journal.Pausing))
	must(t, n.handles.Note(u, &old, journal.Paused))
	n.suspender.SetPaused(u, &old)
	resume(t, n, s)
	if out, _ := run(t, n, s, "cat /dev/shm/x"); out != "x\n" {
		t.Errorf("its memory has %q", out)
	}
	if a := (netip.Addr{}); u.Observed().Address == a {
		t.Error("it has no address")
	}
}
