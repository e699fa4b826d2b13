// Package checkpoint stores the checkpoints of the node: a row of the database, a directory and a committed
// containerd snapshot for each. It verifies memory once, keeps checkpoints in use,
// and removes leftovers of interruptions. It creates no checkpoint and reads no sandbox: packages capture and transfer write
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
	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/keyedlock"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/memstore"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// A checkpoint is a row of the database, a directory and a committed snapshot, whose names derive
// from the checkpoint's UID:
//
//	<DataDir>/checkpoints/<UID>/memory    the image of the memory, if it has one; encrypted, it is in a directory of package memstore
//	<DataDir>/checkpoints/<UID>/agent     the agent running in it, if it has one
//	<DataDir>/checkpoints/<UID>/volumes   the content of the sandbox's volumes
//	snapshot checkpoint-<UID>             the writes to the first container's copy of its image
//	snapshot checkpoint-<UID>/<name>      those to the copy of another container
//
// The row is written first and deleted last:
//
//	writing → ready → dropping
//
// After a crash the next process removes checkpoints that are writing or dropping. A sandbox reads its
// checkpoint until it is live; the checkpoint is not removed before.

// Stage is the state of a checkpoint on the node.
type Stage string

// The stages.
const (
	Writing  Stage = "writing"  // its data are being written; a restart removes them
	Ready    Stage = "ready"    // it is complete and durable
	Dropping Stage = "dropping" // its data are being removed
)

// moves are the allowed transitions from each stage; those of the empty one begin a row. An import writes its
// row several times.
var moves = map[Stage][]Stage{
	"":       {Writing},
	Writing:  {Writing, Ready, Dropping},
	Ready:    {Dropping},
	Dropping: {},
}

// Row is the database row: what a sandbox created from the checkpoint needs.
type Row struct {
	Stage Stage                 `json:"stage"`
	Ref   sandbox.CheckpointRef `json:"ref"`
	// Plan is the source's.
	Plan plan.Plan `json:"plan"`
	// Images and Program are those of the source's row.
	plan.Images
	Program bool `json:"program,omitempty"`
	// Memory is nil for files only.
	Memory *Memory `json:"memory,omitempty"`
	// FilesSize is bytes beyond the images, of all containers and of volumes.
	FilesSize int64 `json:"filesSize"`
	// Base is the image being imported; nil once the checkpoint is ready, and if the image was here.
	Base *Base `json:"base,omitempty"`
	// Exit is the exit code of the template's program, if it had exited.
	Exit *int32 `json:"exit,omitempty"`
	// Created is when the sandbox was captured; Paused how long it was stopped for that.
	Created time.Time     `json:"created"`
	Paused  time.Duration `json:"paused,omitempty"`
}

// Memory describes the memory in a checkpoint.
type Memory struct {
	Build  memimage.Build `json:"build"`
	Digest string         `json:"digest"`
	Size   int64          `json:"size"`
}

// Captured returns a checkpoint's description for other packages.
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
	return s.cfg.Memory.Checkpoint(string(uid))
}

// AgentFile is the agent that the checkpoint was created with.
func (s *Store) AgentFile(uid types.UID) string {
	return filepath.Join(s.Dir(uid), "agent")
}

// prefix begins the names of checkpoints' snapshots.
const prefix = "checkpoint-"

// Snapshot is the name of a checkpoint's containerd snapshot with the files of a container, whose name is empty for the first.
func Snapshot(uid types.UID, name string) string {
	if name == "" {
		return prefix + string(uid)
	}
	return prefix + string(uid) + "/" + name // a UID has no slash
}

// CheckRef refuses a UID that cannot be a name on the host.
func CheckRef(ref sandbox.CheckpointRef) error {
	if uid := string(ref.UID); uid == "" || uid[0] == '.' || len(uid) > 100 || filepath.Base(uid) != uid || !filepath.IsLocal(uid) {
		return fmt.Errorf("checkpoint %s/%s: UID %q: %w", ref.Namespace, ref.Name, uid, errs.ErrInvalid)
	}
	return nil
}

