package ipam

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// flatBucket has rows of servers without subnet buckets: one per address of the only subnet,
// without a version.
var flatBucket = []byte("leases")

// openTimeout bounds the wait for the database lock of another process.
const openTimeout = time.Second

// Moved counts what MigrateFlat moved.
type Moved struct{ Leases, Unread int }

// MigrateFile is MigrateFlat for a closed database. A missing file is success, and is not created.
func MigrateFile(ctx context.Context, path string, subnet netip.Prefix, log *slog.Logger) error {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: openTimeout})
	if err != nil {
		return fmt.Errorf("open %s: %w: %w", path, err, errs.ErrUnavailable)
	}
	moved, err := MigrateFlat(db, subnet)
	if err := errors.Join(err, db.Close()); err != nil {
		return err
	}
	log.InfoContext(ctx, "leases moved to their subnet", telemetry.Path, path, "leases", moved.Leases, "unread", moved.Unread)
	return nil
}

// MigrateFlat moves rows from the flat bucket into subnet buckets, in one transaction: leases of
// the subnet into its bucket, others into the one for unknown subnets. Unreadable rows move
// unchanged. Existing rows win. Without flat rows it writes nothing, so it can be repeated.
func MigrateFlat(db *bolt.DB, subnet netip.Prefix) (moved Moved, err error) {
	if err := CheckSubnet(subnet); err != nil {
		return Moved{}, fmt.Errorf("move leases: %w", err)
	}
	nothing := errors.New("nothing to move")
	err = db.Update(func(tx *bolt.Tx) error {
		flat := tx.Bucket(flatBucket)
		if flat == nil {
			return nothing
		}
		root, err := tx.CreateBucketIfNotExists(subnetsBucket)
		if err != nil {
			return err
		}
		err = flat.ForEach(func(key, value []byte) error { return moved.move(root, subnet.Masked(), key, value) })
		if err != nil {
			return err
		}
		return tx.DeleteBucket(flatBucket)
	})
	if err != nil && !errors.Is(err, nothing) {
		return Moved{}, fmt.Errorf("move leases to subnet %s: %w", subnet, err)
	}
	return moved, nil
}

func (m *Moved) move(root *bolt.Bucket, subnet netip.Prefix, key, value []byte) error {
	row := Row{Subnet: subnet.String(), Key: key, Value: value}
	if addr, ok := addressOf(key); ok && !subnet.Contains(addr) {
		row.Subnet = unknownSubnet().String()
	}
	if there := root.Bucket([]byte(row.Subnet)); there != nil && there.Get(key) != nil {
		return nil
	}
	l, err := decode(key, value, 0)
	if err != nil {
		m.Unread++ // Open logs it
		return apply(root, row)
	}
	if row.Value, err = encode(l); err != nil {
		return err
	}
	m.Leases++
	return apply(root, row)
}
