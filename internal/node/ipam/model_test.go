package ipam

import (
	"bufio"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	bolt "go.etcd.io/bbolt"
)

const modelSubnet = "10.0.0.0/28"

// model is the specification: one owner per address, one address per owner, cool-down after use.
type model struct {
	owner   map[netip.Addr]string
	cooling map[netip.Addr]time.Time
	out     map[netip.Addr]bool
}

type call struct {
	do, owner string
	addr      netip.Addr
}

func modelAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(2 + i%13)}) }

func (m *model) of(owner string) (addr netip.Addr, ok bool) {
	for a, o := range m.owner {
		if o == owner {
			return a, true
		}
	}
	return addr, false
}

func (m *model) free(addr netip.Addr) bool {
	return m.owner[addr] == "" && !m.out[addr] && !time.Now().Before(m.cooling[addr])
}

func (m *model) allows(c call) bool {
	has, owns := m.of(c.owner)
	holder := m.owner[c.addr]
	switch c.do {
	case "reserve":
		for i := range 13 {
			owns = owns || m.free(modelAddr(i))
		}
		return owns
	case "hold":
		return holder == c.owner
	case "claim":
		return (holder == "" || holder == c.owner) && (!owns || has == c.addr)
	case "release":
		return holder == "" || holder == c.owner
	case "free":
		return m.out[c.addr]
	}
	return true // quarantine
}

func (m *model) apply(c call) {
	switch {
	case c.do == "reserve", c.do == "claim":
		m.owner[c.addr] = c.owner
		delete(m.out, c.addr)
		delete(m.cooling, c.addr)
	case c.do == "quarantine":
		delete(m.owner, c.addr)
		delete(m.cooling, c.addr)
		m.out[c.addr] = true
	case c.do == "free", c.do == "release" && m.owner[c.addr] == c.owner:
		delete(m.owner, c.addr)
		delete(m.out, c.addr)
		m.cooling[c.addr] = time.Now().Add(time.Minute)
	}
}

func (m *model) compare(b *Allocator) error {
	owner, out, cooling := map[netip.Addr]string{}, map[netip.Addr]bool{}, map[netip.Addr]time.Time{}
	for _, l := range b.List() {
		switch l.State {
		case Cooling:
			cooling[l.Address], _ = b.CoolingUntil(l.Address)
		case Quarantined:
			out[l.Address] = true
		case Reserved, Held:
			owner[l.Address] = l.Owner
		}
	}
	maps.DeleteFunc(m.cooling, func(_ netip.Addr, until time.Time) bool { return !time.Now().Before(until) })
	n := b.Counts()[0]
	free := 13 - len(owner) - len(out) - len(cooling)
	if !maps.Equal(owner, m.owner) || !maps.Equal(out, m.out) || !maps.EqualFunc(cooling, m.cooling, time.Time.Equal) || n.Free != free {
		return fmt.Errorf("allocator %v, %v, %v, %+v; model %+v", owner, out, cooling, n, m)
	}
	return nil
}

// faulty is a store that fails before or after the write.
type faulty struct {
	Store
	before, after error
}

func (f *faulty) Apply(changes ...Row) error {
	if f.before != nil {
		return f.before
	}
	return errors.Join(f.Store.Apply(changes...), f.after)
}

func (c call) on(b *Allocator) (netip.Addr, error) {
	switch c.do {
	case "reserve":
		return b.Reserve(c.owner)
	case "hold":
		return c.addr, b.Hold(c.owner, c.addr)
	case "claim":
		return c.addr, b.Claim(c.owner, c.addr)
	case "release":
		return c.addr, b.Release(c.owner, c.addr)
	case "quarantine":
		return c.addr, b.Quarantine(c.addr, "test")
	default:
		return c.addr, b.Free(c.addr)
	}
}

// TestAgainstModel applies the same random calls to allocator and model. Some fail before or after
// the write, as in a crash; the store is then opened again.
func TestAgainstModel(t *testing.T) {
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			store := newMemory()
			driveModel(t, seed, 500, func() (Store, func()) { return store, func() {} })
		})
	}
	t.Run("bolt", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "leases.db")
		synctest.Test(t, func(t *testing.T) {
			driveModel(t, 1000, 300, func() (Store, func()) {
				db, store := openBolt(t, path)
				return store, func() { _ = db.Close() }
			})
		})
	})
}

