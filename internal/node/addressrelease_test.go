package node

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func releasing(c *Config) { c.ReleaseAddresses = true }

// homeless fails unless a sandbox is stored without an address, and nothing refers to one.
func homeless(t testing.TB, n *Node, s *agents.Sandbox) {
	t.Helper()
	seen, err := n.Observe(t.Context(), refOf(s))
	if err != nil || seen.State != sandbox.ContainerPaused || seen.Address.IsValid() {
		t.Errorf("%+v, %v", seen, err)
	}
	if r := n.handles.Lookup(s.UID).Row(); r.Stage != journal.Stored || r.Address.IsValid() {
		t.Errorf("journal has %s, %s", r.Stage, r.Address)
	}
	if lease, ok := n.allocator.Of(string(s.UID)); ok {
		t.Errorf("lease %+v", lease)
	}
	records, err := n.cfg.Containerd.Records(t.Context())
	must(t, err)
	for _, r := range records {
		if r.ID == string(sandbox.IDOf(s.UID)) && r.Labels[operation.LabelAddress] != "" {
			t.Errorf("record with %s", r.Labels[operation.LabelAddress])
		}
	}
	leasesAgree(t, n)
	clean(t, n)
}

// leasesAgree fails if the leases differ from the host.
func leasesAgree(t testing.TB, n *Node) {
	t.Helper()
	if repairs, err := n.CheckAddresses(t.Context()); err != nil || len(repairs) > 0 {
		t.Errorf("repairs %+v, %v", repairs, err)
	}
}

// atHome fails unless a sandbox runs at an address that all know, it too.
func atHome(t testing.TB, n *Node, s *agents.Sandbox) netip.Addr {
	t.Helper()
	seen := n.handles.Lookup(s.UID).Observed()
	lease, ok := n.allocator.Of(string(s.UID))
	r := n.handles.Lookup(s.UID).Row()
	if !ok || lease.State != ipam.Held || lease.Address != seen.Address || r.Address != seen.Address {
		t.Errorf("seen at %s, journal %s, lease %+v", seen.Address, r.Address, lease)
	}
	records, err := n.cfg.Containerd.RecordsWith(t.Context(), operation.LabelAddress, seen.Address.String())
	if err != nil || len(records) != 1 || records[0].ID != string(r.Plan.ID) {
		t.Errorf("records %+v, %v", records, err)
	}
	out, _ := run(t, n, s, "cat /etc/hosts; echo IP=$IP; busybox ifconfig 2>/dev/null || ip addr")
	if !strings.Contains(out, fmt.Sprintf("%s\t%s\n", seen.Address, s.Name)) || !strings.Contains(out, "IP="+seen.Address.String()+"\n") {
		t.Errorf("at %s it prints\n%s", seen.Address, out)
	}
	leasesAgree(t, n)
	return seen.Address
}

// An address that was given back is another's after its rest, and its sandbox wakes with another.
func TestReleasedAddress(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.cfg.Network.Subnet = netip.PrefixFrom(m.cfg.Network.Subnet.Addr(), 29) // five for sandboxes
	n, stop := m.node(atOnce, releasing)
	s := keeper()
	was := ensure(t, n, s).Address
	p := startProgram(t, n, s)
	suspendMemory(t, n, s)
	awaitStored(t, n, s)
	eventually.True(t, "its lease ends", func() bool { _, ok := n.allocator.Of(string(s.UID)); return !ok })
	homeless(t, n, s)
	if l, ok := n.allocator.At(was); ok && l.State != ipam.Cooling { // it rests, or has rested
		t.Errorf("its address is %+v", l)
	}
	stop()
	n, stop = m.node(atOnce, releasing)
	homeless(t, n, s)
	taken := false
	for range 5 {
		other := object()
		eventually.True(t, "there is an address", func() bool {
			_, err := n.Ensure(t.Context(), other)
			if err != nil && !errors.Is(err, errs.ErrExhausted) {
				t.Fatal(err)
			}
			return err == nil
		})
		if n.handles.Lookup(other.UID).Observed().Address == was {
			taken = true
			break
		}
		must(t, n.Remove(t.Context(), refOf(other)))
	}
	if !taken {
		t.Fatalf("no sandbox got %s", was)
	}
	resumeOnceRested(t, n, s)
	if now := atHome(t, n, s); now == was {
		t.Errorf("two have %s", now)
	}
	p.continues(n)

	// So it is where files only are kept, and with the setting changed stored sandboxes follow it.
	suspendAs(t, n, s, agents.SuspendFiles)
	homeless(t, n, s)
	stop()
	n, stop = m.node(atOnce)
	homeless(t, n, s)
	resumeOnceRested(t, n, s)
	kept := atHome(t, n, s)
	suspendAs(t, n, s, agents.SuspendFiles)
	if l, ok := n.allocator.Of(string(s.UID)); !ok || l.Address != kept {
		t.Errorf("lease %+v, %t", l, ok)
	}
	stop()
	n, stop = m.node(releasing)
	defer stop()
	homeless(t, n, s) // given back at the start
	resumeOnceRested(t, n, s)
	atHome(t, n, s)
	must(t, n.Remove(t.Context(), refOf(s)))
	clean(t, n)
}

// resumeOnceRested resumes a sandbox as soon as an address has rested, where all are in use or rest.
func resumeOnceRested(t *testing.T, n *Node, s *agents.Sandbox) {
	t.Helper()
	eventually.True(t, "it is resumed", func() bool {
		seen, err := n.Resume(t.Context(), refOf(s), false)
		if err != nil && !errors.Is(err, errs.ErrExhausted) {
			t.Fatal(err)
		}
		return err == nil && seen.State == sandbox.ContainerRunning
	})
}

// If any step fails or is the last of a process, the sandbox stays stored without an address, or has
// one; the leases always agree.
func TestFailureOrDeathAroundAReleasedAddress(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := keeper()
	n, stop := m.node(atOnce, releasing)
	ensure(t, n, s)
	p := startProgram(t, n, s)
	stop()
	storing := []string{"detach", "discard", "stored", "released"}
	for _, name := range append(slices.Clone(storing), "address", "verify", "network", "tell", "restore", "agent", "hold", "running") {
		for _, with := range []error{errBroken, operation.ErrCrash} {
			t.Run(fmt.Sprintf("%s/%v", name, with), func(t *testing.T) {
				sampled(t)
				p.t = t
				var f fault
				n, stop := m.node(atOnce, releasing, f.into)
				if slices.Contains(storing, name) {
					hit := f.arm(name, with)
					suspendMemory(t, n, s)
					awaitHit(t, hit)
				} else {
					suspendMemory(t, n, s)
					awaitStored(t, n, s)
					f.arm(name, with)
					if _, err := n.Resume(t.Context(), refOf(s), false); !errors.Is(err, with) {
						t.Fatalf("resume: %v", err)
					}
				}
				if errors.Is(with, operation.ErrCrash) {
					stop()
					n, stop = m.node(atOnce, releasing)
				}
				defer stop()
				eventually.True(t, "it comes to rest or lives", func() bool {
					n.Sweep(t.Context())
					r := n.handles.Lookup(s.UID).Row()
					return r.Stage == journal.Live || (r.Stage == journal.Stored && n.suspender.AtRest(r))
				})
				if stageOf(n, s) != journal.Live {
					homeless(t, n, s)
					resume(t, n, s)
				}
				atHome(t, n, s)
				p.continues(n)
				noMemory(t, n)
			})
		}
	}
}
