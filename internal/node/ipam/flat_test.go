package ipam

import (
	"compress/gzip"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// recordedDatabase unpacks a database that an older server wrote; see testdata/README.md.
func recordedDatabase(t *testing.T) string {
	t.Helper()
	packed, err := os.Open("testdata/node-a61503e.db.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = packed.Close() }()
	in, err := gzip.NewReader(packed)
	if err != nil {
		t.Fatal(err)
	}
	content, err := io.ReadAll(in)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "node.db")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// sandboxesOf returns the journal rows, which a lease migration must not change.
func sandboxesOf(t *testing.T, db *bolt.DB) map[string]string {
	t.Helper()
	rows := map[string]string{}
	if err := db.View(func(tx *bolt.Tx) error {
		return tx.Bucket([]byte("sandboxes")).ForEach(func(k, v []byte) error {
			rows[string(k)] = string(v)
			return nil
		})
	}); err != nil {
		t.Fatal(err)
	}
	return rows
}

// migrateTwice returns the journal rows from before the migration.
func migrateTwice(t *testing.T, path string, subnet netip.Prefix) map[string]string {
	t.Helper()
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	before := sandboxesOf(t, db)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := MigrateFile(t.Context(), path, subnet, slog.New(slog.DiscardHandler)); err != nil {
			t.Fatal(err)
		}
	}
	return before
}

func TestMigrateRecorded(t *testing.T) {
	path, subnet := recordedDatabase(t), netip.MustParsePrefix("10.97.0.0/24")
	before := migrateTwice(t, path, subnet)
	db, store := openBolt(t, path)
	defer func() { _ = db.Close() }()
	b := open(t, store, subnet.String())
	all := b.List()
	owners := map[string]bool{}
	for i, l := range all { // in the order of addresses
		if want := netip.AddrFrom4([4]byte{10, 97, 0, byte(i + 2)}); l.State != Held || l.Address != want || l.Since.IsZero() {
			t.Errorf("lease %+v, want that of %s, held", l, want)
		}
		owners[l.Owner] = true
	}
	if len(all) != 6 || len(b.Unread()) != 0 || len(b.Counts()) != 1 {
		t.Errorf("%d leases, unread %v, counts %+v", len(all), b.Unread(), b.Counts())
	}
	if after := sandboxesOf(t, db); !maps.Equal(before, after) || len(after) != 6 {
		t.Errorf("journal changed: %d rows, want %d", len(after), len(before))
	} else if !maps.EqualFunc(after, owners, func(string, bool) bool { return true }) {
		t.Errorf("owners %v, want those of the journal", slices.Collect(maps.Keys(owners)))
	}
	if addr := reserve(t, b, "new"); addr != netip.MustParseAddr("10.97.0.8") {
		t.Errorf("the next is %s", addr)
	}
}

// flatDB creates a database with rows that have no subnet.
func flatDB(t *testing.T, rows map[string]string) *bolt.DB {
	t.Helper()
	db, err := bolt.Open(filepath.Join(t.TempDir(), "node.db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	if err := db.Update(func(tx *bolt.Tx) error {
		flat, err := tx.CreateBucket(flatBucket)
		for k, v := range rows {
			err = errors.Join(err, flat.Put([]byte(k), []byte(v)))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return db
}

func TestMigrateKeepsUnreadableRows(t *testing.T) {
	flat := map[string]string{
		"10.0.0.2": "{not json", "junk": "\xff\x00", "10.9.9.8": "{",
		"10.0.0.3": `{"address":"10.0.0.3","owner":"a","state":"held","since":"2026-11-21T16:31:29.98Z"}`,
		"10.9.9.9": `{"address":"10.9.9.9","owner":"b","state":"reserved","since":"2026-11-21T16:31:29.98Z"}`,
	}
	db := flatDB(t, flat)
	subnet := netip.MustParsePrefix("10.0.0.0/29")
	moved, err := MigrateFlat(db, subnet)
	if err != nil || moved != (Moved{Leases: 2, Unread: 3}) {
		t.Errorf("moved %+v, %v", moved, err)
	}
	store, err := NewBoltStore(db)
	if err != nil {
		t.Fatal(err)
	}
	b := open(t, store, subnet.String())
	kept := map[string]string{}
	for _, r := range b.Unread() {
		kept[r.Subnet+" "+string(r.Key)] = string(r.Value)
	}
	if want := map[string]string{"10.0.0.0/29 10.0.0.2": "{not json", "10.0.0.0/29 junk": "\xff\x00", "0.0.0.0/0 10.9.9.8": "{"}; !maps.Equal(kept, want) {
		t.Errorf("unread %q, want %q", kept, want)
	}
	for owner, addr := range map[string]string{"a": "10.0.0.3", "b": "10.9.9.9"} {
		if l, ok := b.Of(owner); !ok || l.Address.String() != addr {
			t.Errorf("lease of %s: %+v, %v", owner, l, ok)
		}
	}
}

// TestMigrateMixedRows has rows of both kinds, as after a downgrade: the newer kind wins.
func TestMigrateMixedRows(t *testing.T) {
	db := flatDB(t, map[string]string{"10.0.0.3": `{"address":"10.0.0.3","owner":"old","state":"held","since":"2026-11-21T16:31:29.98Z"}`})
	store, err := NewBoltStore(db)
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddr("10.0.0.3")
	if err := open(t, store, "10.0.0.0/29").Claim("new", addr); err != nil {
		t.Fatal(err)
	}
	if moved, err := MigrateFlat(db, netip.MustParsePrefix("10.0.0.0/29")); err != nil || moved != (Moved{}) {
		t.Errorf("moved %+v, %v", moved, err)
	}
	if l, _ := open(t, store, "10.0.0.0/29").At(addr); l.Owner != "new" {
		t.Errorf("lease %+v", l)
	}
}

// TestMigrateIsOneTransaction interrupts the migration.
func TestMigrateIsOneTransaction(t *testing.T) {
	rows := map[string]string{}
	for i := range byte(200) {
		addr := netip.AddrFrom4([4]byte{10, 0, 0, i + 2}).String()
		rows[addr] = `{"address":"` + addr + `","owner":"o` + addr + `","state":"held","since":"2026-11-21T16:31:29.98Z"}`
	}
	db := flatDB(t, rows)
	func() {
		defer func() { _ = recover() }()
		_ = db.Update(func(tx *bolt.Tx) error {
			root, err := tx.CreateBucketIfNotExists(subnetsBucket)
			if err != nil {
				return err
			}
			n := 0
			return tx.Bucket(flatBucket).ForEach(func(k, v []byte) error {
				if n++; n == 100 {
					panic("crash")
				}
				return new(Moved).move(root, netip.MustParsePrefix("10.0.0.0/24"), k, v)
			})
		})
	}()
	if err := db.View(func(tx *bolt.Tx) error {
		if n := tx.Bucket(flatBucket).Stats().KeyN; n != 200 || tx.Bucket(subnetsBucket) != nil {
			t.Errorf("%d rows remain: partly moved", n)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if moved, err := MigrateFlat(db, netip.MustParsePrefix("10.0.0.0/24")); err != nil || moved.Leases != 200 {
		t.Errorf("moved %+v, %v", moved, err)
	}
}

func TestMigrateEmpty(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none.db")
	if err := MigrateFile(t.Context(), path, netip.MustParsePrefix("10.0.0.0/24"), slog.New(slog.DiscardHandler)); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("database created: %v", err)
	}
	db := flatDB(t, nil)
	if _, err := MigrateFlat(db, netip.Prefix{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("without a subnet: %v", err)
	}
	if err := os.WriteFile(path, []byte("not a database"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := MigrateFile(t.Context(), path, netip.MustParsePrefix("10.0.0.0/24"), slog.New(slog.DiscardHandler)); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("not a database: %v", err)
	}
}
