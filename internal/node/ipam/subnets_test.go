package ipam

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestSpaceAgainstScan(t *testing.T) {
	for _, prefix := range []string{"10.0.0.0/30", "10.0.0.64/26", "10.0.0.0/25", "10.4.0.0/19"} {
		p := netip.MustParsePrefix(prefix)
		s := newSpace(p)
		random := rand.New(rand.NewPCG(1, uint64(p.Bits())))
		taken := make([]bool, s.size)
		walk := func(from uint32) (uint32, bool) {
			for i := range s.size {
				if at := (from + 1 + i) % s.size; !taken[at] {
					return at, true
				}
			}
			return 0, false
		}
		for i := range 3000 {
			at := random.Uint32N(s.size)
			taken[at] = random.IntN(50) != 0 // nearly full
			s.set(at, taken[at])
			from := random.Uint32N(s.size)
			want, ok := walk(from)
			if got, found := s.follow(from); found != ok || got != want {
				t.Fatalf("%s, %d: after %d follows %d, %v; want %d, %v", p, i, from, got, found, want, ok)
			}
		}
		free := 0
		for at := range s.size {
			if addr := s.addr(at); s.offset(addr) != at || !p.Contains(addr) {
				t.Fatalf("%s: address %s at %d", p, addr, at)
			}
			if !taken[at] {
				free++
			}
		}
		if s.free != free {
			t.Errorf("%s: %d free, want %d", p, s.free, free)
		}
	}
}

func TestEachAddressIsLeasedOnce(t *testing.T) {
	b := open(t, newMemory(), "10.3.0.0/22")
	seen := map[netip.Addr]bool{}
	for i := range 1021 {
		addr := reserve(t, b, fmt.Sprint(i))
		if seen[addr] || !b.Subnet().Contains(addr) {
			t.Fatalf("%s is not new", addr)
		}
		seen[addr] = true
	}
	rows := len(b.cfg.Store.(*memory).rows)
	_, err := b.Reserve("surplus")
	if !errors.Is(err, errs.ErrExhausted) || !strings.Contains(err.Error(), "no free address in 10.3.0.0/22: 0 held, 1021 reserved, 0 cooling down for 1m0s after use, 0 quarantined, 1 excluded") {
		t.Errorf("error %v", err)
	}
	if n := b.Counts()[0]; n.Free != 0 || n.Reserved != 1021 || n.Total != 1022 || len(b.cfg.Store.(*memory).rows) != rows {
		t.Errorf("counts %+v, rows %d and before %d", n, len(b.cfg.Store.(*memory).rows), rows)
	}
}

func TestBeside(t *testing.T) {
	v4 := netip.MustParseAddr("10.87.1.2")
	for prefix, want := range map[string]string{
		"fd00:1::/64": "fd00:1::a57:102", "fd00:1:2:3:4:5::/96": "fd00:1:2:3:4:5:a57:102", "fd00::/97": "invalid IP", "10.0.0.0/8": "invalid IP",
	} {
		if got := Beside(netip.MustParsePrefix(prefix), v4); got.String() != want {
			t.Errorf("IPv6 in %s: %s, want %s", prefix, got, want)
		}
	}
	if got := Beside(netip.Prefix{}, v4); got.IsValid() {
		t.Errorf("IPv6 without a prefix: %s", got)
	}
}

func TestCoolDownAcrossRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newMemory()
		b := open(t, store, "10.0.0.0/30")
		addr := reserve(t, b, "a")
		if err := b.Release("a", addr); err != nil {
			t.Fatal(err)
		}
		time.Sleep(40 * time.Second)
		b = open(t, store, "10.0.0.0/30")
		if until, ok := b.CoolingUntil(addr); !ok || time.Until(until) != 20*time.Second {
			t.Errorf("cools for another %s, %v", time.Until(until), ok)
		}
		time.Sleep(20*time.Second - 1)
		if _, err := b.Reserve("b"); !errors.Is(err, errs.ErrExhausted) {
			t.Errorf("too early: %v", err)
		}
		time.Sleep(time.Nanosecond)
		if _, cools := b.CoolingUntil(addr); cools || len(b.List()) != 0 || b.Counts()[0].Free != 1 {
			t.Errorf("cool-down over, but %v, %+v", b.List(), b.Counts())
		}
		if got := reserve(t, b, "b"); got != addr {
			t.Errorf("got %s", got)
		}
	})
}

// TestEachReleaseCoolsInFull reuses an address and releases it again: the second cool-down is
// complete.
func TestEachReleaseCoolsInFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := open(t, newMemory(), "10.0.0.0/30")
		addr := reserve(t, b, "a")
		if err := b.Release("a", addr); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Second)
		if err := errors.Join(b.Claim("b", addr), b.Release("b", addr)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(59 * time.Second)
		if _, err := b.Reserve("c"); !errors.Is(err, errs.ErrExhausted) || b.Counts()[0].Free != 0 {
			t.Errorf("too early: %v, %+v", err, b.Counts())
		}
		time.Sleep(time.Second)
		if got := reserve(t, b, "c"); got != addr {
			t.Errorf("got %s", got)
		}
	})
}

