package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func policy(p corev1.RestartPolicy) func(*agents.Sandbox) {
	return func(s *agents.Sandbox) { pod(s).RestartPolicy = p }
}

// die kills a sandbox as a fault of its kernel would.
func die(t testing.TB, r journal.Row) {
	t.Helper()
	must(t, r.Process.Signal(9))
	must(t, r.Process.Wait(t.Context()))
}

// livesAgain waits for a second life with the same files and address.
func livesAgain(t testing.TB, n *Node, s *agents.Sandbox, was journal.Row) {
	t.Helper()
	eventually.True(t, "it lives again", func() bool {
		r, seen := n.handles.Lookup(s.UID).Row(), n.handles.Lookup(s.UID).Observed()
		return r.Stage == journal.Live && r.Process != was.Process && seen.Message == "" // seen after it is noted
	})
	if out, _ := run(t, n, s, "cat /root/kept"); out != "kept\n" {
		t.Errorf("its file has %q", out)
	}
	seen, err := n.Observe(t.Context(), refOf(s))
	if err != nil || seen.Address != was.Address || seen.State != sandbox.ContainerRunning || !seen.Probed || seen.Message != "" {
		t.Errorf("%+v, %v", seen, err)
	}
	if got := leaseOf(n, s.UID); got != was.Address.String()+" held" {
		t.Errorf("lease %s", got)
	}
}

// When a sandbox's kernel ends, its policy decides: at once, or at the next start of the server.
func TestDeathIsAnsweredByPolicy(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	kinds := []corev1.RestartPolicy{corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever, ""}
	all := make([]*agents.Sandbox, len(kinds))
	was := make([]journal.Row, len(kinds))
	for i, p := range kinds {
		all[i] = object(policy(p))
		ensure(t, n, all[i])
		run(t, n, all[i], "echo kept > /root/kept")
		was[i] = *n.handles.Lookup(all[i].UID).Row()
	}
	check := func() {
		t.Helper()
		for i, s := range all[:2] {
			livesAgain(t, n, s, was[i])
			was[i] = *n.handles.Lookup(s.UID).Row()
		}
		for _, s := range all[2:] {
			eventually.True(t, "its end is seen", func() bool { return n.handles.Lookup(s.UID).Observed().State == sandbox.ContainerExited })
		}
	}
	for _, r := range was {
		die(t, r)
	}
	check()
	stop()
	for _, r := range was[:2] {
		die(t, r)
	}
	n, stop = m.node()
	check()

	// As after a reboot: neither processes nor mounts nor networks.
	stop()
	for _, r := range was[:2] {
		die(t, r)
		id := string(r.Plan.ID)
		must(t, ctrd.Unmount(filepath.Join(n.host.Dir(id), "rootfs")))
		must(t, unix.Unmount(n.network.NetnsPath(id), unix.MNT_DETACH))
		must(t, os.Remove(n.network.NetnsPath(id)))
		must(t, runtimeOf(t, n, oci.GVisor).Destroy())
	}
	n, _ = m.node()
	check()
	clean(t, n)
}

// One that dies while it is paused in RAM loses its memory, and restarts if its policy allows it.
func TestDeathWhileFrozen(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(func(c *Config) { c.StoreAfter = time.Hour })
	s := object(policy(corev1.RestartPolicyAlways))
	ensure(t, n, s)
	run(t, n, s, "echo kept > /root/kept")
	was := *n.handles.Lookup(s.UID).Row()
	suspendMemory(t, n, s)
	must(t, was.Process.Signal(9))
	livesAgain(t, n, s, was)
	suspendMemory(t, n, s)
	resume(t, n, s)
	clean(t, n)
}

// A server that comes back reports ready sandboxes as ready, and probes them again.
func TestReadinessOutlivesTheServer(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object(func(s *agents.Sandbox) {
		container(s).ReadinessProbe = &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/sh", "-c", "[ -e /tmp/well ]"}}},
			PeriodSeconds: 1, FailureThreshold: 1, TimeoutSeconds: patience,
		}
		container(s).Env = []corev1.EnvVar{{Name: "PATH", Value: "/bin"}}
	})
	if seen := ensure(t, n, s); seen.Probed {
		t.Error("ready before it is well")
	}
	run(t, n, s, "touch /tmp/well")
	noted := func(ready bool) func() bool {
		return func() bool {
			return n.handles.Lookup(s.UID).Row().Ready == ready && n.handles.Lookup(s.UID).Observed().Probed == ready
		}
	}
	eventually.True(t, "it is ready", noted(true))
	stop()
	n, stop = m.node()
	if seen, err := n.Observe(t.Context(), refOf(s)); err != nil || !seen.Probed || seen.Message != "" {
		t.Errorf("after a restart: %+v, %v", seen, err)
	}
	run(t, n, s, "busybox rm /tmp/well")
	eventually.True(t, "it is not ready", noted(false))
	stop()
	n, _ = m.node()
	if seen, err := n.Observe(t.Context(), refOf(s)); err != nil || seen.Probed {
		t.Errorf("after a restart: %+v, %v", seen, err)
	}
}

// What a start has read before it undoes a create does not bring the address back.
func TestUndoneCreateLeavesNoLease(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(breakAfter("record", operation.ErrCrash))
	half := object()
	if _, err := n.Ensure(t.Context(), half); !errors.Is(err, operation.ErrCrash) {
		t.Fatal(err)
	}
	lease, ok := n.allocator.Of(string(half.UID))
	if !ok {
		t.Fatal("the half that was made has no address")
	}
	stop()
	n, _ = m.node(func(c *Config) {
		c.OnRepair = func(_ context.Context, r ipam.Repair) { t.Errorf("repaired: %+v", r) }
	})
	if by, ok := n.allocator.Of(string(half.UID)); ok {
		t.Errorf("the address %s is leased for what was undone, now %s", lease.Address, by.Address)
	}
	clean(t, n)
}

