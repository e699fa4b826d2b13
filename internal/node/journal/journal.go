// Package journal stores one row for each sandbox of the node, in a bbolt database: what to undo,
// and how far the sandbox is. A write has reached the disk when it returns. A row is written before the first
// step of a sandbox and deleted after the last.
//
//	making → live → pausing → paused → storing → stored → waking → live
//	         live → storing   paused → resuming → live
//	         live → capturing → live     live → restarting → live     live → ended
//	all → removing → no row
//
// Move writes every stage, and refuses a transition that its table lacks. The package acts on nothing
// but the database, and decides nothing about sandboxes. It has no lock; bbolt serializes writes. The caller holds
// the lock of the sandbox.
package journal

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// Stage is the state of a sandbox on the node.
type Stage string

// The stages, as the database has them.
const (
	none       Stage = ""           // no row
	Making     Stage = "making"     // being created; a restart undoes it
	Live       Stage = "live"       // all steps done
	Pausing    Stage = "pausing"    // being paused
	Paused     Stage = "paused"     // frozen in RAM
	Resuming   Stage = "resuming"   // being resumed in RAM
	Storing    Stage = "storing"    // its data is on disk; its container is being removed
	Stored     Stage = "stored"     // its data is on disk; it has no container
	Waking     Stage = "waking"     // its data is on disk; its container is being created from that
	Restarting Stage = "restarting" // its container is being replaced; its files stay
	Capturing  Stage = "capturing"  // live, and possibly stopped for a checkpoint
	Ended      Stage = "ended"      // it ran, and never will again
	Removing   Stage = "removing"   // steps being undone
)

// moves are the allowed transitions from each stage; those of none begin a row, and removing ends with the
// row's deletion. A stage is followed by itself where a row changes within it: a policy, the environment, a
// repeated request. A row with a stage that is no key was written by a later version.
//
// A capturing sandbox is live to everyone but the next process, so what follows live may follow capturing.
var moves = map[Stage][]Stage{
	none:       {Making},
	Making:     {Live, Removing},
	Live:       {Live, Pausing, Storing, Restarting, Capturing, Ended, Removing},
	Pausing:    {Pausing, Paused, Live, Restarting, Ended, Removing},
	Paused:     {Paused, Resuming, Storing, Restarting, Ended, Removing},
	Resuming:   {Resuming, Live, Paused, Storing, Restarting, Ended, Removing},
	Storing:    {Storing, Stored, Removing},
	Stored:     {Stored, Storing, Waking, Removing},
	Waking:     {Waking, Live, Storing, Stored, Removing},
	Restarting: {Restarting, Live, Ended, Removing},
	Capturing:  {Live, Pausing, Storing, Restarting, Ended, Removing},
	Ended:      {Ended, Removing},
	Removing:   {Removing},
}

// Begun reports whether the sandbox was live, so that its data must be kept.
func (s Stage) Begun() bool { return s != Making && s != Removing }

// Row is the journal's row of a sandbox: enough to undo every step, and to manage the running sandbox without
// other data.
type Row struct {
	Stage Stage     `json:"stage"`
	Plan  plan.Plan `json:"plan"`
	plan.Images
	Address   netip.Addr        `json:"address,omitzero"`
	Process   lifecycle.Process `json:"process,omitzero"`
	StartedAt time.Time         `json:"startedAt,omitzero"`
	// Disk bounds the bytes of its files; zero: nothing does, as in older rows.
	Disk int64 `json:"diskBytes,omitempty"`
	// Warmed means that the plan's warm-up has run.
	Warmed bool `json:"warmed,omitempty"`
	// Program means that the template or the image has its own program.
	Program bool `json:"program,omitempty"`
	// Ready means that the probes of the running container have succeeded. A restarted server assumes it
	// until its own probes.
	Ready bool `json:"ready,omitempty"`
	// Pause is the wait before the next restart.
	Pause time.Duration `json:"pause,omitempty"`
	// PausedAt is when it was paused; Memory describes its memory on disk, if any.
	PausedAt time.Time `json:"pausedAt,omitzero"`
	Memory   *Memory   `json:"memory,omitempty"`
	// Kept is what it keeps from storing to waking; empty means everything, including memory.
	Kept agents.SuspendMode `json:"kept,omitempty"`
	// Build is the SHA-256, in hexadecimal, of the runtime that started its container; empty without one, and
	// in older rows.
	Build string `json:"build,omitempty"`
	// Exit and Why describe its end.
	Exit *int32 `json:"exit,omitempty"`
	Why  string `json:"why,omitempty"`
}

