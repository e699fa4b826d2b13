package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/barchan-dev/barchan/internal/errs"
)

// memory is a store that can be told to fail.
type memory struct {
	rows map[string]string
	fail error
}

func (m *memory) Each(visit func(key, value []byte) error) error {
	for _, k := range slices.Sorted(maps.Keys(m.rows)) {
		if err := visit([]byte(k), []byte(m.rows[k])); err != nil {
			return err
		}
	}
	return nil
}

func (m *memory) Apply(changes ...Change) error {
	if m.fail != nil {
		return m.fail
	}
	for _, c := range changes {
		if c.Value == nil {
			delete(m.rows, string(c.Key))
		} else {
			m.rows[string(c.Key)] = string(c.Value)
		}
	}
	return nil
}

func open(t *testing.T, store Store, subnet string, change ...func(*Config)) *Books {
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

func reserve(t *testing.T, b *Books, owner string) netip.Addr {
	t.Helper()
	addr, err := b.Reserve(owner)
	if err != nil {
		t.Fatalf("reserve for %s: %v", owner, err)
	}
	return addr
}

func TestReserveTwiceIsOneAddressAlsoAfterARestart(t *testing.T) {
	store := &memory{rows: map[string]string{}}
	b := open(t, store, "10.0.0.0/29")
	addr := reserve(t, b, "a")
	if again := reserve(t, b, "a"); again != addr {
		t.Errorf("second reservation %s, first %s", again, addr)
	}
	b = open(t, store, "10.0.0.0/29")
	if again := reserve(t, b, "a"); again != addr {
		t.Errorf("after a restart %s, before %s", again, addr)
	}
	if other := reserve(t, b, "b"); other == addr {
		t.Errorf("two owners have %s", addr)
	}
}

func TestOnlyTheOwnerReleases(t *testing.T) {
	b := open(t, &memory{rows: map[string]string{}}, "10.0.0.0/29")
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

func TestCoolDownIsNeverBypassed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := open(t, &memory{rows: map[string]string{}}, "10.0.0.0/30", func(c *Config) { c.Excluded = nil })
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
	b := open(t, &memory{rows: map[string]string{}}, "10.0.0.0/29", func(c *Config) { c.CoolDown = 0 })
	addr := reserve(t, b, "a")
	for range 2 {
		if err := b.Quarantine(addr, "somebody answers"); err != nil {
			t.Fatal(err)
		}
	}
	if other := reserve(t, b, "a"); other == addr {
		t.Errorf("the owner got the quarantined %s again", addr)
	}
	if err := b.Release("a", addr); err != nil {
		t.Errorf("release of what was lost: %v", err)
	}
	if err := b.Free(addr); err != nil {
		t.Error(err)
	}
	if err := b.Free(addr); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("free of what is free: %v", err)
	}
}

func TestClaimOfALiveOwner(t *testing.T) {
	store := &memory{rows: map[string]string{}}
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
	if err := b.Claim("c", netip.MustParseAddr("10.9.9.9")); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("claim of a foreign address: %v", err)
	}
	if l, ok := open(t, store, "10.0.0.0/29").Of("a"); !ok || l.State != Held || l.Address != addr {
		t.Errorf("after a restart: %+v, %v", l, ok)
	}
}

func TestUnreadableRowsAreLoggedAndKept(t *testing.T) {
	var logged strings.Builder
	rows := map[string]string{
		"10.0.0.2": "{not json", "junk": "\xff\x00", "10.0.0.3": `{"address":"10.0.0.3","state":"held"}`,
		"10.0.0.4": `{"address":"10.0.0.5","owner":"x","state":"held"}`, "10.0.0.6": `{"address":"10.0.0.6","owner":"a","state":"held"}`,
	}
	store := &memory{rows: maps.Clone(rows)}
	b := open(t, store, "10.0.0.0/29", func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&logged, nil)) })
	if addr := reserve(t, b, "b"); addr != netip.MustParseAddr("10.0.0.5") {
		t.Errorf("got %s, want the only one that no row may mean", addr)
	}
	if _, err := b.Reserve("c"); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("error %v", err)
	}
	if !strings.Contains(logged.String(), "{not json") || !strings.Contains(logged.String(), "junk") {
		t.Errorf("log lacks the rows: %s", logged.String())
	}
	for k, v := range rows {
		if store.rows[k] != v {
			t.Errorf("row %q became %q", k, store.rows[k])
		}
	}
}

