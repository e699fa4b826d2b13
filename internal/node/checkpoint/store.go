// Package checkpoint stores the checkpoints of the node: a row of the database, a directory and a committed
// containerd snapshot for each. It verifies memory once, holds what a sandbox is being made from,
// and removes what an interruption left. It makes no checkpoint and reads no sandbox: packages capture and transfer write
// the data.
//
// Lock order: the lock of a checkpoint (Store.Acquire) before that of a sandbox; Store.mu, Handle.mu and the mutex of
// verified are held for no call out of this package, and never two at a time.
package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/keyedlock"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
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

// Stage is how far a checkpoint's life on the node is.
type Stage string

// The stages.
const (
	Writing  Stage = "writing"  // its data are being made; after a restart they are removed
	Ready    Stage = "ready"    // All of it is durable
	Dropping Stage = "dropping" // its data are being removed
)

// moves are the allowed transitions from each stage; those of the empty one begin a row. An import writes its
// RowOf several times.
var moves = map[Stage][]Stage{
	"":       {Writing},
	Writing:  {Writing, Ready, Dropping},
	Ready:    {Dropping},
	Dropping: {},
}

// Row is what the database has of one: what a sandbox needs that is made from it.
type Row struct {
	Stage Stage                 `json:"stage"`
	Ref   sandbox.CheckpointRef `json:"ref"`
	// Plan is the source's.
	Plan   plan.Plan `json:"plan"`
	Digest string    `json:"digest"`
	// ImageEnv, ImageRun and Program are those of the source's row.
	ImageEnv []string       `json:"imageEnv,omitzero"`
	ImageRun *plan.ImageRun `json:"imageRun,omitempty"`
	Program  bool           `json:"program,omitempty"`
	// Memory is nil where there are only files.
	Memory *Memory `json:"memory,omitempty"`
	// FilesSize is bytes beyond the image, of volumes too.
	FilesSize int64 `json:"filesSize"`
	// Base is the image that an import is bringing; nil once it is ready, and where the image was here.
	Base *Base `json:"base,omitempty"`
	// Exit is the exit code of the template's program, where that had ended.
	Exit *int32 `json:"exit,omitempty"`
	// Created is when the sandbox was as it is kept; Paused how long it stood still for that.
	Created time.Time     `json:"created"`
	Paused  time.Duration `json:"paused,omitempty"`
}

// Memory is what is known of the memory in a checkpoint.
type Memory struct {
	Build  memimage.Build `json:"build"`
	Digest string         `json:"digest"`
	Size   int64          `json:"size"`
}

// Captured is how others see a checkpoint.
func (s *Store) Captured(c *Row) sandbox.Captured {
	seen := sandbox.Captured{
		Checkpoint: c.Ref, FilesSize: c.FilesSize, Runtime: string(c.Plan.Class), Image: c.Digest, Node: s.cfg.Node,
		Created: c.Created, Paused: c.Paused,
	}
	if m := c.Memory; m != nil {
		seen.Memory, seen.MemorySize, seen.Digest = true, m.Size, m.Digest
		seen.RuntimeBuild, seen.CPUFeatures = m.Build.Version+" "+m.Build.SHA256, slices.Clone(m.Build.CPUFeatures)
	}
	return seen
}

// Root is the directory of all checkpoints.
func (s *Store) Root() string { return filepath.Join(s.cfg.Dir) }

// Dir is the directory of one checkpoint.
func (s *Store) Dir(uid types.UID) string {
	return filepath.Join(s.Root(), string(uid))
}

// MemoryDir has the memory image of a checkpoint.
func (s *Store) MemoryDir(uid types.UID) string {
	return filepath.Join(s.Dir(uid), "memory")
}

// AgentFile is the agent that the checkpoint was made with.
func (s *Store) AgentFile(uid types.UID) string {
	return filepath.Join(s.Dir(uid), "agent")
}

// prefix begins the names of checkpoints' snapshots.
const prefix = "checkpoint-"

// Snapshot is the name of a checkpoint's containerd snapshot.
func Snapshot(uid types.UID) string { return prefix + string(uid) }

// CheckRef refuses what could not be a name on the machine.
func CheckRef(ref sandbox.CheckpointRef) error {
	if uid := string(ref.UID); uid == "" || uid[0] == '.' || len(uid) > 100 || filepath.Base(uid) != uid || !filepath.IsLocal(uid) {
		return fmt.Errorf("checkpoint %s/%s: UID %q: %w", ref.Namespace, ref.Name, uid, errs.ErrInvalid)
	}
	return nil
}

