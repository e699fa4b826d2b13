package ipam

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// machine lists addresses in use and records repairs.
type machine struct {
	live       []InUse
	fail       error
	repairs    []Repair
	beforeList func() // called before the list is returned
}

func (m *machine) list(context.Context) ([]InUse, error) {
	if m.beforeList != nil {
		m.beforeList()
	}
	return m.live, m.fail
}

func (m *machine) runs(owner, addr string) {
	m.live = append(m.live, InUse{Address: netip.MustParseAddr(addr), Owner: owner, Where: "label of " + owner})
}

func reconciler(t *testing.T, b *Allocator, m *machine) *Reconciler {
	t.Helper()
	r, err := NewReconciler(ReconcilerConfig{
		Allocator: b, Live: m.list, OnRepair: func(_ context.Context, p Repair) { m.repairs = append(m.repairs, p) },
		Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(),
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// wantRepairs reconciles once and compares the repairs, as texts of kind, address and owner.
func wantRepairs(t *testing.T, r *Reconciler, want ...string) []Repair {
	t.Helper()
	got, err := r.Reconcile(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, p := range got {
		texts = append(texts, strings.TrimSpace(fmt.Sprintf("%s %s %s", p.Kind, p.Address, p.Owner)))
	}
	if !slices.Equal(texts, want) {
		t.Fatalf("repaired %q, want %q", texts, want)
	}
	return got
}

func missesOf(r *Reconciler) map[netip.Addr]missed {
	r.runMu.Lock()
	defer r.runMu.Unlock()
	return maps.Clone(r.misses)
}

func TestFreeAddressInUseIsReclaimed(t *testing.T) {
	store, m := newMemory(), &machine{}
	b := open(t, store, "10.0.0.0/29")
	addr := reserve(t, b, "b")
	if err := errors.Join(b.Release("b", addr), b.Quarantine(netip.MustParseAddr("10.0.0.4"), "test")); err != nil {
		t.Fatal(err)
	}
	m.runs("a", "10.0.0.3")     // free
	m.runs("b", addr.String())  // cooling
	m.runs("c", "10.0.0.4")     // in quarantine
	m.runs("d", "192.168.7.7")  // of another subnet
	m.runs("ignored", "fd00::") // no lease of its own
	r := reconciler(t, b, m)
	wantRepairs(t, r, "reclaimed 10.0.0.2 b", "reclaimed 10.0.0.3 a", "reclaimed 10.0.0.4 c", "reclaimed 192.168.7.7 d")
	wantRepairs(t, r)
	if len(m.repairs) != 4 || m.repairs[1].Where != "label of a" {
		t.Errorf("reported %+v", m.repairs)
	}
	for range 2 {
		for i, got := range []netip.Addr{reserve(t, b, "x"), reserve(t, b, "y")} {
			if got.Compare(netip.MustParseAddr("10.0.0.4")) <= 0 {
				t.Errorf("%d: leased %s, which is in use", i, got)
			}
		}
		b = open(t, store, "10.0.0.0/29")
	}
	if n := testutil.ToFloat64(r.metrics.repairs.WithLabelValues(Reclaimed)); n != 4 {
		t.Errorf("%v repairs counted", n)
	}
}

func TestUnusedLeaseIsReleasedAfterThreeMisses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{}
		b := open(t, newMemory(), "10.0.0.0/28")
		gone, back := reserve(t, b, "exited"), reserve(t, b, "returns")
		reserve(t, b, "being created")
		held := reserve(t, b, "held")
		seen := reserve(t, b, "seen by address")
		if err := b.Hold("held", held); err != nil {
			t.Fatal(err)
		}
		m.live = []InUse{{Owner: "being created"}, {Address: seen}}
		r := reconciler(t, b, m)
		wantRepairs(t, r)
		for range 5 { // too soon for another miss
			wantRepairs(t, r)
		}
		time.Sleep(ReconcileInterval)
		wantRepairs(t, r)
		time.Sleep(ReconcileInterval)
		m.runs("returns", back.String())
		wantRepairs(t, r, "released "+gone.String()+" exited", "released "+held.String()+" held")
		if _, cools := b.CoolingUntil(gone); !cools {
			t.Error("address not cooling")
		}
		m.live = m.live[:2] // exits again: its misses start at zero
		for range 2 {
			time.Sleep(ReconcileInterval)
			wantRepairs(t, r)
		}
		time.Sleep(ReconcileInterval)
		wantRepairs(t, r, "released "+back.String()+" returns")
		for range 10 {
			time.Sleep(ReconcileInterval)
			wantRepairs(t, r)
		}
		if missed := missesOf(r); len(missed) != 0 {
			t.Errorf("misses of released leases: %v", missed)
		}
	})
}

func TestFailedReleaseIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store, m := newMemory(), &machine{}
		b := open(t, store, "10.0.0.0/29")
		addr := reserve(t, b, "exited")
		other := reserve(t, b, "exited too")
		m.runs("new", "10.0.0.5")
		r := reconciler(t, b, m)
		wantRepairs(t, r, "reclaimed 10.0.0.5 new")
		time.Sleep(ReconcileInterval)
		wantRepairs(t, r)
		store.fail = errors.New("disk full")
		for range 10 {
			time.Sleep(ReconcileInterval)
			repairs, err := r.Reconcile(t.Context())
			if len(repairs) != 0 || !errors.Is(err, store.fail) || strings.Count(err.Error(), "release ") != 2 {
				t.Fatalf("repairs %v, error %v", repairs, err)
			}
		}
		if got := missesOf(r)[addr].times; got != missesBeforeRelease {
			t.Errorf("missed %d times, want %d", got, missesBeforeRelease)
		}
		store.fail = nil // no wait: it has enough misses
		wantRepairs(t, r, "released "+addr.String()+" exited", "released "+other.String()+" exited too")
	})
}

func TestConflictChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{}
		b := open(t, newMemory(), "10.0.0.0/29")
		addr, second := reserve(t, b, "a"), reserve(t, b, "b")
		m.runs("other", addr.String())
		m.runs("b", second.String())
		m.runs("twin", second.String())
		before := b.List()
		r := reconciler(t, b, m)
		for range 5 {
			p := wantRepairs(t, r, "conflict "+addr.String()+" a", "conflict "+second.String()+" b")
			if !strings.Contains(p[0].Detail, "in use by other; the lease table has it reserved by \"a\"") || !strings.Contains(p[1].Detail, "b and twin") {
				t.Errorf("details %q, %q", p[0].Detail, p[1].Detail)
			}
			time.Sleep(ReconcileInterval)
		}
		if !slices.Equal(before, b.List()) || testutil.ToFloat64(r.metrics.conflicts) != 2 {
			t.Errorf("leases %v, before %v", b.List(), before)
		}
		m.live = m.live[1:2]
		wantRepairs(t, r)
		if testutil.ToFloat64(r.metrics.conflicts) != 0 {
			t.Error("conflicts are still counted")
		}
	})
}

// TestOwnerUsesOtherAddress has an owner at another address than its lease: the lease is released
// after the misses, then the owner gets its address.
func TestOwnerUsesOtherAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{}
		b := open(t, newMemory(), "10.0.0.0/29")
		stale := reserve(t, b, "a")
		m.runs("a", "10.0.0.6")
		r := reconciler(t, b, m)
		for range 2 {
			wantRepairs(t, r, "conflict 10.0.0.6 a")
			time.Sleep(ReconcileInterval)
		}
		wantRepairs(t, r, "released "+stale.String()+" a", "reclaimed 10.0.0.6 a")
		wantRepairs(t, r)
	})
}

func TestUnknownUserIsQuarantined(t *testing.T) {
	m := &machine{}
	b := open(t, newMemory(), "10.0.0.0/29")
	cooling, held := reserve(t, b, "a"), reserve(t, b, "b")
	if err := b.Release("a", cooling); err != nil {
		t.Fatal(err)
	}
	for _, addr := range []string{cooling.String(), held.String(), "10.0.0.1", "10.0.0.6", "10.7.7.7"} {
		m.live = append(m.live, InUse{Address: netip.MustParseAddr(addr), Where: "neighbour of the bridge"})
	}
	r := reconciler(t, b, m)
	wantRepairs(t, r, "quarantined 10.0.0.6") // the others are leased, cooling or excluded
	if l, _ := b.At(netip.MustParseAddr("10.0.0.6")); l.State != Quarantined || !strings.Contains(l.Reason, "neighbour of the bridge") {
		t.Errorf("lease %+v", l)
	}
	wantRepairs(t, r)
}

func TestIncompleteListChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{fail: fmt.Errorf("containerd unavailable: %w", errs.ErrUnavailable)}
		b := open(t, newMemory(), "10.0.0.0/29")
		reserve(t, b, "a")
		m.runs("b", "10.0.0.6")
		before := b.List()
		r := reconciler(t, b, m)
		for range 5 {
			if repairs, err := r.Reconcile(t.Context()); len(repairs) != 0 || !errors.Is(err, m.fail) {
				t.Fatalf("repairs %v, error %v", repairs, err)
			}
			time.Sleep(ReconcileInterval)
		}
		if !slices.Equal(before, b.List()) || len(missesOf(r)) != 0 || len(m.repairs) != 0 {
			t.Errorf("leases %v, misses %v, repairs %v", b.List(), missesOf(r), m.repairs)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		m.fail = nil
		if _, err := r.Reconcile(ended); !errors.Is(err, context.Canceled) || len(m.repairs) != 0 {
			t.Errorf("with a context that has ended: %v", err)
		}
	})
}