func openBolt(t testing.TB, path string) (*bolt.DB, *BoltStore) {
	t.Helper()
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	store, err := NewBoltStore(db)
	if err != nil {
		t.Fatal(err)
	}
	return db, store
}

func driveModel(t *testing.T, seed uint64, calls int, openStore func() (Store, func())) {
	random := rand.New(rand.NewPCG(seed, 1))
	d := &modelPair{openStore: openStore, m: &model{owner: map[netip.Addr]string{}, cooling: map[netip.Addr]time.Time{}, out: map[netip.Addr]bool{}}}
	d.reopen(t)
	defer func() { d.closeStore() }()
	often := []string{"reserve", "reserve", "reserve", "hold", "release", "release", "claim", "free", "quarantine"}
	for i := range calls {
		c := call{do: often[random.IntN(len(often))], owner: fmt.Sprint(random.IntN(18)), addr: modelAddr(random.IntN(13))}
		if has, ok := d.m.of(c.owner); ok && random.IntN(2) == 0 {
			c.addr = has
		}
		var err error
		what := random.IntN(40)
		switch what {
		case 0, 1:
			err = d.crash(t, c, what == 0)
		case 2, 3, 4:
			time.Sleep(time.Duration(random.IntN(40)) * time.Second)
		case 5:
			d.reopen(t)
		default:
			err = d.call(c)
		}
		if err = errors.Join(err, d.m.compare(d.b)); err != nil {
			t.Fatalf("seed %d, call %d, %d: %+v: %v", seed, i, what, c, err)
		}
	}
}

// modelPair is an allocator and a model with the same calls.
type modelPair struct {
	m          *model
	b          *Allocator
	store      *faulty
	openStore  func() (Store, func())
	closeStore func()
}

func (d *modelPair) reopen(t *testing.T) {
	if d.closeStore != nil {
		d.closeStore()
	}
	d.store = &faulty{}
	d.store.Store, d.closeStore = d.openStore()
	d.b = open(t, d.store, modelSubnet)
}

func (d *modelPair) call(c call) error {
	allowed := d.m.allows(c)
	got, err := c.on(d.b)
	if (err == nil) != allowed {
		return fmt.Errorf("error %w, allowed %v", err, allowed)
	}
	if !allowed {
		return nil
	}
	return d.happened(c, got)
}

// crash fails a call and opens the store again: the call has either happened or not.
func (d *modelPair) crash(t *testing.T, c call, before bool) error {
	if before {
		d.store.before = errors.New("failed before the write")
	} else {
		d.store.after = errors.New("failed after the write")
	}
	allowed := d.m.allows(c)
	_, err := c.on(d.b)
	if err != nil && !errors.Is(err, d.store.before) && !errors.Is(err, d.store.after) && allowed {
		return err
	}
	d.reopen(t)
	if before || !allowed {
		return nil
	}
	if c.do == "reserve" {
		l, ok := d.b.Of(c.owner)
		if !ok {
			return errors.New("a reservation that was written is lost")
		}
		c.addr = l.Address
	}
	return d.happened(c, c.addr)
}

func (d *modelPair) happened(c call, got netip.Addr) error {
	if has, owns := d.m.of(c.owner); c.do == "reserve" && ((owns && has != got) || (!owns && !d.m.free(got))) {
		return fmt.Errorf("reserved %s, which is not free", got)
	}
	c.addr = got
	d.m.apply(c)
	return nil
}