// CheckpointsBucket has the rows in the node's database.
var CheckpointsBucket = []byte("checkpoints")

// Store is all checkpoints of the node: their rows in the database, and who is at them.
type Store struct {
	cfg      Config
	locks    keyedlock.Lock
	verified verified

	mu      sync.Mutex
	handles map[types.UID]*Handle // +checklocks:mu
	unread  map[types.UID]error   // +checklocks:mu
}

// Handle is one checkpoint. Whoever changes it has its turn, which is taken before that of a sandbox.
type Handle struct {
	ref sandbox.CheckpointRef

	mu      sync.Mutex
	row     *Row          // +checklocks:mu
	readers int           // +checklocks:mu
	idle    chan struct{} // +checklocks:mu
}

// Config says what a store works with. All fields are needed.
type Config struct {
	DB *bolt.DB
	// Dir is for the files of checkpoints.
	Dir string
	// Node is the node's name in what is observed.
	Node       string
	Containerd *ctrd.Client
	// ImageUsed reports whether a sandbox needs the image of a digest.
	ImageUsed func(digest string) bool
	// Journalled receives the result of each write of a row.
	Journalled func(error)
	Log        *slog.Logger
}

// Open reads nothing yet: see [Store.Load].
func Open(cfg Config) (*Store, error) {
	err := cfg.DB.Update(func(tx *bolt.Tx) error {
		_, err := tx.CreateBucketIfNotExists(CheckpointsBucket)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make the table of checkpoints: %w", err)
	}
	return &Store{cfg: cfg, verified: verified{checks: map[types.UID]*verification{}}, handles: map[types.UID]*Handle{}, unread: map[types.UID]error{}}, nil
}

// Load reads all rows. Those that cannot be read are kept, with all that has their names, and told.
func (s *Store) Load(unread func(key, value []byte, err error)) error {
	return s.cfg.DB.View(func(tx *bolt.Tx) error {
		return tx.Bucket(CheckpointsBucket).ForEach(func(key, value []byte) error {
			c, err := decode(key, value)
			if err != nil {
				s.mu.Lock()
				s.unread[types.UID(key)] = err
				s.mu.Unlock()
				unread(key, value, err)
				return nil
			}
			s.Of(c.Ref).SetRow(c)
			return nil
		})
	})
}

// decode reads a row, and refuses what could not be acted on.
func decode(key, value []byte) (*Row, error) {
	c := &Row{}
	if err := json.Unmarshal(value, c); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	switch {
	case string(c.Ref.UID) != string(key):
		return nil, fmt.Errorf("checkpoint %q under another key", c.Ref.UID)
	case c.Stage == "" || moves[c.Stage] == nil:
		return nil, fmt.Errorf("stage %q is not known", c.Stage)
	}
	return c, CheckRef(c.Ref)
}

// Of finds or makes what is known of a checkpoint.
func (s *Store) Of(ref sandbox.CheckpointRef) *Handle {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.handles[ref.UID]
	if k == nil {
		k = &Handle{ref: ref}
		s.handles[ref.UID] = k
	}
	return k
}

// RowOf is what the books have of a checkpoint; nil where they have nothing.
func (s *Store) RowOf(uid types.UID) *Row {
	s.mu.Lock()
	k := s.handles[uid]
	s.mu.Unlock()
	if k == nil {
		return nil
	}
	return k.Row()
}

// All returns the handles of all checkpoints, in any order.
func (s *Store) All() []*Handle {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*Handle, 0, len(s.handles))
	for _, k := range s.handles {
		all = append(all, k)
	}
	return all
}

// Unread are the UIDs whose rows cannot be read, and why.
func (s *Store) Unread() map[types.UID]error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.unread)
}

// CheckRead refuses a checkpoint whose row cannot be read.
func (s *Store) CheckRead(ref sandbox.CheckpointRef) error {
	if err := s.Unread()[ref.UID]; err != nil {
		return fmt.Errorf("what the node noted of checkpoint %s/%s cannot be read, and is kept (%w); delete the checkpoint to be rid of it: %w",
			ref.Namespace, ref.Name, err, errs.ErrUnavailable)
	}
	return nil
}