func TestFailingStoreChangesNothing(t *testing.T) {
	store := &memory{rows: map[string]string{}}
	b := open(t, store, "10.0.0.0/29")
	addr := reserve(t, b, "a")
	store.fail = errors.New("disk full")
	if _, err := b.Reserve("b"); !errors.Is(err, store.fail) {
		t.Errorf("reserve: %v", err)
	}
	if err := b.Release("a", addr); !errors.Is(err, store.fail) {
		t.Errorf("release: %v", err)
	}
	if l, ok := b.Of("a"); !ok || l.Address != addr {
		t.Error("a release that was not written took effect")
	}
	store.fail = nil
	if other := reserve(t, b, "b"); other == addr {
		t.Error("an address has two owners")
	}
}

func TestOpenRefuses(t *testing.T) {
	for name, cfg := range map[string]Config{
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
		if err := store.Apply(Change{Key: []byte("none")}); err != nil {
			t.Error(err)
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// model is the rule in few words: one owner per address, one address per owner, rest after use.
type model struct {
	owner  map[netip.Addr]string
	rested map[netip.Addr]time.Time
	out    map[netip.Addr]bool
}

func (m *model) of(owner string) (netip.Addr, bool) {
	for a, o := range m.owner {
		if o == owner {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// TestAgainstModel drives books and model with the same random calls, and opens the books
// anew now and then, as after a crash.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			store := &memory{rows: map[string]string{}}
			b := open(t, store, "10.0.0.0/28")
			m := &model{owner: map[netip.Addr]string{}, rested: map[netip.Addr]time.Time{}, out: map[netip.Addr]bool{}}
			for i := range 400 {
				owner := fmt.Sprint(random.IntN(18))
				what := fmt.Sprintf("seed %d, call %d, owner %s", seed, i, owner)
				switch random.IntN(7) {
				case 0, 1:
					m.reserve(t, b, owner, what)
				case 2, 3:
					m.release(t, b, owner, what, random)
				case 4:
					time.Sleep(time.Duration(random.IntN(30)) * time.Second)
				case 5:
					if addr, ok := m.of(owner); ok && random.IntN(8) == 0 {
						if err := b.Quarantine(addr, "test"); err != nil {
							t.Fatal(err)
						}
						delete(m.owner, addr)
						m.out[addr] = true
					}
				default:
					b = open(t, store, "10.0.0.0/28")
				}
				m.compare(t, b, what)
			}
		})
	}
}

func (m *model) reserve(t *testing.T, b *Books, owner, what string) {
	addr, err := b.Reserve(owner)
	if have, ok := m.of(owner); ok {
		if err != nil || addr != have {
			t.Fatalf("%s: reserved %s, %v, has %s", what, addr, err, have)
		}
		return
	}
	free := 0
	for i := byte(2); i < 15; i++ {
		a := netip.AddrFrom4([4]byte{10, 0, 0, i})
		if m.owner[a] == "" && !m.out[a] && time.Now().Compare(m.rested[a]) >= 0 {
			free++
		}
	}
	if (err == nil) != (free > 0) {
		t.Fatalf("%s: error %v with %d free", what, err, free)
	}
	if err != nil {
		return
	}
	if m.owner[addr] != "" || m.out[addr] || time.Now().Before(m.rested[addr]) {
		t.Fatalf("%s: got %s, which is not free", what, addr)
	}
	m.owner[addr] = owner
}

func (m *model) release(t *testing.T, b *Books, owner, what string, random *rand.Rand) {
	addr := netip.AddrFrom4([4]byte{10, 0, 0, byte(2 + random.IntN(13))})
	err := b.Release(owner, addr)
	if holder := m.owner[addr]; (holder != "" && holder != owner) != (err != nil) {
		t.Fatalf("%s: release %s of %q: %v", what, addr, holder, err)
	}
	if m.owner[addr] == owner {
		delete(m.owner, addr)
		m.rested[addr] = time.Now().Add(time.Minute)
	}
}

func (m *model) compare(t *testing.T, b *Books, what string) {
	got := map[netip.Addr]string{}
	for _, l := range b.List() {
		if l.Owner != "" {
			got[l.Address] = l.Owner
		}
	}
	if !maps.Equal(got, m.owner) {
		t.Fatalf("%s: books %v, model %v", what, got, m.owner)
	}
}

func FuzzDecode(f *testing.F) {
	good, _ := json.Marshal(Lease{Address: netip.MustParseAddr("10.0.0.2"), Owner: "a", State: Held})
	f.Add([]byte("10.0.0.2"), good)
	f.Add([]byte("x"), []byte("{"))
	f.Fuzz(func(t *testing.T, key, value []byte) {
		l, err := decode(key, value)
		if err == nil && (l.Address.String() != string(key) || (l.Owner == "") == (l.State == Held)) {
			t.Errorf("decoded %+v from key %q", l, key)
		}
	})
}