func TestConcurrentReserve(t *testing.T) {
	db, store := openBolt(t, filepath.Join(t.TempDir(), "leases.db"))
	defer func() { _ = db.Close() }()
	b := open(t, store, "10.0.0.0/24", func(c *Config) { c.CoolDown = 0 })
	var mu sync.Mutex
	using := map[netip.Addr]string{}
	var wg sync.WaitGroup
	for worker := range 64 {
		wg.Go(func() {
			for round := range 3 {
				owner := fmt.Sprintf("%d-%d", worker, round)
				addr, err := b.Reserve(owner)
				if err != nil {
					t.Errorf("reserve for %s: %v", owner, err)
					return
				}
				mu.Lock()
				if other := using[addr]; other != "" {
					t.Errorf("%s has %s, and so has %s", owner, addr, other)
				}
				using[addr] = owner
				mu.Unlock()
				err = b.Hold(owner, addr)
				mu.Lock()
				delete(using, addr)
				mu.Unlock()
				if err := errors.Join(err, b.Release(owner, addr)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if all := b.List(); len(all) != 0 {
		t.Errorf("left: %v", all)
	}
}

// childEnv is the database path for a child process of TestKilledAtAnyInstant.
const childEnv = "BARCHAN_TEST_IPAM_CHILD"

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		if err := runWorker(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// runWorker reserves and releases addresses until it is killed, and prints each change before and
// after.
func runWorker(path string) error {
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		return err
	}
	store, err := NewBoltStore(db)
	if err != nil {
		return err
	}
	b, err := Open(Config{Subnet: netip.MustParsePrefix("10.0.0.0/24"), Store: store, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	for i := 0; ; i = (i + 1) % 20 {
		owner := fmt.Sprintf("%d-%d", os.Getpid(), i)
		l, has := b.Of(owner)
		if !has {
			fmt.Fprintln(os.Stdout, "reserving", owner)
			if l.Address, err = b.Reserve(owner); err != nil {
				return err
			}
			fmt.Fprintln(os.Stdout, "reserved", owner, l.Address)
			continue
		}
		fmt.Fprintln(os.Stdout, "releasing", owner)
		if err := b.Release(owner, l.Address); err != nil {
			return err
		}
		fmt.Fprintln(os.Stdout, "released", owner)
	}
}

// TestKilledAtAnyInstant kills a process that changes the lease table. All completed changes must be
// stored, and at most the pending one besides.
func TestKilledAtAnyInstant(t *testing.T) {
	path := filepath.Join(t.TempDir(), "leases.db")
	has := map[string]string{}
	for round := range 12 {
		pending := killWorker(t, path, 5+17*round%90, has)
		db, store := openBolt(t, path)
		b := open(t, store, "10.0.0.0/24")
		for owner, addr := range has {
			if l, ok := b.Of(owner); owner != pending && (ok != (addr != "") || (ok && l.Address.String() != addr)) {
				t.Errorf("round %d: %s has lease %+v, and reserved %q", round, owner, l, addr)
			}
		}
		if l, ok := b.Of(pending); ok {
			has[pending] = l.Address.String()
		} else {
			delete(has, pending)
		}
		leases := 0
		for _, l := range b.List() {
			if l.Owner != "" {
				leases++
			}
		}
		maps.DeleteFunc(has, func(_, addr string) bool { return addr == "" })
		if leases != len(has) || len(b.Unread()) != 0 {
			t.Errorf("round %d: %d leases, want %d; unread: %v", round, leases, len(has), b.Unread())
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// killWorker kills a worker after that many lines, records them, and returns the owner of its
// pending change.
func killWorker(t *testing.T, path string, lines int, has map[string]string) (pending string) {
	t.Helper()
	cmd := exec.Command(os.Args[0]) //nolint:noctx // killed below
	cmd.Env = append(os.Environ(), childEnv+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	scanner := bufio.NewScanner(out)
	for n := 0; scanner.Scan(); n++ {
		if n == lines {
			if err := cmd.Process.Kill(); err != nil {
				t.Error(err)
			}
		}
		words := strings.Fields(scanner.Text())
		pending = ""
		switch {
		case words[0] == "reserved" && len(words) == 3:
			has[words[1]] = words[2]
		case words[0] == "released" && len(words) == 2:
			has[words[1]] = ""
		case len(words) > 1:
			pending = words[1]
		}
	}
	if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("worker exited before the kill: %v", err)
	}
	return pending
}
