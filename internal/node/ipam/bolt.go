package ipam

import (
	"fmt"

	bolt "go.etcd.io/bbolt"
)

// subnetsBucket has a bucket per subnet, named by its prefix, with a row per address.
var subnetsBucket = []byte("subnets")

// BoltStore is a Store in one bucket of a bbolt database.
type BoltStore struct{ db *bolt.DB }

// NewBoltStore creates the bucket if it does not exist. The caller closes the database. It ignores
// rows without a subnet bucket: [MigrateFlat] must have moved them.
func NewBoltStore(db *bolt.DB) (*BoltStore, error) {
	err := db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(subnetsBucket)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create lease bucket: %w", err)
	}
	return &BoltStore{db: db}, nil
}

// Each visits all rows in text order of subnets and keys. A row outside a subnet bucket has an
// empty Subnet.
func (s *BoltStore) Each(visit func(Row) error) error {
	return s.db.View(func(tx *bolt.Tx) error {
		root := tx.Bucket(subnetsBucket)
		return root.ForEach(func(name, value []byte) error {
			bucket := root.Bucket(name)
			if bucket == nil {
				return visit(Row{Key: name, Value: value})
			}
			return bucket.ForEach(func(key, value []byte) error {
				return visit(Row{Subnet: string(name), Key: key, Value: value})
			})
		})
	})
}

// Apply makes the changes in one transaction.
func (s *BoltStore) Apply(changes ...Row) error {
	return s.db.Update(func(tx *bolt.Tx) error {
		for _, c := range changes {
			if err := apply(tx.Bucket(subnetsBucket), c); err != nil {
				return fmt.Errorf("change row %q of subnet %q: %w", c.Key, c.Subnet, err)
			}
		}
		return nil
	})
}

func apply(root *bolt.Bucket, c Row) (err error) {
	bucket := root
	switch {
	case c.Subnet == "":
	case c.Value == nil:
		if bucket = root.Bucket([]byte(c.Subnet)); bucket == nil {
			return nil
		}
	default:
		if bucket, err = root.CreateBucketIfNotExists([]byte(c.Subnet)); err != nil {
			return err
		}
	}
	if c.Value == nil {
		return bucket.Delete(c.Key)
	}
	return bucket.Put(c.Key, c.Value)
}
