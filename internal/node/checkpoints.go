package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/node/oci/memimage"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/keyedlock"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// A checkpoint is a row of the database, a directory and a committed snapshot, whose names derive
// from the checkpoint's UID:
//
//	<DataDir>/checkpoints/<UID>/memory    the image of the memory, if it has one
//	<DataDir>/checkpoints/<UID>/agent     the agent that runs in it, if it has one
//	<DataDir>/checkpoints/<UID>/volumes   what was in the sandbox's volumes
//	snapshot checkpoint-<UID>             what was written to the sandbox's copy of its image
//
// The row comes first and goes last:
//
//	writing → ready → dropping
//
// What is writing when the process dies is removed by the next one, as is what is dropping. Sandboxes
// that are made from a checkpoint read it until they live; it is not removed before.

// checkpointStage is how far a checkpoint's life on the node is.
type checkpointStage string

const (
	checkpointWriting  checkpointStage = "writing"  // its data are being made; after a restart they are removed
	checkpointReady    checkpointStage = "ready"    // all of it is durable
	checkpointDropping checkpointStage = "dropping" // its data are being removed
)

// checkpoint is what the database has of one: what a sandbox needs that is made from it.
type checkpoint struct {
	Stage checkpointStage       `json:"stage"`
	Ref   sandbox.CheckpointRef `json:"ref"`
	// Plan is the source's.
	Plan   plan.Plan `json:"plan"`
	Digest string    `json:"digest"`
	// ImageEnv, ImageRun and Program are those of the source's row.
	ImageEnv []string       `json:"imageEnv,omitzero"`
	ImageRun *plan.ImageRun `json:"imageRun,omitempty"`
	Program  bool           `json:"program,omitempty"`
	// Memory is nil where there are only files.
	Memory *savedMemory `json:"memory,omitempty"`
	// FilesSize is bytes beyond the image, of volumes too.
	FilesSize int64 `json:"filesSize"`
	// Base is the image that an import is bringing; nil once it is ready, and where the image was here.
	Base *importedBase `json:"base,omitempty"`
	// Exit is the exit code of the template's program, where that had ended.
	Exit *int32 `json:"exit,omitempty"`
	// Created is when the sandbox was as it is kept; Paused how long it stood still for that.
	Created time.Time     `json:"created"`
	Paused  time.Duration `json:"paused,omitempty"`
}

// savedMemory is what is known of the memory in a checkpoint.
type savedMemory struct {
	Build  memimage.Build `json:"build"`
	Digest string         `json:"digest"`
	Size   int64          `json:"size"`
}

// captured is how others see a checkpoint.
func (n *Node) captured(c *checkpoint) sandbox.Captured {
	seen := sandbox.Captured{
		Checkpoint: c.Ref, FilesSize: c.FilesSize, Runtime: string(c.Plan.Class), Image: c.Digest, Node: n.cfg.Name,
		Created: c.Created, Paused: c.Paused,
	}
	if m := c.Memory; m != nil {
		seen.Memory, seen.MemorySize, seen.Digest = true, m.Size, m.Digest
		seen.RuntimeBuild, seen.CPUFeatures = m.Build.Version+" "+m.Build.SHA256, slices.Clone(m.Build.CPUFeatures)
	}
	return seen
}

func (n *Node) checkpointsDir() string { return filepath.Join(n.cfg.DataDir, "checkpoints") }

func (n *Node) checkpointDir(uid types.UID) string {
	return filepath.Join(n.checkpointsDir(), string(uid))
}

func (n *Node) checkpointMemory(uid types.UID) string {
	return filepath.Join(n.checkpointDir(uid), "memory")
}

func (n *Node) checkpointAgent(uid types.UID) string {
	return filepath.Join(n.checkpointDir(uid), "agent")
}

// checkpointPrefix begins the names of checkpoints' snapshots.
const checkpointPrefix = "checkpoint-"

func checkpointSnapshot(uid types.UID) string { return checkpointPrefix + string(uid) }

// checkCheckpoint refuses what could not be a name on the machine.
func checkCheckpoint(ref sandbox.CheckpointRef) error {
	if uid := string(ref.UID); uid == "" || uid[0] == '.' || len(uid) > 100 || filepath.Base(uid) != uid || !filepath.IsLocal(uid) {
		return fmt.Errorf("checkpoint %s/%s: UID %q: %w", ref.Namespace, ref.Name, uid, errs.ErrInvalid)
	}
	return nil
}

