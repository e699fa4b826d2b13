package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// narrow leaves five addresses for sandboxes.
func (m *machine) narrow() { m.cfg.Network.Subnet = netip.PrefixFrom(m.cfg.Network.Subnet.Addr(), 29) }

// drain leases all free addresses to other owners, and returns them.
func drain(t testing.TB, n *Node) map[netip.Addr]string {
	t.Helper()
	got := map[netip.Addr]string{}
	for {
		owner := "drain-" + uuid.NewString()
		addr, err := n.allocator.Reserve(owner)
		if errors.Is(err, errs.ErrExhausted) {
			return got
		}
		must(t, err)
		got[addr] = owner
	}
}

func giveBack(t testing.TB, n *Node, drained map[netip.Addr]string) {
	t.Helper()
	for addr, owner := range drained {
		must(t, n.allocator.Release(owner, addr))
	}
}

// reconcileAddresses compares leases and host as often as it takes to release what has no owner.
func reconcileAddresses(t testing.TB, n *Node) (all []ipam.Repair) {
	t.Helper()
	r, err := ipam.NewReconciler(ipam.ReconcilerConfig{Allocator: n.allocator, Live: n.inventory.InUse, Log: n.log, Every: time.Nanosecond})
	must(t, err)
	for range 4 {
		repairs, err := r.Reconcile(t.Context())
		must(t, err)
		all = append(all, repairs...)
	}
	return all
}

// lease is the allocator's lease of a sandbox.
func leaseOf(n *Node, uid types.UID) string {
	l, ok := n.allocator.Of(string(uid))
	if !ok {
		return "none"
	}
	return fmt.Sprintf("%s %s", l.Address, l.State)
}

// A full range of addresses is an error with that reason, and changes nothing.
func TestFullSubnet(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.narrow()
	n, _ := m.node()
	drained := drain(t, n)
	before := n.Leases()
	_, err := n.Ensure(t.Context(), object())
	if !errors.Is(err, errs.ErrExhausted) || !strings.Contains(err.Error(), "no free address") {
		t.Errorf("error %v", err)
	}
	if after := n.Leases(); fmt.Sprint(after) != fmt.Sprint(before) || len(before) != 5 {
		t.Errorf("leases %+v, before %+v", after, before)
	}
	giveBack(t, n, drained)
	clean(t, n)
}

// Addresses that containers have although they are not leased are quarantined, 32 of them.
func TestConflictsInARow(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	uid := types.UID(uuid.NewString()) // the owner of all of them
	first := n.network.Gateway().Next()
	for i, addr := 0, first; i < 32+3; i, addr = i+1, addr.Next() {
		must(t, n.cfg.Containerd.CreateContainer(t.Context(), ctrd.Container{
			ID: fmt.Sprintf("stranger-%d", i), Image: testImage, Runtime: "none",
			Labels: map[string]string{operation.LabelSandbox: string(uid), operation.LabelAddress: addr.String()},
		}))
	}
	s := object()
	_, err := n.Ensure(t.Context(), s)
	if !errors.Is(err, errs.ErrExhausted) || !strings.Contains(err.Error(), "32 addresses in a row") {
		t.Errorf("error %v", err)
	}
	leases := n.Leases()
	for _, l := range leases {
		if l.State != ipam.Quarantined || !strings.Contains(l.Reason, "stranger-") {
			t.Errorf("lease %+v", l)
		}
	}
	if len(leases) != 32 {
		t.Errorf("%d addresses are quarantined", len(leases))
	}
	// The next attempt continues after them, and past the three that are left.
	seen := ensure(t, n, s)
	if want := 32 + 3; seen.Address != first.Next() && len(n.Leases()) != want+1 {
		t.Errorf("got %s; leases %+v", seen.Address, n.Leases())
	}
	must(t, n.FreeAddress(first))
	if err := n.FreeAddress(seen.Address); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("a held address was freed: %v", err)
	}
	for i := range 32 + 3 {
		must(t, n.cfg.Containerd.RemoveContainer(t.Context(), fmt.Sprintf("stranger-%d", i)))
	}
}

// obstacle is in the way of one step of a removal.
type obstacle struct {
	step             string
	hangs            bool
	once             sync.Once
	reached          chan struct{}
	retryInterrupted chan struct{}
}

func (o *obstacle) into(c *Config) {
	c.BeforeUndo = func(step string) error {
		if step != o.step {
			return nil
		}
		o.once.Do(func() { close(o.reached) })
		if o.hangs {
			<-o.retryInterrupted
			return nil
		}
		select {
		case <-o.retryInterrupted:
			return nil
		default:
			return errBroken
		}
	}
}

// While a removal fails, or hangs, the address is not leased; the removal succeeds later.
func TestAddressStaysWhileARemovalFailsOrHangs(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.narrow()
	for _, hangs := range []bool{false, true} {
		for _, step := range operation.Backwards() {
			t.Run(fmt.Sprintf("%s hangs %v", step, hangs), func(t *testing.T) {
				o := &obstacle{step: step, hangs: hangs, reached: make(chan struct{}), retryInterrupted: make(chan struct{})}
				n, stop := m.node(o.into)
				defer stop()
				s := object(class("runc"))
				addr := ensure(t, n, s).Address
				removed := make(chan error, 1)
				go func() { removed <- n.Remove(t.Context(), refOf(s)) }()
				awaitHit(t, o.reached)
				if !hangs {
					if err := <-removed; !errors.Is(err, errBroken) {
						t.Errorf("error %v", err)
					}
				}
				drained := keptFrom(t, n, s, addr)
				close(o.retryInterrupted)
				eventually.True(t, "it is removed in the end", func() bool { return n.handles.Lookup(s.UID) == nil })
				if got := leaseOf(n, s.UID); got != "none" {
					t.Errorf("lease: %s", got)
				}
				giveBack(t, n, drained)
				eventually.True(t, "all addresses have rested", func() bool { return len(n.Leases()) == 0 })
				clean(t, n)
			})
		}
	}
}