// TestClockJump has a row with a time from a clock that was then changed.
func TestClockJump(t *testing.T) {
	for name, tt := range map[string]struct{ jump, want time.Duration }{
		"set back by a year":    {-365 * 24 * time.Hour, time.Minute},
		"set back by 10 s":      {-10 * time.Second, time.Minute}, // released just now
		"set ahead by 10 s":     {10 * time.Second, 50 * time.Second},
		"set ahead by a year":   {365 * 24 * time.Hour, 0},
		"set back by centuries": {-250 * 365 * 24 * time.Hour, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				addr := netip.MustParseAddr("10.0.0.2")
				row, err := encode(Lease{Address: addr, State: Cooling, Since: time.Now().Add(-tt.jump)})
				if err != nil {
					t.Fatal(err)
				}
				b := open(t, &memory{rows: map[string]string{"10.0.0.0/30 10.0.0.2": string(row)}}, "10.0.0.0/30")
				if tt.want > 0 {
					time.Sleep(tt.want - 1)
					if _, err := b.Reserve("a"); !errors.Is(err, errs.ErrExhausted) {
						t.Errorf("too early: %v", err)
					}
					time.Sleep(time.Nanosecond)
				}
				if got := reserve(t, b, "a"); got != addr {
					t.Errorf("got %s", got)
				}
			})
		})
	}
}

func TestExpiredRowsAreDeleted(t *testing.T) {
	store := newMemory()
	b := open(t, store, "10.0.0.0/24", func(c *Config) { c.CoolDown = 0 })
	for i := range 100 {
		owner := fmt.Sprint(i)
		if err := b.Release(owner, reserve(t, b, owner)); err != nil {
			t.Fatal(err)
		}
	}
	reserve(t, b, "last")
	if len(store.rows) > 2 {
		t.Errorf("%d rows for one lease", len(store.rows))
	}
	if addr := reserve(t, open(t, store, "10.0.0.0/24"), "next"); addr != netip.MustParseAddr("10.0.0.103") {
		t.Errorf("after a restart the next is %s, want the one released first", addr)
	}
}

func TestSubnetChange(t *testing.T) {
	store := newMemory()
	old := open(t, store, "10.1.0.0/24")
	live, released, half := reserve(t, old, "live"), reserve(t, old, "released"), reserve(t, old, "half made")
	if err := errors.Join(old.Hold("live", live), old.Hold("released", released)); err != nil {
		t.Fatal(err)
	}
	b := open(t, store, "10.2.0.0/24")
	if l, ok := b.Of("live"); !ok || l.Address != live || l.State != Held {
		t.Errorf("lease in the old subnet: %+v, %v", l, ok)
	}
	if err := errors.Join(b.Claim("live", live), b.Release("released", released)); err != nil {
		t.Error(err)
	}
	addr := reserve(t, b, "half made") // its create is retried in the new subnet
	if !b.Subnet().Contains(addr) {
		t.Errorf("got %s", addr)
	}
	want := []Counts{
		{Subnet: b.Subnet(), Current: true, Total: 254, Excluded: 1, Free: 252, Reserved: 1},
		{Subnet: old.Subnet(), Held: 1, Cooling: 2},
	}
	if got := b.Counts(); !slices.Equal(got, want) {
		t.Errorf("counts %+v, want %+v", got, want)
	}
	if l, ok := b.At(half); !ok || l.State != Cooling {
		t.Errorf("the old address is %+v", l)
	}
	if err := b.Claim("unknown", netip.MustParseAddr("10.1.0.200")); err != nil {
		t.Error(err)
	}
	if _, there := store.rows["10.1.0.0/24 10.1.0.200"]; !there {
		t.Errorf("rows %q", slices.Collect(maps.Keys(store.rows)))
	}
	if err := b.Claim("lost", netip.MustParseAddr("10.9.0.9")); err != nil { // in no known subnet
		t.Error(err)
	}
	if _, there := store.rows["0.0.0.0/0 10.9.0.9"]; !there {
		t.Errorf("rows %q", slices.Collect(maps.Keys(store.rows)))
	}
}

