package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus/testutil"
	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/inventory"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/netdev"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/recovery"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// oracle answers whether sandboxes exist.
type oracle struct {
	exists atomic.Bool
	fails  atomic.Bool
	calls  atomic.Int32
}

func (o *oracle) into(c *Config) {
	c.Exists = func(context.Context, sandbox.Ref) (bool, error) {
		o.calls.Add(1)
		if o.fails.Load() {
			return false, errors.New("no answer")
		}
		return o.exists.Load(), nil
	}
}

// watched waits for the first sweep of Run, so that a test counts its own.
func watched(t testing.TB, n *Node) {
	t.Helper()
	eventually.True(t, "the first sweep ends", func() bool { return testutil.ToFloat64(n.sweeps.WithLabelValues(recovery.SweepOK)) > 0 })
}

// forget has the node know nothing of a sandbox.
func forget(n *Node, uid types.UID) {
	n.handles.Drop(n.handles.Lookup(uid))
}

// agentAnswers reports whether a sandbox runs, even if the node does not know it.
func agentAnswers(t testing.TB, n *Node, r *journal.Row) bool {
	t.Helper()
	agent, err := n.host.AgentOf(r.Plan.ID, r.Address)
	must(t, err)
	return agent.Health(t.Context()) == nil
}

// A sandbox that the node has lost is found again by the journal, at once by a
// request, and otherwise by a sweep.
func TestIndexMissesARunningSandbox(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var o oracle
	n, _ := m.node(o.into)
	watched(t, n)
	s := object()
	before := ensure(t, n, s)
	for name, find := range map[string]func(){
		"requested": func() {},
		"ensured":   func() { ensure(t, n, s) },
		"watched":   func() { n.Sweep(t.Context()) },
	} {
		forget(n, s.UID)
		find()
		if seen, err := n.Observe(t.Context(), refOf(s)); err != nil || seen.State != before.State || seen.Address != before.Address || !seen.StartedAt.Equal(before.StartedAt) {
			t.Errorf("%s: %+v, %v; before %+v", name, seen, err, before)
		}
	}
	for range 3 {
		n.Sweep(t.Context())
	}
	if got := leaseOf(n, s.UID); got != before.Address.String()+" held" || o.calls.Load() != 0 {
		t.Errorf("lease %s; %d calls of Exists for a known sandbox", got, o.calls.Load())
	}
	if out, code := run(t, n, s, "echo here"); code != 0 || out != "here\n" {
		t.Errorf("%d %q", code, out)
	}
	forget(n, s.UID)
	must(t, n.Remove(t.Context(), refOf(s)))
	clean(t, n)
}

// A container without a row of the journal lives on, with its address, until the source of truth
// has reported that its sandbox does not exist.
func TestContainerThatTheJournalLost(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var o oracle
	n, _ := m.node(o.into)
	watched(t, n)
	s := object()
	ensure(t, n, s)
	was := *n.handles.Lookup(s.UID).Row()
	n.handles.Lookup(s.UID).SetWatch(nil)
	must(t, n.journal.Remove(refOf(s)))
	forget(n, s.UID)

	lives := func(when string) {
		t.Helper()
		for range 3 {
			n.Sweep(t.Context())
		}
		reconcileAddresses(t, n)
		if !agentAnswers(t, n, &was) {
			t.Fatalf("%s: it does not answer", when)
		}
		if got := leaseOf(n, s.UID); got != was.Address.String()+" held" {
			t.Errorf("%s: lease %s", when, got)
		}
	}
	o.exists.Store(true)
	lives("it exists")
	o.fails.Store(true)
	lives("no answer")
	if o.calls.Load() == 0 {
		t.Error("Exists was not called")
	}
	if _, err := n.Ensure(t.Context(), s); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("it was made a second time: %v", err)
	}
	lives("ensured")

	o.exists.Store(false)
	o.fails.Store(false)
	n.Sweep(t.Context())
	if was.Process.Alive() {
		t.Error("it lives although it does not exist")
	}
	if got := leaseOf(n, s.UID); got != "none" {
		t.Errorf("lease %s", got)
	}
	clean(t, n)
}

// What is left without a row is removed after two sweeps, if nothing that runs can be part of it.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.sweepEvery = time.Hour // all sweeps but the first are ours
	var o oracle
	n, _ := m.node(o.into)
	watched(t, n)
	named, nameless := types.UID(uuid.NewString()), types.UID(uuid.NewString())
	for _, uid := range []types.UID{named, nameless} {
		leaveResources(t, n, uid)
	}
	record(t, n, named)
	before, err := n.Audit(t.Context())
	must(t, err)
	if len(before) != 2*7+1 {
		t.Errorf("the audit found %q", before)
	}
	n.Sweep(t.Context())
	if left, err := n.Audit(t.Context()); err != nil || len(left) != len(before) {
		t.Errorf("after one look: %q, %v", left, err)
	}
	o.fails.Store(true)
	n.Sweep(t.Context())
	if left, err := n.Audit(t.Context()); err != nil || len(left) != 7+1 {
		t.Errorf("without an answer: %q, %v", left, err)
	}
	o.fails.Store(false)
	n.Sweep(t.Context())
	clean(t, n)
}