// Named finds the checkpoint of a name: one that can be read from, where there is one.
func (s *Store) Named(namespace, name string) *Handle {
	var found *Handle
	var row *Row
	for _, k := range s.All() {
		r := k.Row()
		if r == nil || k.ref.Namespace != namespace || k.ref.Name != name {
			continue
		}
		better := row == nil || (r.Stage == Ready && (row.Stage != Ready || r.Created.After(row.Created)))
		if better {
			found, row = k, r
		}
	}
	return found
}

// Acquire waits for a checkpoint's turn, and with interrupts, for a removal, ends all that hold it or wait
// for it before. The context that it returns ends with an interruption. done gives the turn back, and
// forgets a checkpoint of which nothing is left.
func (s *Store) Acquire(ctx context.Context, ref sandbox.CheckpointRef, interrupts bool) (_ context.Context, k *Handle, done func(), err error) {
	ctx, release, err := s.locks.Acquire(ctx, ref.UID, interrupts)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("wait for checkpoint %s/%s: %w: %w", ref.Namespace, ref.Name, err, errs.ErrUnavailable)
	}
	k = s.Of(ref)
	return ctx, k, func() {
		if k.Row() == nil {
			s.mu.Lock()
			delete(s.handles, ref.UID)
			s.mu.Unlock()
		}
		release()
	}, nil
}

// Holder reports whether the lock of a checkpoint is held, and whether its holder was interrupted.
func (s *Store) Holder(uid types.UID) (held, interrupted bool) { return s.locks.Holder(uid) }

// Row is the checkpoint's row; nil where there is none.
func (k *Handle) Row() *Row {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.row
}

// SetRow replaces the row in memory. The caller holds the checkpoint's lock.
func (k *Handle) SetRow(c *Row) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.row = c
}

// Open has a reader read what is ready; release ends that, and may be called more than once.
func (k *Handle) Open() (c *Row, release func(), ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.row == nil || k.row.Stage != Ready {
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
func (k *Handle) awaitReaders(ctx context.Context) error {
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

// Move writes a row with its next stage, and refuses a transition that the table lacks.
func (s *Store) Move(k *Handle, c *Row, to Stage) error {
	var from Stage
	if was := k.Row(); was != nil {
		from = was.Stage
	}
	if !slices.Contains(moves[from], to) {
		return fmt.Errorf("checkpoint %s/%s: no transition from stage %q to %q: %w", k.ref.Namespace, k.ref.Name, from, to, errs.ErrConflict)
	}
	changed := *c
	changed.Stage = to
	value, err := json.Marshal(&changed)
	if err != nil {
		return fmt.Errorf("encode row of checkpoint %s/%s: %w", k.ref.Namespace, k.ref.Name, err)
	}
	err = s.cfg.DB.Update(func(tx *bolt.Tx) error { return tx.Bucket(CheckpointsBucket).Put([]byte(k.ref.UID), value) })
	s.cfg.Journalled(err)
	if err != nil {
		return fmt.Errorf("write row of checkpoint %s/%s: %w: %w", k.ref.Namespace, k.ref.Name, err, errs.ErrUnavailable)
	}
	k.SetRow(&changed)
	*c = changed
	return nil
}

// Erase removes a checkpoint with all its data, its row last. It may be repeated.
func (s *Store) Erase(ctx context.Context, k *Handle) error {
	failures := []error{memimage.Remove(s.MemoryDir(k.ref.UID)), s.removeData(ctx, k.ref.UID), s.dropBase(ctx, k)}
	if err := errors.Join(failures...); err != nil {
		return errs.Retryable(err)
	}
	failpoint.Reach("checkpoint/removed")
	err := s.cfg.DB.Update(func(tx *bolt.Tx) error { return tx.Bucket(CheckpointsBucket).Delete([]byte(k.ref.UID)) })
	if err != nil {
		return fmt.Errorf("clear row of checkpoint %s/%s: %w: %w", k.ref.Namespace, k.ref.Name, err, errs.ErrUnavailable)
	}
	failpoint.Reach("checkpoint/gone")
	s.verified.remove(k.ref.UID)
	k.SetRow(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.unread, k.ref.UID)
	return nil
}

// Find is what is known of a checkpoint; nil where that is nothing.
func (s *Store) Find(uid types.UID) *Handle {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.handles[uid]
}

// Size is about how many bytes it has.
func (c *Row) Size() int64 {
	if c.Memory == nil {
		return c.FilesSize
	}
	return c.FilesSize + c.Memory.Size
}
