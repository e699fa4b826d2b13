package ipam

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// memory is a store with injected failures. A row's place is its subnet and its key.
type memory struct {
	rows map[string]string
	fail error
	late bool // it fails after the write
}

func newMemory() *memory { return &memory{rows: map[string]string{}} }

func (m *memory) Each(visit func(Row) error) error {
	for _, k := range slices.Sorted(maps.Keys(m.rows)) {
		subnet, key, _ := strings.Cut(k, " ")
		if err := visit(Row{subnet, []byte(key), []byte(m.rows[k])}); err != nil {
			return err
		}
	}
	return nil
}

func (m *memory) Apply(changes ...Row) error {
	if m.fail != nil && !m.late {
		return m.fail
	}
	for _, c := range changes {
		place := c.Subnet + " " + string(c.Key)
		if c.Value == nil {
			delete(m.rows, place)
		} else {
			m.rows[place] = string(c.Value)
		}
	}
	return m.fail
}

func open(t *testing.T, store Store, subnet string, change ...func(*Config)) *Allocator {
	t.Helper()
	cfg := Config{Subnet: netip.MustParsePrefix(subnet), CoolDown: time.Minute, Store: store, Log: slog.New(slog.DiscardHandler)}
	cfg.Excluded = []netip.Addr{cfg.Subnet.Masked().Addr().Next()}
	for _, c := range change {
		c(&cfg)
	}
	b, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func reserve(t *testing.T, b *Allocator, owner string) netip.Addr {
	t.Helper()
	addr, err := b.Reserve(owner)
	if err != nil {
		t.Fatalf("reserve for %s: %v", owner, err)
	}
	return addr
}

func TestReserveIsIdempotentAcrossRestart(t *testing.T) {
	store := newMemory()
	b := open(t, store, "10.0.0.0/29")
	addr := reserve(t, b, "a")
	if again := reserve(t, b, "a"); again != addr {
		t.Errorf("second reservation %s, first %s", again, addr)
	}
	b = open(t, store, "10.0.0.0/29")
	if again := reserve(t, b, "a"); again != addr {
		t.Errorf("after a restart %s, want %s", again, addr)
	}
	if other := reserve(t, b, "b"); other == addr {
		t.Errorf("two owners have %s", addr)
	}
}

func TestOnlyOwnerReleases(t *testing.T) {
	b := open(t, newMemory(), "10.0.0.0/29")
	addr := reserve(t, b, "a")
	if err := b.Hold("b", addr); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("hold by another: %v", err)
	}
	if err := b.Release("b", addr); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("release by another: %v", err)
	}
	if err := b.Hold("a", addr); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := b.Release("a", addr); err != nil {
			t.Error(err)
		}
	}
	if _, ok := b.Of("a"); ok {
		t.Error("the owner has a lease after its release")
	}
}

func TestCoolDownIsEnforced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := open(t, newMemory(), "10.0.0.0/30", func(c *Config) { c.Excluded = nil })
		first := reserve(t, b, "a")
		second := reserve(t, b, "b")
		if first == second {
			t.Fatal("one address twice")
		}
		if err := b.Release("a", first); err != nil {
			t.Fatal(err)
		}
		if err := b.Quarantine(second, "test"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute - time.Nanosecond)
		_, err := b.Reserve("c")
		if !errors.Is(err, errs.ErrExhausted) || !strings.Contains(err.Error(), "1 cooling down") || !strings.Contains(err.Error(), "1 quarantined") {
			t.Errorf("error %v, want exhausted with counts", err)
		}
		time.Sleep(time.Nanosecond)
		if addr := reserve(t, b, "c"); addr != first {
			t.Errorf("got %s, want the rested %s", addr, first)
		}
	})
}

func TestQuarantineAndFree(t *testing.T) {
	b := open(t, newMemory(), "10.0.0.0/29", func(c *Config) { c.CoolDown = 0 })
	addr := reserve(t, b, "a")
	for range 2 {
		if err := b.Quarantine(addr, "unknown host answers"); err != nil {
			t.Fatal(err)
		}
	}
	if other := reserve(t, b, "a"); other == addr {
		t.Errorf("the owner got quarantined %s again", addr)
	}
	if err := b.Release("a", addr); err != nil {
		t.Errorf("release of what was lost: %v", err)
	}
	if err := b.Free(addr); err != nil {
		t.Error(err)
	}
	if err := b.Free(addr); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("free of a free address: %v", err)
	}
}