// TestChangesDuringReconcile changes leases between the allocator's list and the host's.
func TestChangesDuringReconcile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := &machine{}
		b := open(t, newMemory(), "10.0.0.0/28")
		leaving, late := reserve(t, b, "leaving"), reserve(t, b, "late")
		m.live = []InUse{{Address: leaving, Owner: "leaving"}} // it is still being removed
		r := reconciler(t, b, m)
		wantRepairs(t, r)
		time.Sleep(ReconcileInterval)
		wantRepairs(t, r)
		time.Sleep(ReconcileInterval)
		m.beforeList = func() {
			if err := errors.Join(b.Release("leaving", leaving), b.Hold("late", late)); err != nil {
				t.Error(err)
			}
			m.live = append(m.live, InUse{Address: reserve(t, b, "new")}) // known by its neighbour entry only
		}
		wantRepairs(t, r)
		if l, ok := b.Of("late"); !ok || l.State != Held {
			t.Errorf("released from a new owner: %+v", l)
		}
		if _, ok := b.Of("leaving"); ok {
			t.Error("claimed for a released owner")
		}
		if l, ok := b.Of("new"); !ok || l.State != Reserved {
			t.Errorf("released from a new reservation: %+v", l)
		}
	})
}

// TestOwnerDuringReconcileOnly has an owner that exists during the comparison only.
func TestOwnerDuringReconcileOnly(t *testing.T) {
	b := open(t, newMemory(), "10.0.0.0/28")
	m := &machine{}
	m.beforeList = func() {
		addr := reserve(t, b, "a")
		m.live = []InUse{{Address: addr, Owner: "a"}}
		if err := errors.Join(b.Hold("a", addr), b.Release("a", addr)); err != nil {
			t.Error(err)
		}
	}
	r := reconciler(t, b, m)
	wantRepairs(t, r)
	if l, ok := b.Of("a"); ok {
		t.Errorf("released owner has %+v", l)
	}
}

func TestRunReconcilesPeriodically(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		runs := 0
		m := &machine{beforeList: func() { runs++ }}
		r := reconciler(t, open(t, newMemory(), "10.0.0.0/28"), m)
		ctx, cancel := context.WithTimeout(t.Context(), 3*ReconcileInterval+time.Second)
		defer cancel()
		if err := r.Run(ctx); err != nil || runs != 3 {
			t.Errorf("%d runs, %v", runs, err)
		}
	})
}

// TestReconcileAfterDivergence boots with a lease table on disk that has missing and surplus
// leases.
func TestReconcileAfterDivergence(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases.db")
	db, store := openBolt(t, path)
	b := open(t, store, "10.0.0.0/24")
	m := &machine{}
	for i := range 20 {
		owner := fmt.Sprint(i)
		addr := reserve(t, b, owner)
		if i%2 == 0 {
			m.runs(owner, addr.String())
		}
		if i%4 == 0 { // runs without a lease
			if err := store.Apply(Row{Subnet: "10.0.0.0/24", Key: []byte(addr.String())}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	db, store = openBolt(t, path)
	defer func() { _ = db.Close() }()
	b = open(t, store, "10.0.0.0/24", func(c *Config) { c.CoolDown = 0 })
	r, err := NewReconciler(ReconcilerConfig{Allocator: b, Live: m.list, Log: slog.New(slog.DiscardHandler), Every: 1})
	if err != nil {
		t.Fatal(err)
	}
	got, err := r.Reconcile(t.Context())
	if err != nil || len(got) != 5 {
		t.Errorf("repaired %v, %v", got, err)
	}
	inUse := map[netip.Addr]bool{}
	for _, l := range m.live {
		inUse[l.Address] = true
	}
	for range 2 {
		if _, err := r.Reconcile(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.Counts()[0]; n.Held+n.Reserved != 10 {
		t.Errorf("counts %+v, want the ten in use", n)
	}
	for i := range 243 {
		if addr := reserve(t, b, "new "+fmt.Sprint(i)); inUse[addr] {
			t.Fatalf("leased %s, which is in use", addr)
		}
	}
}

func TestLeasesAreCounted(t *testing.T) {
	b := open(t, newMemory(), "10.0.0.0/29")
	reserve(t, b, "a")
	registry := prometheus.NewRegistry()
	m := &machine{}
	m.runs("z", "172.30.0.1")
	cfg := ReconcilerConfig{Allocator: b, Live: m.list, Log: slog.New(slog.DiscardHandler), Metrics: registry}
	r, err := NewReconciler(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Reconcile(t.Context()); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, v := range f.GetMetric() {
			if f.GetName() == "barchan_ipam_addresses" && v.GetGauge().GetValue() > 0 {
				got[v.GetLabel()[1].GetValue()+" "+v.GetLabel()[0].GetValue()] = v.GetGauge().GetValue()
			}
		}
	}
	if want := map[string]float64{"10.0.0.0/29 reserved": 1, "10.0.0.0/29 free": 4, "0.0.0.0/0 held": 1}; !maps.Equal(got, want) {
		t.Errorf("counted %v, want %v", got, want)
	}
	if _, err := NewReconciler(cfg); err == nil {
		t.Error("metrics registered twice")
	}
	if _, err := NewReconciler(ReconcilerConfig{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("empty configuration: %v", err)
	}
}