var sandboxesBucket = []byte("sandboxes")

// Journal keeps rows by the sandbox's UID. A write has reached the disk when it returns.
type Journal struct{ db *bolt.DB }

// Open creates the bucket if it is missing.
func Open(db *bolt.DB) (*Journal, error) {
	err := db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(sandboxesBucket)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create journal bucket: %w", err)
	}
	return &Journal{db: db}, nil
}

// Move writes a row with its next stage. A transition from the stored stage that the table of moves lacks is an
// errs.ErrConflict, and leaves the stored row as it is.
func (j *Journal) Move(r *Row, to Stage) error {
	ref := &r.Plan.Ref
	changed := *r
	changed.Stage = to
	value, err := json.Marshal(&changed)
	if err != nil {
		return fmt.Errorf("encode journal of %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	err = j.db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket(sandboxesBucket)
		var stored struct{ Stage Stage }
		if was := b.Get([]byte(ref.UID)); was != nil {
			if err := json.Unmarshal(was, &stored); err != nil {
				return fmt.Errorf("decode: %w", err)
			}
		}
		if !slices.Contains(moves[stored.Stage], to) {
			return fmt.Errorf("no transition from stage %q to %q: %w", stored.Stage, to, errs.ErrConflict)
		}
		return b.Put([]byte(ref.UID), value)
	})
	if err != nil {
		return fmt.Errorf("write journal of %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return nil
}

// Remove deletes a row; a missing one is no error.
func (j *Journal) Remove(ref sandbox.Ref) error {
	err := j.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(sandboxesBucket).Delete([]byte(ref.UID)) })
	if err != nil {
		return fmt.Errorf("clear journal of %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return nil
}

// decodedAtOnce bounds the rows that are decoded and not visited yet.
const decodedAtOnce = 256

// Each visits all readable rows, and passes the others to unread; they are kept.
func (j *Journal) Each(visit func(*Row), unread func(key, value []byte, err error)) error {
	return each(j.db, decodeRow, visit, unread)
}

// each decodes all rows on all processors, since a node that starts reads thousands, and visits them in the order of their keys.
func each[T any](db *bolt.DB, decode func(key, value []byte) (T, error), visit func(T), unread func(key, value []byte, err error)) error {
	type entry struct {
		key, value []byte
		row        T
		err        error
	}
	return db.View(func(tx *bolt.Tx) error {
		cursor := tx.Bucket(sandboxesBucket).Cursor()
		for key, value := cursor.First(); key != nil; {
			var batch []entry
			for ; key != nil && len(batch) < decodedAtOnce; key, value = cursor.Next() {
				batch = append(batch, entry{key: key, value: value})
			}
			var next atomic.Int64
			var wg sync.WaitGroup
			for range min(runtime.GOMAXPROCS(0), len(batch)) {
				wg.Go(func() {
					for i := next.Add(1) - 1; i < int64(len(batch)); i = next.Add(1) - 1 {
						e := &batch[i]
						e.row, e.err = decode(e.key, e.value)
					}
				})
			}
			wg.Wait()
			for _, e := range batch {
				if e.err != nil {
					unread(e.key, e.value, e.err)
				} else {
					visit(e.row)
				}
			}
		}
		return nil
	})
}

// UIDs returns the sandboxes of all rows, readable or not, without decoding these.
func (j *Journal) UIDs() (uids []types.UID, err error) {
	err = j.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(sandboxesBucket).ForEach(func(key, _ []byte) error {
			uids = append(uids, types.UID(key))
			return nil
		})
	})
	return uids, err
}