func TestClaim(t *testing.T) {
	store := newMemory()
	b := open(t, store, "10.0.0.0/29")
	addr := netip.MustParseAddr("10.0.0.4")
	for range 2 {
		if err := b.Claim("a", addr); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Claim("b", addr); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("claim of another's: %v", err)
	}
	if err := b.Claim("a", addr.Next()); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("claim of a second address: %v", err)
	}
	for _, bad := range []string{"fd00::1", "0.0.0.0", "::ffff:10.0.0.5"} {
		if err := b.Claim("c", netip.MustParseAddr(bad)); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("claim of %s: %v", bad, err)
		}
	}
	for _, bad := range []string{"", "\xff"} {
		if _, err := b.Reserve(bad); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("reserve for %q: %v", bad, err)
		}
	}
	if l, ok := open(t, store, "10.0.0.0/29").Of("a"); !ok || l.State != Held || l.Address != addr {
		t.Errorf("after a restart: %+v, %v", l, ok)
	}
}

func TestUnreadableRowsAreKept(t *testing.T) {
	var logged strings.Builder
	rows := map[string]string{
		"10.0.0.0/29 10.0.0.2": "{not json", "10.0.0.0/29 junk": "\xff\x00", "10.0.0.0/29 10.0.0.3": `{"version":1,"address":"10.0.0.3","state":"held"}`,
		"10.0.0.0/29 10.0.0.4": `{"version":2,"address":"10.0.0.4","owner":"x","state":"held"}`, " stray": "",
		"10.9.0.0/16 10.0.0.5": `{"version":1,"address":"10.0.0.5","owner":"y","state":"held"}`,
		"10.0.0.0/29 10.0.0.6": `{"version":1,"address":"10.0.0.6","owner":"a","state":"held"}`,
	}
	store := &memory{rows: maps.Clone(rows)}
	b := open(t, store, "10.0.0.0/29", func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&logged, nil)) })
	if _, err := b.Reserve("c"); !errors.Is(err, errs.ErrExhausted) || !strings.Contains(err.Error(), "1 held, 0 reserved") || !strings.Contains(err.Error(), "4 quarantined") {
		t.Errorf("error %v", err)
	}
	if !strings.Contains(logged.String(), "{not json") || !strings.Contains(logged.String(), "junk") || len(b.Unread()) != 6 {
		t.Errorf("%d unread, log %s", len(b.Unread()), logged.String())
	}
	if !maps.Equal(rows, store.rows) {
		t.Errorf("rows became %q", store.rows)
	}
	// A running owner's claim and an operator's Free both replace an unreadable row.
	live, freed := netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.5")
	if err := errors.Join(b.Quarantine(live, "test"), b.Claim("c", live), b.Free(freed)); err != nil {
		t.Fatal(err)
	}
	if _, there := store.rows["10.9.0.0/16 10.0.0.5"]; there || len(b.Unread()) != 4 {
		t.Errorf("%d unread, rows %q", len(b.Unread()), store.rows)
	}
	if l, ok := open(t, store, "10.0.0.0/29").Of("c"); !ok || l.Address != live {
		t.Errorf("after a restart: %+v, %v", l, ok)
	}
}

func TestStoreFailureChangesNothing(t *testing.T) {
	store := newMemory()
	b := open(t, store, "10.0.0.0/29")
	addr := reserve(t, b, "a")
	rows, counts, leases := maps.Clone(store.rows), b.Counts(), b.List()
	store.fail = errors.New("disk full")
	if _, err := b.Reserve("b"); !errors.Is(err, store.fail) || !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("reserve: %v", err)
	}
	for what, err := range map[string]error{
		"hold": b.Hold("a", addr), "release": b.Release("a", addr), "claim": b.Claim("c", addr.Next()), "quarantine": b.Quarantine(addr, "test"),
	} {
		if !errors.Is(err, store.fail) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if !maps.Equal(rows, store.rows) || !slices.Equal(counts, b.Counts()) || !slices.Equal(leases, b.List()) {
		t.Errorf("unwritten change took effect: %v, %v, %q", b.Counts(), b.List(), store.rows)
	}
	store.fail = nil
	if other := reserve(t, b, "b"); other == addr {
		t.Error("an address has two owners")
	}
}

