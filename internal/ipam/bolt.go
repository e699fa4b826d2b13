package ipam

import (
	"fmt"

	bolt "go.etcd.io/bbolt"
)

var leasesBucket = []byte("leases")

// BoltStore is a Store in one bucket of a bbolt database.
type BoltStore struct{ db *bolt.DB }

// NewBoltStore makes the bucket if need be. The caller closes the database.
func NewBoltStore(db *bolt.DB) (*BoltStore, error) {
	err := db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(leasesBucket)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make bucket of leases: %w", err)
	}
	return &BoltStore{db: db}, nil
}

// Each visits all rows in the order of their keys. What it passes is valid during the visit only.
func (s *BoltStore) Each(visit func(key, value []byte) error) error {
	return s.db.View(func(tx *bolt.Tx) error { return tx.Bucket(leasesBucket).ForEach(visit) })
}

// Apply makes the changes in one transaction.
func (s *BoltStore) Apply(changes ...Change) error {
	return s.db.Update(func(tx *bolt.Tx) error {
		bucket := tx.Bucket(leasesBucket)
		for _, c := range changes {
			var err error
			if c.Value == nil {
				err = bucket.Delete(c.Key)
			} else {
				err = bucket.Put(c.Key, c.Value)
			}
			if err != nil {
				return fmt.Errorf("change row %q: %w", c.Key, err)
			}
		}
		return nil
	})
}
