package node

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/barchan-dev/barchan/internal/node/plan"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// stage is how far a sandbox's life on the node is.
type stage string

const (
	making     stage = "making"     // steps are being done; after a restart they are undone
	live       stage = "live"       // all steps are done
	pausing    stage = "pausing"    // the runtime was asked to pause
	paused     stage = "paused"     // it sleeps
	resuming   stage = "resuming"   // the runtime was asked to resume
	storing    stage = "storing"    // what it keeps is on disk; its container is being removed
	stored     stage = "stored"     // what it keeps is on disk; nothing of it runs
	waking     stage = "waking"     // what it keeps is on disk; its container is being made of that
	restarting stage = "restarting" // its container is being replaced; its files stay
	capturing  stage = "capturing"  // it is live, and may be held still for a checkpoint
	ended      stage = "ended"      // it ran, and will not again
	removing   stage = "removing"   // steps are being undone
)

// stagesKnown are all of them; a row with another was written by a later version.
var stagesKnown = []stage{making, live, pausing, paused, resuming, storing, stored, waking, restarting, capturing, ended, removing}

// begun reports whether the sandbox has lived, so that nothing may be taken from it.
func (s stage) begun() bool { return s != making && s != removing }

// row is what the journal has of a sandbox: enough to undo every step, and to go on with what
// runs without asking anybody.
type row struct {
	Stage     stage             `json:"stage"`
	Plan      plan.Plan         `json:"plan"`
	Digest    string            `json:"digest,omitempty"`
	Address   netip.Addr        `json:"address,omitzero"`
	Process   lifecycle.Process `json:"process,omitzero"`
	StartedAt time.Time         `json:"startedAt,omitzero"`
	// ImageEnv is the image's own environment, upon which the plan's is made. Nil, as in rows
	// of before there was this field, means that it is not known.
	ImageEnv []string `json:"imageEnv,omitzero"`
	// ImageRun is what else the image says of its programs; nil as ImageEnv is.
	ImageRun *plan.ImageRun `json:"imageRun,omitempty"`
	// Warmed says that the plan's warm-up has run.
	Warmed bool `json:"warmed,omitempty"`
	// Program says that the template or the image has a program of its own.
	Program bool `json:"program,omitempty"`
	// Ready says that the probes of the container that runs have succeeded. A server that starts
	// goes by it until it has asked for itself.
	Ready bool `json:"ready,omitempty"`
	// Pause is the wait before the next restart.
	Pause time.Duration `json:"pause,omitempty"`
	// PausedAt is since when it sleeps; Memory describes its memory on disk, if it is there.
	PausedAt time.Time `json:"pausedAt,omitzero"`
	Memory   *memory   `json:"memory,omitempty"`
	// Kept is what it keeps from storing to waking; empty means all, its memory too.
	Kept agents.SuspendMode `json:"kept,omitempty"`
	// Build is the SHA-256 of the runtime that its container was made by and is driven by, in
	// hexadecimal; empty where there is none, and in rows of before there was this field.
	Build string `json:"build,omitempty"`
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
			if r, err := decodeRow(key, value); err != nil {
				unread(key, value, err)
			} else {
				visit(r)
			}
			return nil
		})
	})
}

// get reads one row; nil where there is none. One that cannot be read is an error.
func (j *journal) get(uid types.UID) (r *row, err error) {
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

// decodeRow reads a row, and refuses what the node could not act on: what it does not
// understand it must neither adopt nor undo.
func decodeRow(key, value []byte) (*row, error) {
	r := &row{}
	if err := json.Unmarshal(value, r); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	switch {
	case string(r.Plan.Ref.UID) != string(key):
		return nil, fmt.Errorf("row of %q under another key", r.Plan.Ref.UID)
	case r.Plan.ID != sandbox.IDOf(r.Plan.Ref.UID):
		return nil, fmt.Errorf("row with the ID %q, which is another sandbox's", r.Plan.ID)
	case !slices.Contains(stagesKnown, r.Stage):
		return nil, fmt.Errorf("stage %q is not known", r.Stage)
	case r.Kept != "" && r.Kept != agents.SuspendFiles && r.Kept != agents.SuspendDelete:
		return nil, fmt.Errorf("what it keeps is %q, which is not known", r.Kept)
	case r.onDisk() && !r.Address.IsValid(): // given back for as long as it sleeps
	case r.Stage.begun() && !r.Address.Is4():
		return nil, fmt.Errorf("a sandbox that is %s has the address %s", r.Stage, r.Address)
	}
	return r, nil
}