// Get reads one row; nil if there is none. An unreadable row is an error.
func (j *Journal) Get(uid types.UID) (r *Row, err error) {
	err = j.db.View(func(tx *bolt.Tx) error {
		value := tx.Bucket(sandboxesBucket).Get([]byte(uid))
		if value == nil {
			return nil
		}
		r, err = decodeRow([]byte(uid), value)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read journal of %s: %w", uid, err)
	}
	return r, nil
}

// decodeRow reads a row, and refuses one that the node cannot act on: the node neither adopts nor undoes what
// it does not understand.
func decodeRow(key, value []byte) (*Row, error) {
	r := &Row{}
	if err := json.Unmarshal(value, r); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	if err := r.check(key); err != nil {
		return nil, err
	}
	return r, nil
}

// check refuses a row that contradicts itself.
func (r *Row) check(key []byte) error {
	switch {
	case string(r.Plan.Ref.UID) != string(key):
		return fmt.Errorf("row of %q under another key", r.Plan.Ref.UID)
	case r.Plan.ID != sandbox.IDOf(r.Plan.Ref.UID):
		return fmt.Errorf("row with the ID %q of another sandbox", r.Plan.ID)
	case r.Stage == none || moves[r.Stage] == nil:
		return fmt.Errorf("unknown stage %q", r.Stage)
	case r.Kept != "" && r.Kept != agents.SuspendFiles && r.Kept != agents.SuspendDelete:
		return fmt.Errorf("unknown kept data %q", r.Kept)
	case r.OnDisk() && !r.Address.IsValid(): // released while it is stored
	case r.Stage.Begun() && !r.Address.Is4():
		return fmt.Errorf("a sandbox of stage %s has the address %s", r.Stage, r.Address)
	}
	return nil
}

// KeepsMemory reports whether a paused sandbox has memory to resume from.
func (r *Row) KeepsMemory() bool { return r.Kept == "" }

// KeepsClaims reports whether a paused sandbox has only its volume claims.
func (r *Row) KeepsClaims() bool { return r.OnDisk() && r.Kept == agents.SuspendDelete }

// Memory describes a sandbox's memory on disk. Its directory has the name of the sandbox.
type Memory struct {
	Build memimage.Build `json:"build"`
	// Size is bytes of the image, Disk bytes written to the copy of the sandbox's own image.
	Size    int64     `json:"size"`
	Disk    int64     `json:"disk"`
	Created time.Time `json:"created"`
	// Exit is the exit code of the template's program, if it had exited.
	Exit *int32 `json:"exit,omitempty"`
}

// OnDisk reports whether the sandbox's data on disk is authoritative.
func (r *Row) OnDisk() bool { return r.Stage == Storing || r.Stage == Stored || r.Stage == Waking }

// Place is where the memory of a paused sandbox is; empty if it keeps none.
func (r *Row) Place() agents.MemoryPlace {
	switch {
	case !r.OnDisk():
		return agents.MemoryInRAM
	case r.Memory != nil:
		return agents.MemoryOnDisk
	default:
		return ""
	}
}

// Mentions reports whether any row of the database contains a word. It searches bytes, so that it includes
// rows which this version cannot read.
func Mentions(db *bolt.DB, word string) (found bool, err error) {
	err = db.View(func(tx *bolt.Tx) error {
		return tx.ForEach(func(_ []byte, b *bolt.Bucket) error {
			return b.ForEach(func(_, value []byte) error {
				found = found || bytes.Contains(value, []byte(word))
				return nil
			})
		})
	})
	return found, err
}