func TestOpenRefuses(t *testing.T) {
	for name, cfg := range map[string]Config{
		"IPv6":         {Subnet: netip.MustParsePrefix("fd00::/64"), Store: &memory{}, Log: slog.New(slog.DiscardHandler)},
		"wide subnet":  {Subnet: netip.MustParsePrefix("10.0.0.0/7"), Store: &memory{}, Log: slog.New(slog.DiscardHandler)},
		"no subnet":    {Store: &memory{}, Log: slog.New(slog.DiscardHandler)},
		"small subnet": {Subnet: netip.MustParsePrefix("10.0.0.0/31"), Store: &memory{}, Log: slog.New(slog.DiscardHandler)},
		"no store":     {Subnet: netip.MustParsePrefix("10.0.0.0/24"), Log: slog.New(slog.DiscardHandler)},
	} {
		if _, err := Open(cfg); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBoltStoreKeeps(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases.db")
	for round := range 2 {
		db, err := bolt.Open(path, 0o600, nil)
		if err != nil {
			t.Fatal(err)
		}
		store, err := NewBoltStore(db)
		if err != nil {
			t.Fatal(err)
		}
		b := open(t, store, "10.0.0.0/24")
		addr := reserve(t, b, "a")
		if addr != netip.MustParseAddr("10.0.0.2") {
			t.Errorf("round %d: %s", round, addr)
		}
		if err := store.Apply(Row{Key: []byte("none")}, Row{Subnet: "none", Key: []byte("none")}); err != nil {
			t.Error(err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	good, _ := encode(Lease{Address: netip.MustParseAddr("10.0.0.2"), Owner: "a", State: Held})
	f.Add([]byte("10.0.0.2"), good)
	f.Add([]byte("10.0.0.2"), []byte(`{"version":1,"address":"10.0.0.2","state":"quarantined","since":"2026-01-01T00:00:00Z","reason":"\u0000"}`))
	f.Add([]byte("x"), []byte("{"))
	f.Fuzz(func(t *testing.T, key, value []byte) {
		l, err := decode(key, value, rowVersion)
		if err != nil {
			return
		}
		if l.Address.String() != string(key) || (l.Owner != "") != (l.State == Held || l.State == Reserved) {
			t.Errorf("decoded %+v from key %q", l, key)
		}
		again, err := encode(l)
		if err != nil {
			t.Fatalf("encode %+v: %v", l, err)
		}
		if same, err := decode(key, again, rowVersion); err != nil || !same.Since.Equal(l.Since) || same.Owner != l.Owner || same.State != l.State || same.Reason != l.Reason {
			t.Errorf("%+v became %+v, %v", l, same, err)
		}
	})
}

func TestReserveUnused(t *testing.T) {
	b := open(t, newMemory(), "10.0.0.0/25")
	inUse := 2
	var asked []netip.Addr
	holder := func(_ context.Context, addr netip.Addr) (string, error) {
		if asked = append(asked, addr); len(asked) > inUse {
			return "", nil
		}
		return "another host", nil
	}
	got, err := b.ReserveUnused(t.Context(), "a", holder)
	if err != nil || len(asked) != 3 || got != asked[2] {
		t.Fatalf("ReserveUnused = %s, %v after %v", got, err, asked)
	}
	for _, addr := range asked[:2] {
		if l, _ := b.At(addr); l.State != Quarantined {
			t.Errorf("%s is %s, want quarantined", addr, l.State)
		}
	}
	if l, _ := b.Of("a"); l.Address != got || l.State != Reserved {
		t.Errorf("the owner has %+v, want %s", l, got)
	}
	inUse = 1000
	if _, err := b.ReserveUnused(t.Context(), "b", holder); !errors.Is(err, errs.ErrExhausted) || len(asked) != 3+maxConflicts {
		t.Errorf("with all in use: %v after %d, want an errs.ErrExhausted", err, len(asked)-3)
	}
	failed := errors.New("not listed")
	if _, err := b.ReserveUnused(t.Context(), "c", func(context.Context, netip.Addr) (string, error) { return "", failed }); !errors.Is(err, failed) {
		t.Errorf("without an answer: %v", err)
	}
}
