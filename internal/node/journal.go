package node

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	bolt "go.etcd.io/bbolt"

	"github.com/barchan-dev/barchan/internal/lifecycle"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

// stage is how far a sandbox's life on the node is.
type stage string

const (
	making     stage = "making"     // steps are being done; after a restart they are undone
	live       stage = "live"       // all steps are done
	pausing    stage = "pausing"    // the runtime was asked to pause
	paused     stage = "paused"     // it sleeps
	resuming   stage = "resuming"   // the runtime was asked to resume
	storing    stage = "storing"    // its memory is on disk; its container is being removed
	stored     stage = "stored"     // its memory is on disk; nothing of it runs
	waking     stage = "waking"     // its memory is on disk; its container is being restored
	restarting stage = "restarting" // its container is being replaced; its files stay
	ended      stage = "ended"      // it ran, and will not again
	removing   stage = "removing"   // steps are being undone
)

// row is what the journal has of a sandbox: enough to undo every step, and to go on with what
// runs without asking anybody.
type row struct {
	Stage     stage             `json:"stage"`
	Plan      plan              `json:"plan"`
	Digest    string            `json:"digest,omitempty"`
	Address   netip.Addr        `json:"address,omitzero"`
	Process   lifecycle.Process `json:"process,omitzero"`
	StartedAt time.Time         `json:"startedAt,omitzero"`
	// ImageEnv is the image's own environment, upon which the plan's is made. Nil, as in rows
	// of before there was this field, means that it is not known.
	ImageEnv []string `json:"imageEnv,omitzero"`
	// Program says that the template or the image has a program of its own.
	Program bool `json:"program,omitempty"`
	// Pause is the wait before the next restart.
	Pause time.Duration `json:"pause,omitempty"`
	// PausedAt is since when it sleeps; Memory describes its memory on disk, if it is there.
	PausedAt time.Time `json:"pausedAt,omitzero"`
	Memory   *memory   `json:"memory,omitempty"`
	// Exit and Why tell how it ended.
	Exit *int32 `json:"exit,omitempty"`
	Why  string `json:"why,omitempty"`
}

var sandboxesBucket = []byte("sandboxes")

// journal keeps rows by the sandbox's UID. A write has reached the disk when it returns.
type journal struct{ db *bolt.DB }

func openJournal(db *bolt.DB) (*journal, error) {
	err := db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(sandboxesBucket)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make the journal: %w", err)
	}
	return &journal{db: db}, nil
}

func (j *journal) put(ref sandbox.Ref, r *row) error {
	value, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode journal of %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	err = j.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(sandboxesBucket).Put([]byte(ref.UID), value) })
	if err != nil {
		return fmt.Errorf("write journal of %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return nil
}

func (j *journal) remove(ref sandbox.Ref) error {
	err := j.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(sandboxesBucket).Delete([]byte(ref.UID)) })
	if err != nil {
		return fmt.Errorf("clear journal of %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return nil
}

// each visits all rows that can be read, and unread the others, which are kept.
func (j *journal) each(visit func(*row), unread func(key, value []byte, err error)) error {
	return j.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(sandboxesBucket).ForEach(func(key, value []byte) error {
			var r row
			err := json.Unmarshal(value, &r)
			if err == nil && string(r.Plan.Ref.UID) != string(key) {
				err = fmt.Errorf("row of %q under another key", r.Plan.Ref.UID)
			}
			if err != nil {
				unread(key, value, err)
				return nil
			}
			visit(&r)
			return nil
		})
	})
}