var checkpointsBucket = []byte("checkpoints")

// checkpointStore is all checkpoints of the node: their rows in the database, and who is at them.
type checkpointStore struct {
	db    *bolt.DB
	locks keyedlock.Lock

	mu    sync.Mutex
	kept  map[types.UID]*checkpointHandle // +checklocks:mu
	wrong map[types.UID]error             // +checklocks:mu
}

// checkpointHandle is one checkpoint. Whoever changes it has its turn, which is taken before that of a sandbox.
type checkpointHandle struct {
	ref sandbox.CheckpointRef

	mu      sync.Mutex
	row     *checkpoint   // +checklocks:mu
	readers int           // +checklocks:mu
	idle    chan struct{} // +checklocks:mu
}

func openShelf(db *bolt.DB) (*checkpointStore, error) {
	err := db.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(checkpointsBucket)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make the books of checkpoints: %w", err)
	}
	return &checkpointStore{db: db, kept: map[types.UID]*checkpointHandle{}, wrong: map[types.UID]error{}}, nil
}

// load reads all rows. Those that cannot be read are kept, with all that has their names, and told.
func (s *checkpointStore) load(unread func(key, value []byte, err error)) error {
	return s.db.View(func(tx *bolt.Tx) error {
		return tx.Bucket(checkpointsBucket).ForEach(func(key, value []byte) error {
			c, err := decodeCheckpoint(key, value)
			if err != nil {
				s.mu.Lock()
				s.wrong[types.UID(key)] = err
				s.mu.Unlock()
				unread(key, value, err)
				return nil
			}
			s.of(c.Ref).setRow(c)
			return nil
		})
	})
}

// decodeCheckpoint reads a row, and refuses what could not be acted on.
func decodeCheckpoint(key, value []byte) (*checkpoint, error) {
	c := &checkpoint{}
	if err := json.Unmarshal(value, c); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	switch {
	case string(c.Ref.UID) != string(key):
		return nil, fmt.Errorf("checkpoint %q under another key", c.Ref.UID)
	case c.Stage != checkpointWriting && c.Stage != checkpointReady && c.Stage != checkpointDropping:
		return nil, fmt.Errorf("stage %q is not known", c.Stage)
	}
	return c, checkCheckpoint(c.Ref)
}

// of finds or makes what is known of a checkpoint.
func (s *checkpointStore) of(ref sandbox.CheckpointRef) *checkpointHandle {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kept[ref.UID]
	if k == nil {
		k = &checkpointHandle{ref: ref}
		s.kept[ref.UID] = k
	}
	return k
}

// row is what the books have of a checkpoint; nil where they have nothing.
func (s *checkpointStore) row(uid types.UID) *checkpoint {
	s.mu.Lock()
	k := s.kept[uid]
	s.mu.Unlock()
	if k == nil {
		return nil
	}
	return k.current()
}

func (s *checkpointStore) all() []*checkpointHandle {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*checkpointHandle, 0, len(s.kept))
	for _, k := range s.kept {
		all = append(all, k)
	}
	return all
}

// unread are the UIDs whose rows cannot be read, and why.
func (s *checkpointStore) unread() map[types.UID]error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.wrong)
}

// checkRead refuses a checkpoint whose row cannot be read.
func (s *checkpointStore) checkRead(ref sandbox.CheckpointRef) error {
	if err := s.unread()[ref.UID]; err != nil {
		return fmt.Errorf("what the node noted of checkpoint %s/%s cannot be read, and is kept (%w); delete the checkpoint to be rid of it: %w",
			ref.Namespace, ref.Name, err, errs.ErrUnavailable)
	}
	return nil
}

// named finds the checkpoint of a name: one that can be read from, where there is one.
func (s *checkpointStore) named(namespace, name string) *checkpointHandle {
	var found *checkpointHandle
	var row *checkpoint
	for _, k := range s.all() {
		r := k.current()
		if r == nil || k.ref.Namespace != namespace || k.ref.Name != name {
			continue
		}
		better := row == nil || (r.Stage == checkpointReady && (row.Stage != checkpointReady || r.Created.After(row.Created)))
		if better {
			found, row = k, r
		}
	}
	return found
}