// TestWiderSubnet has leases of a subnet inside the configured one.
func TestWiderSubnet(t *testing.T) {
	store := newMemory()
	old := open(t, store, "10.1.0.0/29")
	for i := range 4 {
		reserve(t, old, fmt.Sprint(i))
	}
	if err := old.Release("3", netip.MustParseAddr("10.1.0.5")); err != nil {
		t.Fatal(err)
	}
	b := open(t, store, "10.1.0.0/28")
	seen := map[netip.Addr]bool{}
	for i := range 8 {
		seen[reserve(t, b, "new "+fmt.Sprint(i))] = true
	}
	if len(seen) != 8 || seen[netip.MustParseAddr("10.1.0.2")] || seen[netip.MustParseAddr("10.1.0.5")] {
		t.Errorf("leased %v", seen)
	}
	if err := b.Hold("0", netip.MustParseAddr("10.1.0.2")); err != nil {
		t.Error(err)
	}
	if _, there := store.rows["10.1.0.0/29 10.1.0.2"]; there || store.rows["10.1.0.0/28 10.1.0.2"] == "" {
		t.Error("row still in the old subnet's bucket")
	}
	if got := open(t, store, "10.1.0.0/28").Counts(); len(got) != 1 || got[0].Reserved != 10 || got[0].Held != 1 || got[0].Cooling != 1 {
		t.Errorf("counts %+v", got)
	}
}

// TestOwnerWithTwoLeases loads the result of a write that failed but was stored.
func TestOwnerWithTwoLeases(t *testing.T) {
	store := newMemory()
	since := time.Now()
	for addr, state := range map[string]State{"10.0.0.2": Reserved, "10.0.0.3": Held, "10.0.0.4": Reserved} {
		row, err := encode(Lease{Address: netip.MustParseAddr(addr), Owner: "a", State: state, Since: since})
		if err != nil {
			t.Fatal(err)
		}
		store.rows["10.0.0.0/29 "+addr] = string(row)
	}
	b := open(t, store, "10.0.0.0/29")
	if l, ok := b.Of("a"); !ok || l.Address != netip.MustParseAddr("10.0.0.3") {
		t.Errorf("lease %+v, %v; want the held one", l, ok)
	}
	if n := b.Counts()[0]; n.Held != 1 || n.Reserved != 2 {
		t.Errorf("counts %+v", n)
	}
	if err := b.Release("a", netip.MustParseAddr("10.0.0.2")); err != nil {
		t.Error(err)
	}
	if l, ok := b.Of("a"); !ok || l.State != Held {
		t.Errorf("lease %+v, %v after the release of another", l, ok)
	}
}

func TestExcludedIsNeverLeased(t *testing.T) {
	b := open(t, newMemory(), "10.0.0.0/30", func(c *Config) { c.CoolDown = 0 })
	for range 3 {
		for _, out := range []string{"10.0.0.0", "10.0.0.1", "10.0.0.3"} { // with a lease for a while
			addr := netip.MustParseAddr(out)
			if err := errors.Join(b.Claim("x", addr), b.Release("x", addr)); err != nil {
				t.Fatal(err)
			}
		}
		addr := reserve(t, b, "a")
		if addr != netip.MustParseAddr("10.0.0.2") {
			t.Fatalf("got %s", addr)
		}
		if _, err := b.Reserve("b"); !errors.Is(err, errs.ErrExhausted) {
			t.Errorf("error %v", err)
		}
		if err := b.Release("a", addr); err != nil {
			t.Error(err)
		}
		if n := b.Counts()[0]; n.Free != 1 {
			t.Errorf("counts %+v", n)
		}
	}
}

// FuzzOpen loads an arbitrary row. Free addresses must stay available, and other and unreadable
// rows unchanged.
func FuzzOpen(f *testing.F) {
	good, _ := encode(Lease{Address: netip.MustParseAddr("10.0.0.2"), Owner: "a", State: Held})
	f.Add("10.0.0.0/29", []byte("10.0.0.2"), good)
	f.Add("10.0.0.0/28", []byte("10.0.0.2"), good)
	f.Add("", []byte("10.0.0.2"), []byte("{"))
	f.Fuzz(func(t *testing.T, subnet string, key, value []byte) {
		if strings.Contains(subnet, " ") {
			return
		}
		place := subnet + " " + string(key)
		store := &memory{rows: map[string]string{place: string(value)}}
		b, err := Open(Config{Subnet: netip.MustParsePrefix("10.0.0.0/29"), Store: store, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		b.Counts()
		owners := map[string]bool{}
		for _, l := range b.List() {
			owners[l.Owner] = true
		}
		unread := b.Unread()
		for i := range 3 {
			owner := fmt.Sprint("owner ", i)
			addr, err := b.Reserve(owner)
			if err != nil {
				t.Fatal(err)
			}
			if len(unread) > 0 && addr.String() == string(key) {
				t.Errorf("leased %s", addr)
			}
		}
		if len(unread) > 0 && (store.rows[place] != string(value) || !bytes.Equal(unread[0].Value, value)) {
			t.Errorf("row became %q", store.rows[place])
		}
		if !json.Valid(value) && len(unread) != 1 {
			t.Errorf("read %q", value)
		}
	})
}