// Without containerd nothing is adopted, undone or given; once it is there, all is.
func TestContainerdComesLate(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(breakAfter("record", operation.ErrCrash))
	half := object()
	if _, err := n.Ensure(t.Context(), half); !errors.Is(err, operation.ErrCrash) {
		t.Fatal(err)
	}
	stop()
	n, stop = m.node()
	whole := object()
	seen := ensure(t, n, whole)
	stop()
	m.stopCtrd()
	must(t, m.supervisor.Stop(t.Context()))

	n, err := New(m.cfg)
	must(t, err)
	n.recovery.BootTimeout = 300 * time.Millisecond
	if err := n.Run(t.Context()); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("error %v", err)
	}
	select {
	case <-n.Adopted():
		t.Error("adopted on half a view")
	default:
	}
	must(t, n.Close())

	n, err = New(m.cfg)
	must(t, err)
	n.ReadAhead(t.Context())() // without containerd, which Run then waits for
	ended := make(chan error, 1)
	go func() { ended <- n.Run(t.Context()) }()
	m.startContainerd()
	select {
	case <-n.Adopted():
	case err := <-ended:
		t.Fatal(err)
	}
	if now, err := n.Observe(t.Context(), refOf(whole)); err != nil || now.State != sandbox.ContainerRunning || now.Address != seen.Address {
		t.Errorf("%+v, %v", now, err)
	}
	clean(t, n)
	t.Cleanup(func() { // after the end of the test's context
		if err := <-ended; err != nil {
			t.Error(err)
		}
		must(t, n.Close())
	})
}

// A class that is not offered any more keeps what runs of it, and what is removed is gone.
func TestClassNotOfferedAnyMore(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object(class("runc"), policy(corev1.RestartPolicyAlways))
	before := ensure(t, n, s)
	was := *n.handles.Lookup(s.UID).Row()
	stop()
	n, _ = m.node(func(c *Config) { c.Runtimes = c.Runtimes[:1] })
	if seen, err := n.Observe(t.Context(), refOf(s)); err != nil || seen.State != sandbox.ContainerRunning || seen.Address != before.Address {
		t.Errorf("%+v, %v", seen, err)
	}
	if out, code := run(t, n, s, "echo here"); code != 0 || out != "here\n" {
		t.Errorf("%d %q", code, out)
	}
	die(t, was)
	eventually.True(t, "it cannot be restarted", func() bool { return stageOf(n, s) == journal.Restarting })
	must(t, n.Remove(t.Context(), refOf(s)))
	if inside, err := cgroups.HasProcesses(n.host.Cgroup(string(was.Plan.ID))); err != nil || inside {
		t.Errorf("processes are left: %v", err)
	}
	clean(t, n)
}

// A removed record is written again; a stored sandbox needs none to resume.
func TestRecordRemovedByHand(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(atOnce)
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	id := string(n.handles.Lookup(s.UID).ID)
	recorded := func() bool {
		records, err := n.cfg.Containerd.Records(t.Context())
		must(t, err)
		return slices.ContainsFunc(records, func(r ctrd.Container) bool {
			return r.ID == id && r.Labels[operation.LabelAddress] == n.handles.Lookup(s.UID).Row().Address.String() && r.Image == testImage
		})
	}
	suspendMemory(t, n, s)
	awaitStored(t, n, s)
	must(t, n.cfg.Containerd.RemoveContainer(t.Context(), id))
	stop()
	n, _ = m.node(func(c *Config) { c.StoreAfter = time.Hour })
	resume(t, n, s)
	p.continues(n)
	must(t, n.cfg.Containerd.RemoveContainer(t.Context(), id)) // a look may have mended it already
	n.Sweep(t.Context())
	if !recorded() {
		t.Error("the record was not written again")
	}
	clean(t, n)
}

// Leases that cannot be written do not prevent a start, and no address is leased twice.
func TestStartWithLeasesThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object(class("runc"))
	addr := ensure(t, n, s).Address
	must(t, n.journal.Remove(refOf(s))) // only the reconciler will claim for it
	must(t, n.allocator.Release(string(s.UID), addr))
	stop()
	n, err := New(m.cfg)
	must(t, err)
	store, err := ipam.NewBoltStore(n.db)
	must(t, err)
	n.allocator, err = ipam.Open(ipam.Config{Subnet: n.network.Subnet(), CoolDown: time.Second, Store: unwritable{store}, Log: n.log})
	must(t, err)
	n.inventory.Allocator = n.allocator
	must(t, n.openReconciler())
	if _, err := n.reconciler.Reconcile(t.Context()); !errors.Is(err, errBroken) {
		t.Errorf("look: %v, want the write's error", err)
	}
	records, err := n.cfg.Containerd.Records(t.Context())
	must(t, err)
	must(t, n.firstReconcile(t.Context(), nil, records))
	if by, err := n.inventory.Holder(t.Context(), addr, "another"); err != nil || by == "" {
		t.Errorf("%s would be given: %q, %v", addr, by, err)
	}
	must(t, n.Close())
	n, _ = m.node()
	must(t, n.Remove(t.Context(), refOf(s)))
}

// unwritable is a store on a disk that is full.
type unwritable struct{ ipam.Store }

func (unwritable) Apply(...ipam.Row) error { return errBroken }