// keptFrom has others take all addresses there are, and fails if one gets that of a sandbox, or
// the reconciler takes it away.
func keptFrom(t *testing.T, n *Node, s *agents.Sandbox, addr netip.Addr) (drained map[netip.Addr]string) {
	t.Helper()
	drained = drain(t, n)
	if drained[addr] != "" || len(drained) == 0 {
		t.Errorf("%v were given, and it has %s", drained, addr)
	}
	for _, r := range reconcileAddresses(t, n) {
		if r.Address == addr {
			t.Errorf("the reconciler changed it: %+v", r)
		}
	}
	if got := leaseOf(n, s.UID); got != addr.String()+" held" {
		t.Errorf("lease: %s", got)
	}
	return drained
}

// Leases that differ from the running sandboxes are repaired before any address is leased.
func TestLeasesAndMachineDiverge(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	lost, rowless := object(class("runc")), object(class("runc"))
	a, b := ensure(t, n, lost).Address, ensure(t, n, rowless).Address
	must(t, n.allocator.Release(string(lost.UID), a))
	must(t, n.allocator.Release(string(rowless.UID), b))
	must(t, n.journal.Remove(refOf(rowless)))
	ghost, err := n.allocator.Reserve("ghost")
	must(t, err)
	must(t, n.allocator.Hold("ghost", ghost))
	_, err = n.allocator.Reserve("half")
	must(t, err)
	stop()

	var repairs atomic.Int32
	n2, _ := m.node(func(c *Config) {
		c.CoolDown = time.Millisecond
		c.OnRepair = func(context.Context, ipam.Repair) { repairs.Add(1) }
		c.Exists = func(context.Context, sandbox.Ref) (bool, error) { return true, nil }
	})
	if repairs.Load() == 0 { // minutes before the next look
		t.Error("adopted, and nothing was repaired")
	}
	if got, want := leaseOf(n2, lost.UID), a.String()+" held"; got != want {
		t.Errorf("lease %s, want %s", got, want)
	}
	if got, want := leaseOf(n2, rowless.UID), b.String()+" held"; got != want {
		t.Errorf("lease %s, want %s", got, want)
	}
	if lease, ok := n2.allocator.Of("ghost"); !ok || lease.Address != ghost {
		t.Errorf("the first look took a lease: %+v, %v", lease, ok)
	}
	reconcileAddresses(t, n2)
	for _, owner := range []string{"ghost", "half"} {
		if lease, ok := n2.allocator.Of(owner); ok {
			t.Errorf("lease without an owner is left: %+v", lease)
		}
	}
	drained := drain(t, n2)
	if drained[a] != "" || drained[b] != "" {
		t.Errorf("%s or %s was given although it is in use", a, b)
	}
	giveBack(t, n2, drained)
	must(t, n2.Remove(t.Context(), refOf(rowless)))
}

// Creates and deletes at the same time never give one address to two.
func TestNoAddressTwice(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(func(c *Config) { c.CoolDown = time.Minute })
	var mu sync.Mutex
	holders := map[netip.Addr]types.UID{}
	var busy sync.WaitGroup
	reconciler, err := ipam.NewReconciler(ipam.ReconcilerConfig{Allocator: n.allocator, Live: n.inventory.InUse, Log: n.log})
	must(t, err)
	ended := make(chan struct{})
	var looking sync.WaitGroup
	looking.Go(func() {
		for {
			repairs, err := reconciler.Reconcile(t.Context())
			if err != nil || len(repairs) > 0 {
				t.Errorf("repaired %+v, %v", repairs, err)
			}
			select {
			case <-ended:
				return
			default:
			}
		}
	})
	for range 64 {
		busy.Go(func() {
			for range 3 {
				s := object()
				ref := refOf(s)
				w := n.host.Operation(&journal.Row{Plan: plan.Plan{Ref: ref, ID: sandbox.IDOf(ref.UID), Class: "runc"}})
				u := n.handles.Of(ref)
				err := n.handles.Note(u, w.Row, journal.Making)
				for _, name := range []string{"address", "network", "record", "hold"} {
					if err == nil {
						err = w.DoStep(t.Context(), name)
					}
				}
				if err == nil {
					err = n.handles.Note(u, w.Row, journal.Live)
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if other, taken := holders[w.Row.Address]; taken {
					t.Errorf("%s is %s's and %s's", w.Row.Address, other, ref.UID)
				}
				holders[w.Row.Address] = ref.UID
				mu.Unlock()
				runtime.Gosched()
				mu.Lock()
				delete(holders, w.Row.Address)
				mu.Unlock()
				if err := n.Remove(t.Context(), ref); err != nil {
					t.Errorf("remove: %v", err)
				}
			}
		})
	}
	busy.Wait()
	close(ended)
	looking.Wait()
	clean(t, n)
}