// take waits for a checkpoint's turn, and with interrupts, for a removal, ends all that hold it or wait
// for it before. The context that it returns ends with an interruption. done gives the turn back, and
// forgets a checkpoint of which nothing is left.
func (s *checkpointStore) take(ctx context.Context, ref sandbox.CheckpointRef, interrupts bool) (_ context.Context, k *checkpointHandle, done func(), err error) {
	ctx, release, err := s.locks.Acquire(ctx, ref.UID, interrupts)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("wait for checkpoint %s/%s: %w: %w", ref.Namespace, ref.Name, err, errs.ErrUnavailable)
	}
	k = s.of(ref)
	return ctx, k, func() {
		if k.current() == nil {
			s.mu.Lock()
			delete(s.kept, ref.UID)
			s.mu.Unlock()
		}
		release()
	}, nil
}

// busy reports whether the checkpoint's lock is held.
func (s *checkpointStore) busy(uid types.UID) bool {
	held, _ := s.locks.Holder(uid)
	return held
}

// current is the checkpoint's row; nil where there is none.
func (k *checkpointHandle) current() *checkpoint {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.row
}

func (k *checkpointHandle) setRow(c *checkpoint) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.row = c
}

// open has a reader read what is ready; release ends that, and may be called more than once.
func (k *checkpointHandle) open() (c *checkpoint, release func(), ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.row == nil || k.row.Stage != checkpointReady {
		return nil, nil, false
	}
	k.readers++
	return k.row, sync.OnceFunc(func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if k.readers--; k.readers == 0 && k.idle != nil {
			close(k.idle)
			k.idle = nil
		}
	}), true
}

// awaitReaders waits until nobody reads. There must be no new ones.
func (k *checkpointHandle) awaitReaders(ctx context.Context) error {
	k.mu.Lock()
	if k.readers == 0 {
		k.mu.Unlock()
		return nil
	}
	if k.idle == nil {
		k.idle = make(chan struct{})
	}
	idle, readers := k.idle, k.readers
	k.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d sandboxes are being made from it: %w: %w", readers, context.Cause(ctx), errs.ErrUnavailable)
	}
}

// noteCheckpoint writes a row with a stage.
func (n *Node) noteCheckpoint(k *checkpointHandle, c *checkpoint, s checkpointStage) error {
	changed := *c
	changed.Stage = s
	value, err := json.Marshal(&changed)
	if err != nil {
		return fmt.Errorf("encode row of checkpoint %s/%s: %w", k.ref.Namespace, k.ref.Name, err)
	}
	err = n.shelf.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(checkpointsBucket).Put([]byte(k.ref.UID), value) })
	if n.cfg.Journalled != nil {
		n.cfg.Journalled(err)
	}
	if err != nil {
		return fmt.Errorf("write row of checkpoint %s/%s: %w: %w", k.ref.Namespace, k.ref.Name, err, errs.ErrUnavailable)
	}
	k.setRow(&changed)
	*c = changed
	return nil
}

// eraseCheckpoint removes all that there is of a checkpoint, its row last. It may be repeated.
func (n *Node) eraseCheckpoint(ctx context.Context, k *checkpointHandle) error {
	failures := []error{memimage.Remove(n.checkpointMemory(k.ref.UID)), n.removeCheckpointData(ctx, k.ref.UID), n.dropBase(ctx, k)}
	if err := errors.Join(failures...); err != nil {
		return errs.Retryable(err)
	}
	failpoint.Reach("checkpoint/removed")
	err := n.shelf.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(checkpointsBucket).Delete([]byte(k.ref.UID)) })
	if err != nil {
		return fmt.Errorf("clear row of checkpoint %s/%s: %w: %w", k.ref.Namespace, k.ref.Name, err, errs.ErrUnavailable)
	}
	failpoint.Reach("checkpoint/gone")
	n.verified.forget(k.ref.UID)
	k.setRow(nil)
	n.shelf.mu.Lock()
	defer n.shelf.mu.Unlock()
	delete(n.shelf.wrong, k.ref.UID)
	return nil
}