// leaveResources creates for a sandbox all that a machine can have but a process.
func leaveResources(t testing.TB, n *Node, uid types.UID) {
	t.Helper()
	id := string(sandbox.IDOf(uid))
	addr, err := n.allocator.Reserve(string(uid))
	must(t, err)
	_, err = n.network.Attach(t.Context(), netdev.Endpoint{ID: id, Address: addr})
	must(t, err)
	must(t, n.allocator.Release(string(uid), addr))
	img, err := n.cfg.Containerd.Resolve(t.Context(), testImage)
	must(t, err)
	rootfs, err := n.cfg.Containerd.Prepare(t.Context(), id, img)
	must(t, err)
	dir := filepath.Join(n.host.Dir(id), "rootfs")
	must(t, os.MkdirAll(dir, 0o755))
	must(t, rootfs.Mount(dir, true))
	must(t, os.MkdirAll(filepath.Join(n.host.ClaimsDir(id), "data"), 0o755))
	must(t, os.MkdirAll(cgroupDir(n.host.Cgroup(id)), 0o755))
}

// cgroupDir is where a cgroup is, in one hierarchy.
func cgroupDir(path string) string {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return filepath.Join("/sys/fs/cgroup", path)
	}
	return filepath.Join("/sys/fs/cgroup/pids", path)
}

func record(t testing.TB, n *Node, uid types.UID) {
	t.Helper()
	id := string(sandbox.IDOf(uid))
	must(t, n.cfg.Containerd.CreateContainer(t.Context(), ctrd.Container{
		ID: id, Image: testImage, Runtime: "runc", Snapshot: id,
		Labels: map[string]string{operation.LabelSandbox: string(uid), operation.LabelNamespace: "default", operation.LabelName: "gone"},
	}))
}

// A process without a name is kept, and reported.
func TestNamelessProcessIsKept(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var o oracle
	n, _ := m.node(o.into)
	watched(t, n)
	s := object(class("runc"))
	ensure(t, n, s)
	was := *n.handles.Lookup(s.UID).Row()
	n.handles.Lookup(s.UID).SetWatch(nil)
	must(t, n.journal.Remove(refOf(s)))
	must(t, n.cfg.Containerd.RemoveContainer(t.Context(), string(was.Plan.ID)))
	forget(n, s.UID)
	for range 3 {
		n.Sweep(t.Context())
	}
	reconcileAddresses(t, n)
	if !agentAnswers(t, n, &was) || leaseOf(n, s.UID) != was.Address.String()+" held" {
		t.Errorf("lease %s", leaseOf(n, s.UID))
	}
	must(t, was.Process.Signal(9))
	must(t, was.Process.Wait(t.Context()))
	n.Sweep(t.Context())
	reconcileAddresses(t, n)
	clean(t, n)
}

// A row that cannot be read keeps its sandbox and its address until it is deleted.
func TestRowThatCannotBeRead(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(atOnce)
	s, stored := object(), object()
	ensure(t, n, s)
	ensure(t, n, stored)
	suspendMemory(t, n, stored)
	awaitStored(t, n, stored)
	was := *n.handles.Lookup(s.UID).Row()
	for _, uid := range []types.UID{s.UID, stored.UID} {
		must(t, n.db.Update(func(tx *bolt.Tx) error {
			return tx.Bucket([]byte("sandboxes")).Put([]byte(uid), []byte(`{"stage":"flying"}`))
		}))
	}
	stop()
	var o oracle
	n, _ = m.node(o.into)
	watched(t, n)
	for range 3 {
		n.Sweep(t.Context())
	}
	reconcileAddresses(t, n)
	if !agentAnswers(t, n, &was) || leaseOf(n, s.UID) != was.Address.String()+" held" {
		t.Errorf("lease %s", leaseOf(n, s.UID))
	}
	if names, err := inventory.Entries(n.cfg.MemoryDir); err != nil || len(names) != 1 {
		t.Errorf("memory: %v, %v", names, err)
	}
	if _, err := n.Ensure(t.Context(), s); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("ensure: %v", err)
	}
	if _, err := n.Observe(t.Context(), refOf(s)); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("observe: %v", err)
	}
	if remarks := n.handles.UnreadIDs(); len(remarks) != 2 {
		t.Errorf("remarks: %q", remarks)
	}
	clean(t, n)
	must(t, n.Remove(t.Context(), refOf(s)))
	must(t, n.Remove(t.Context(), refOf(stored)))
	clean(t, n)
	if seen := ensure(t, n, s); seen.State != sandbox.ContainerRunning {
		t.Errorf("%+v", seen)
	}
}

// An object that went without its finalizer leaves nothing behind.
func TestSweepOfGoneObject(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.sweepEvery = time.Hour // all sweeps but the first are ours
	var o oracle
	n, _ := m.node(o.into)
	watched(t, n)
	s := object(class("runc"))
	ensure(t, n, s)
	for range 3 {
		n.Sweep(t.Context())
	}
	if o.calls.Load() != 0 {
		t.Errorf("%d calls of Exists for a known sandbox", o.calls.Load())
	}
	n.ObjectDeleted(s.Namespace, s.Name)
	n.Sweep(t.Context())
	if n.handles.Lookup(s.UID) == nil {
		t.Error("removed after one look")
	}
	n.Sweep(t.Context())
	if n.handles.Lookup(s.UID) != nil || o.calls.Load() != 1 {
		t.Errorf("%d calls of Exists, and kept", o.calls.Load())
	}
	clean(t, n)
}