// CheckpointsBucket has the rows in the node's database.
var CheckpointsBucket = []byte("checkpoints")

// Store has all checkpoints of the node: their rows and handles.
type Store struct {
	cfg       Config
	locks     keyedlock.Lock[types.UID]
	verifying singleflight.Group // by UID

	mu      sync.Mutex
	handles map[types.UID]*Handle // +checklocks:mu
	unread  map[types.UID]error   // +checklocks:mu
}

// Handle is one checkpoint. A change holds its lock, which comes before that of a sandbox.
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
	// Memory has the images of memory.
	Memory *memstore.Store
	// Node is the node's name in descriptions.
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
		return nil, fmt.Errorf("create bucket of checkpoints: %w", err)
	}
	return &Store{cfg: cfg, handles: map[types.UID]*Handle{}, unread: map[types.UID]error{}}, nil
}

// Load reads all rows. Unreadable ones are kept with their data, and passed to unread.
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

// decode reads a row, and refuses one that the node cannot act on.
func decode(key, value []byte) (*Row, error) {
	c := &Row{}
	if err := json.Unmarshal(value, c); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	switch {
	case string(c.Ref.UID) != string(key):
		return nil, fmt.Errorf("checkpoint %q under another key", c.Ref.UID)
	case c.Stage == "" || moves[c.Stage] == nil:
		return nil, fmt.Errorf("unknown stage %q", c.Stage)
	}
	return c, CheckRef(c.Ref)
}

// Of returns the handle of a checkpoint, and creates it if necessary.
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

// RowOf returns the row of a checkpoint; nil if there is none.
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
	return slices.Collect(maps.Values(s.handles))
}

// Unread returns the UIDs of unreadable rows, and the errors.
func (s *Store) Unread() map[types.UID]error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.unread)
}

// CheckRead refuses a checkpoint with an unreadable row.
func (s *Store) CheckRead(ref sandbox.CheckpointRef) error {
	if err := s.Unread()[ref.UID]; err != nil {
		return fmt.Errorf("row of checkpoint %s/%s cannot be read and is kept (%w); delete the checkpoint to remove it: %w",
			ref.Namespace, ref.Name, err, errs.ErrUnavailable)
	}
	return nil
}

// Named finds the checkpoint of a name, preferably a readable one.
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

// Acquire waits for a checkpoint's lock. With interrupts, for a removal, it interrupts the holder and the
// callers before it. The returned context ends with an interruption. done unlocks, and drops the handle of a
// removed checkpoint.
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

// Row returns the checkpoint's row; nil if there is none.
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

// Open registers a reader of a ready checkpoint; release ends that, and may be called more than
// once.
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

// awaitReaders waits until there are no readers. The caller prevents new ones.
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
		return fmt.Errorf("%d sandboxes are being created from it: %w: %w", readers, context.Cause(ctx), errs.ErrUnavailable)
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
	var names []string // of an unreadable row, only what is committed can be found
	if c := k.Row(); c != nil {
		names = c.Plan.Names()
	}
	if err := errors.Join(s.removeData(ctx, k.ref.UID, names), s.dropBase(ctx, k)); err != nil {
		return errs.Retryable(err)
	}
	failpoint.Reach("checkpoint/removed")
	err := s.cfg.DB.Update(func(tx *bolt.Tx) error { return tx.Bucket(CheckpointsBucket).Delete([]byte(k.ref.UID)) })
	if err != nil {
		return fmt.Errorf("clear row of checkpoint %s/%s: %w: %w", k.ref.Namespace, k.ref.Name, err, errs.ErrUnavailable)
	}
	failpoint.Reach("checkpoint/gone")
	k.SetRow(nil)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.unread, k.ref.UID)
	return nil
}

// Find returns the handle of a checkpoint; nil if there is none.
func (s *Store) Find(uid types.UID) *Handle {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.handles[uid]
}

// Size is its approximate size in bytes.
func (c *Row) Size() int64 {
	if c.Memory == nil {
		return c.FilesSize
	}
	return c.FilesSize + c.Memory.Size
}
