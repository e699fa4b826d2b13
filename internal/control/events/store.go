package events

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// DefaultMaxBytes bounds the log of one namespace, in bytes.
const DefaultMaxBytes = 4 << 20

var (
	bucketNamespaces  = []byte("namespaces")
	bucketSandboxes   = []byte("sandboxes")
	bucketCheckpoints = []byte("checkpoints")
	bucketCursors     = []byte("cursors")
	bucketLog         = []byte("log")
	keyBytes          = []byte("bytes")
)

// Store is the database. It is safe for concurrent use.
type Store struct {
	db       *bolt.DB
	maxBytes int
}

// Open opens the database in a directory of this process alone, or makes it. maxBytes bounds the log of a namespace, in bytes;
// 0 is DefaultMaxBytes. The oldest events are removed first.
func Open(dir string, maxBytes int) (*Store, error) {
	if dir == "" || maxBytes < 0 {
		return nil, fmt.Errorf("events: a directory is required, and the limit must be positive: %w", errs.ErrInvalid)
	}
	db, err := bolt.Open(filepath.Join(dir, "events.db"), 0o600, &bolt.Options{Timeout: 10 * time.Second})
	if err != nil {
		return nil, fmt.Errorf("open the database of events: %w", err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range [][]byte{bucketNamespaces, bucketSandboxes, bucketCheckpoints, bucketCursors} {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		_ = db.Close()
		return nil, fmt.Errorf("prepare the database of events: %w", err)
	}
	return &Store{db: db, maxBytes: cmp.Or(maxBytes, DefaultMaxBytes)}, nil
}

// Close closes the database.
func (s *Store) Close() error { return s.db.Close() }

// Query selects events of a namespace.
type Query struct {
	Namespace string
	// SandboxID selects one sandbox, which may be gone; empty: all.
	SandboxID string
	// Types selects types; none: all.
	Types []Type
	// Offset is how many to leave out, Limit how many to return.
	Offset, Limit int
	// OldestFirst is their order; else the newest is first.
	OldestFirst bool
}

func (q *Query) matches(e *Event) bool {
	return (q.SandboxID == "" || q.SandboxID == e.SandboxID) && (len(q.Types) == 0 || slices.Contains(q.Types, e.Type))
}

// List returns the events that a query selects.
func (s *Store) List(q Query) ([]Event, error) {
	found := []Event{}
	err := s.db.View(func(tx *bolt.Tx) error {
		log := logOf(tx, q.Namespace)
		if log == nil {
			return nil
		}
		c := log.Cursor()
		first, next := c.Last, c.Prev
		if q.OldestFirst {
			first, next = c.First, c.Next
		}
		for k, v := first(); k != nil && len(found) < q.Limit; k, v = next() {
			var e Event
			if err := json.Unmarshal(v, &e); err != nil {
				return fmt.Errorf("decode event %d: %w", binary.BigEndian.Uint64(k), err)
			}
			if !q.matches(&e) {
				continue
			}
			if q.Offset > 0 {
				q.Offset--
				continue
			}
			found = append(found, e)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list events of %s: %w", q.Namespace, err)
	}
	return found, nil
}

// Numbered is an event with its place in the log of its namespace.
type Numbered struct {
	Number uint64
	Event
}

// After returns at most limit events of a namespace behind a place in its log, and how many in between are no longer kept.
func (s *Store) After(namespace string, number uint64, limit int) (list []Numbered, lost uint64, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		log := logOf(tx, namespace)
		if log == nil {
			return nil
		}
		c := log.Cursor()
		for k, v := c.Seek(keyOf(number + 1)); k != nil && len(list) < limit; k, v = c.Next() {
			n := Numbered{Number: binary.BigEndian.Uint64(k)}
			if err := json.Unmarshal(v, &n.Event); err != nil {
				return fmt.Errorf("decode event %d of %s: %w", n.Number, namespace, err)
			}
			list = append(list, n)
		}
		if len(list) > 0 {
			lost = list[0].Number - number - 1
		}
		return nil
	})
	return list, lost, err
}

// Before returns the place of the newest event of a namespace that is older than a time, and 0 without one.
func (s *Store) Before(namespace string, at time.Time) (last uint64, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		log := logOf(tx, namespace)
		if log == nil {
			return nil
		}
		c := log.Cursor()
		for k, v := c.Last(); k != nil; k, v = c.Prev() {
			var e Event
			if err := json.Unmarshal(v, &e); err != nil {
				return fmt.Errorf("decode event %d of %s: %w", binary.BigEndian.Uint64(k), namespace, err)
			}
			if last = binary.BigEndian.Uint64(k); e.Timestamp.Before(at) {
				return nil
			}
			last-- // none is older, or those are no longer kept
		}
		return nil
	})
	return last, err
}

