package ipam

import (
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
)

// BenchmarkReserve compares a reservation with the bare commit of an equal row, and with a
// reservation in a nearly full subnet.
func BenchmarkReserve(b *testing.B) {
	b.Run("bare_commit", func(b *testing.B) {
		db, store := openBolt(b, filepath.Join(b.TempDir(), "leases.db"))
		defer func() { _ = db.Close() }()
		fill(b, store, 1000)
		n := 0
		measure(b, func() error {
			n++
			addr := netip.AddrFrom4([4]byte{10, 1, byte(n >> 8), byte(n)})
			value, err := encode(Lease{Address: addr, Owner: uid(n), State: Reserved, Since: time.Now()})
			if err != nil {
				return err
			}
			return db.Update(func(tx *bolt.Tx) error {
				return tx.Bucket(subnetsBucket).Bucket([]byte("10.0.0.0/8")).Put([]byte(addr.String()), value)
			})
		}, func() error { return nil })
	})
	for name, leases := range map[string]int{"1000_of_65533": 1000, "65500_of_65533": 65500} {
		b.Run(name, func(b *testing.B) {
			db, store := openBolt(b, filepath.Join(b.TempDir(), "leases.db"))
			defer func() { _ = db.Close() }()
			fill(b, store, leases)
			allocator := openBench(b, store, "10.0.0.0/16")
			n := 0
			var addr netip.Addr
			measure(b, func() (err error) {
				n++
				addr, err = allocator.Reserve("new " + uid(n))
				return err
			}, func() error { return allocator.Release("new "+uid(n), addr) })
		})
	}
}

// BenchmarkFind measures a reservation without its write.
func BenchmarkFind(b *testing.B) {
	for _, subnet := range []string{"10.0.0.0/24", "10.0.0.0/16", "10.0.0.0/8"} {
		b.Run("one_free_of_"+subnet[len(subnet)-2:], func(b *testing.B) {
			s := newSpace(netip.MustParsePrefix(subnet))
			for i := range s.size {
				s.set(i, i != s.size/2)
			}
			at := s.size / 2
			for b.Loop() {
				if _, ok := s.follow(at); !ok {
					b.Fatal("no free address")
				}
			}
		})
	}
}

// BenchmarkOpen measures loading the lease table at boot.
func BenchmarkOpen(b *testing.B) {
	for _, leases := range []int{100, 65500} {
		b.Run(fmt.Sprint(leases), func(b *testing.B) {
			db, store := openBolt(b, filepath.Join(b.TempDir(), "leases.db"))
			defer func() { _ = db.Close() }()
			fill(b, store, leases)
			for b.Loop() {
				openBench(b, store, "10.0.0.0/16")
			}
		})
	}
}

func uid(n int) string { return fmt.Sprintf("%08d-c71d-4f3d-8e5f-8251c835f8da", n) }

// fill writes leases of a /16, one of them in a /8 bucket beside it.
func fill(b *testing.B, store Store, leases int) {
	b.Helper()
	rows := []Row{{Subnet: "10.0.0.0/8", Key: []byte("x"), Value: []byte("x")}}
	for i := range leases {
		addr := netip.AddrFrom4([4]byte{10, 0, byte((i + 2) >> 8), byte(i + 2)})
		value, err := encode(Lease{Address: addr, Owner: uid(i), State: Held, Since: time.Now()})
		if err != nil {
			b.Fatal(err)
		}
		rows = append(rows, Row{Subnet: "10.0.0.0/16", Key: []byte(addr.String()), Value: value})
	}
	if err := store.Apply(rows...); err != nil {
		b.Fatal(err)
	}
}

func openBench(b *testing.B, store Store, subnet string) *Allocator {
	b.Helper()
	p := netip.MustParsePrefix(subnet)
	allocator, err := Open(Config{
		Subnet: p, Excluded: []netip.Addr{p.Addr().Next()}, Store: store, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		b.Fatal(err)
	}
	return allocator
}

// measure reports the median and the mean time of do; undo is not measured.
func measure(b *testing.B, do, undo func() error) {
	b.Helper()
	var took []time.Duration
	for b.Loop() {
		began := time.Now()
		err := do()
		took = append(took, time.Since(began))
		b.StopTimer()
		if err == nil {
			err = undo()
		}
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}