// Cursor is how far a webhook is in its namespace's log, and how its deliveries went.
type Cursor struct {
	Namespace string `json:"namespace"`
	// Number is the place of the last event that was delivered, or given up.
	Number uint64 `json:"number"`
	// Attempts counts the failed ones of the next event.
	Attempts int `json:"attempts,omitempty"`
	// FailingSince is when deliveries began to fail; zero: the last one succeeded.
	FailingSince time.Time `json:"failingSince,omitzero"`
	LastError    string    `json:"lastError,omitempty"`
	// Lost counts the events that were given up, or removed from the log before.
	Lost uint64 `json:"lost,omitempty"`
	// Disabled is why nothing is delivered any more; empty: it is.
	Disabled string `json:"disabled,omitempty"`
	// EnabledAt is that of the webhook when the cursor was written.
	EnabledAt string `json:"enabledAt,omitempty"`
}

// Cursor returns that of a webhook; ok is false if there is none.
func (s *Store) Cursor(webhook types.UID) (c Cursor, ok bool, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		text := tx.Bucket(bucketCursors).Get([]byte(webhook))
		if ok = text != nil; !ok {
			return nil
		}
		return json.Unmarshal(text, &c)
	})
	return c, ok, err
}

// SetCursor writes that of a webhook. It is on the disk when SetCursor returns.
func (s *Store) SetCursor(webhook types.UID, c Cursor) error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return s.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucketCursors).Put([]byte(webhook), text) })
}

// KeepCursors removes the cursors of all other webhooks.
func (s *Store) KeepCursors(keep func(types.UID) bool) error {
	return s.db.Update(func(tx *bolt.Tx) error { return sweep(tx.Bucket(bucketCursors), keep) })
}

// sweep removes all keys but those to keep.
func sweep(b *bolt.Bucket, keep func(types.UID) bool) error {
	var gone [][]byte
	err := b.ForEach(func(k, _ []byte) error {
		if !keep(types.UID(k)) {
			gone = append(gone, slices.Clone(k))
		}
		return nil
	})
	for _, k := range gone {
		if err == nil {
			err = b.Delete(k)
		}
	}
	return err
}

// namespaces returns those that have a log.
func (s *Store) namespaces() (names []string, err error) {
	err = s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(bucketNamespaces).ForEachBucket(func(k []byte) error {
			names = append(names, string(k))
			return nil
		})
	})
	return names, err
}

// remove removes the log of a namespace.
func (s *Store) remove(namespace string) error {
	return s.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucketNamespaces).DeleteBucket([]byte(namespace)) })
}

// add appends an event to the log of its namespace, and removes the oldest beyond the limit.
func (s *Store) add(tx *bolt.Tx, e *Event) error {
	b, err := tx.Bucket(bucketNamespaces).CreateBucketIfNotExists([]byte(e.Namespace))
	if err != nil {
		return err
	}
	log, err := b.CreateBucketIfNotExists(bucketLog)
	if err != nil {
		return err
	}
	text, err := json.Marshal(e)
	if err != nil {
		return err
	}
	number, err := log.NextSequence()
	if err != nil {
		return err
	}
	if err := log.Put(keyOf(number), text); err != nil {
		return err
	}
	size := len(text)
	if old := b.Get(keyBytes); old != nil {
		size += int(binary.BigEndian.Uint64(old)) //nolint:gosec // written below, from an int
	}
	c := log.Cursor()
	for k, v := c.First(); size > s.maxBytes && k != nil && !slices.Equal(k, keyOf(number)); k, v = c.First() {
		size -= len(v)
		if err := c.Delete(); err != nil {
			return err
		}
	}
	return b.Put(keyBytes, keyOf(uint64(size)))
}

func logOf(tx *bolt.Tx, namespace string) *bolt.Bucket {
	if b := tx.Bucket(bucketNamespaces).Bucket([]byte(namespace)); b != nil {
		return b.Bucket(bucketLog)
	}
	return nil
}

func keyOf(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
