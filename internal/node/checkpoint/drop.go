package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// eraseTimeout bounds the removal of a checkpoint after its request has ended.
const eraseTimeout = time.Minute

// CapturedOf returns the node's data of a checkpoint. An incomplete one is an errs.ErrNotFound; one being
// written now, or with an unreadable row, is an errs.ErrUnavailable.
func (s *Store) CapturedOf(ref sandbox.CheckpointRef) (sandbox.Captured, error) {
	if err := s.CheckRead(ref); err != nil {
		return sandbox.Captured{}, err
	}
	c := s.RowOf(ref.UID)
	held, _ := s.Holder(ref.UID)
	if c != nil && c.Stage == Writing && held {
		return sandbox.Captured{}, fmt.Errorf("checkpoint %s/%s is being written: %w", ref.Namespace, ref.Name, errs.ErrUnavailable)
	}
	if c == nil || c.Stage != Ready {
		return sandbox.Captured{}, fmt.Errorf("checkpoint %s/%s is not on this node: %w", ref.Namespace, ref.Name, errs.ErrNotFound)
	}
	return s.Captured(c), nil
}

// Complete returns all complete checkpoints, in any order.
func (s *Store) Complete() []sandbox.Captured {
	var all []sandbox.Captured
	for _, k := range s.All() {
		if c := k.Row(); c != nil && c.Stage == Ready {
			all = append(all, s.Captured(c))
		}
	}
	return all
}

// Remove removes a checkpoint, also while it is being created. It returns nil only when nothing of it
// remains, and may be repeated. It refuses new sandboxes from it, and waits for those being created: if that
// exceeds ctx, it is an errs.ErrUnavailable.
func (s *Store) Remove(ctx context.Context, ref sandbox.CheckpointRef) error {
	if err := CheckRef(ref); err != nil {
		return err
	}
	ctx, k, done, err := s.Acquire(ctx, ref, true)
	if err != nil {
		return err
	}
	defer done()
	if err := s.drop(ctx, k); err != nil {
		return fmt.Errorf("remove checkpoint %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	s.cfg.Log.InfoContext(ctx, "checkpoint removed", telemetry.Namespace, ref.Namespace, "checkpoint", ref.Name)
	return nil
}

// drop removes a checkpoint. The caller holds its lock.
func (s *Store) drop(ctx context.Context, k *Handle) error {
	if c := k.Row(); c != nil && c.Stage != Dropping {
		if err := s.Move(k, new(*c), Dropping); err != nil {
			return err
		}
		failpoint.Reach("checkpoint/dropping")
	}
	if err := k.awaitReaders(ctx); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), eraseTimeout)
	defer cancel()
	return s.Erase(limited, k)
}

// removeData removes the data of a checkpoint with containers of these names. Without names it removes those that it finds.
func (s *Store) removeData(ctx context.Context, uid types.UID, names []string) (err error) {
	if names == nil {
		if names, err = s.committed(ctx, uid); err != nil {
			return err
		}
	}
	failures := []error{memimage.Remove(s.MemoryDir(uid))}
	for _, name := range names {
		failures = append(failures, s.cfg.Containerd.RemoveCopy(ctx, Snapshot(uid, name)))
	}
	if err := volumetree.RemoveAll(ctx, s.Dir(uid)); err != nil {
		failures = append(failures, fmt.Errorf("remove files of a checkpoint: %w", err))
	}
	return errors.Join(failures...)
}

// committed returns the names of the containers whose files were committed, besides the first one's.
func (s *Store) committed(ctx context.Context, uid types.UID) (names []string, err error) {
	all, err := s.cfg.Containerd.Committed(ctx)
	names = []string{""}
	for _, one := range all {
		if name, ok := strings.CutPrefix(one.Name, Snapshot(uid, "")+"/"); ok {
			names = append(names, name)
		}
	}
	return names, err
}

// LoadLogged reads all rows, and logs unreadable ones.
func (s *Store) LoadLogged(ctx context.Context) error {
	err := s.Load(func(key, value []byte, err error) {
		s.cfg.Log.ErrorContext(ctx, "unreadable checkpoint row kept with its data",
			"key", fmt.Sprintf("%q", key), "value", fmt.Sprintf("%q", value), telemetry.Error, err)
	})
	if err != nil {
		return fmt.Errorf("read rows of checkpoints: %w", err)
	}
	return nil
}

// Settle removes checkpoints that were being written or removed when an earlier process ended. It skips those in use. A failure
// is logged; the next scan retries.
func (s *Store) Settle(ctx context.Context) (undone int) {
	for _, k := range s.All() {
		c := k.Row()
		if held, _ := s.Holder(k.ref.UID); c == nil || c.Stage == Ready || held {
			continue
		}
		ctx, k, done, err := s.Acquire(ctx, k.ref, false)
		if err != nil {
			return undone
		}
		if c := k.Row(); c != nil && c.Stage != Ready {
			limited, cancel := context.WithTimeout(ctx, eraseTimeout)
			if err := s.drop(limited, k); err != nil {
				s.cfg.Log.WarnContext(ctx, "checkpoint cannot be removed yet", telemetry.Namespace, k.ref.Namespace, "checkpoint", k.ref.Name, telemetry.Error, err)
			} else {
				undone++
			}
			cancel()
		}
		done()
	}
	return undone
}

// Orphans finds data of checkpoints without a row, by UID, as lines for operators; and rows with missing data.
func (s *Store) Orphans(ctx context.Context) (orphans map[types.UID][]string, incomplete []string, err error) {
	rows := map[types.UID]*Row{}
	addKnown := func() {
		for _, k := range s.All() {
			if c := k.Row(); c != nil {
				rows[k.ref.UID] = c
			}
		}
	}
	addKnown()
	all, err := s.pieces(ctx)
	if err != nil {
		return nil, nil, err
	}
	addKnown() // those created meanwhile
	orphans = map[types.UID][]string{}
	unread := s.Unread()
	has := map[types.UID]int{}
	for _, one := range all {
		if one.always {
			has[one.uid]++
		}
		if _, kept := unread[one.uid]; rows[one.uid] == nil && !kept {
			orphans[one.uid] = append(orphans[one.uid], one.name)
		}
	}
	for uid, c := range rows {
		if c.Stage == Ready && has[uid] < 1+len(c.Plan.Names()) {
			incomplete = append(incomplete, fmt.Sprintf("checkpoint %s/%s (%s), with missing files", c.Ref.Namespace, c.Ref.Name, uid))
		}
	}
	return orphans, incomplete, nil
}

// piece is data of a checkpoint, named for operators. Every checkpoint has a directory, and a snapshot for each container.
type piece struct {
	uid  types.UID
	name string
	// always is false for data that not every checkpoint has.
	always bool
}

// pieces lists the directories, containerd snapshots and encrypted memory of checkpoints.
func (s *Store) pieces(ctx context.Context) (all []piece, err error) {
	dirs, err := os.ReadDir(s.Root())
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	failures := []error{err}
	for _, dir := range dirs {
		all = append(all, piece{types.UID(dir.Name()), "checkpoint directory " + dir.Name(), true})
	}
	committed, err := s.cfg.Containerd.Committed(ctx)
	failures = append(failures, err)
	for _, one := range committed {
		if uid, ok := strings.CutPrefix(one.Name, prefix); ok {
			uid, _, _ = strings.Cut(uid, "/")
			all = append(all, piece{types.UID(uid), "checkpoint snapshot " + one.Name, true})
		}
	}
	for _, dir := range s.cfg.Memory.CheckpointDirs() {
		names, err := memimage.List(dir)
		failures = append(failures, err)
		for _, name := range names {
			all = append(all, piece{types.UID(name), "memory of checkpoint " + name, false})
		}
	}
	return all, errors.Join(failures...)
}

// dropStray removes data of checkpoints without a row. None may be in creation.
func (s *Store) dropStray(ctx context.Context) error {
	orphans, incomplete, err := s.Orphans(ctx)
	failures := []error{err}
	for uid, what := range orphans {
		s.cfg.Log.InfoContext(ctx, "removing leftovers of a checkpoint without row", "uid", uid, "what", what)
		if err := CheckRef(sandbox.CheckpointRef{UID: uid}); err != nil {
			failures = append(failures, err)
			continue
		}
		failures = append(failures, s.removeData(ctx, uid, nil))
	}
	for _, what := range incomplete {
		s.cfg.Log.ErrorContext(ctx, "checkpoint has missing files", "what", what)
	}
	return errors.Join(failures...)
}

// Adopt settles the checkpoints of an earlier process.
func (s *Store) Adopt(ctx context.Context) {
	began := time.Now()
	undone := s.Settle(ctx)
	if err := s.dropStray(ctx); err != nil {
		s.cfg.Log.WarnContext(ctx, "cannot remove all data without a checkpoint", telemetry.Error, err)
	}
	if undone > 0 {
		s.cfg.Log.InfoContext(ctx, "removed incomplete checkpoints", "undone", undone, telemetry.Duration, time.Since(began))
	}
}

// Destroy removes all checkpoints, unreadable ones too.
func (s *Store) Destroy(ctx context.Context) error {
	failures := []error{s.Load(func([]byte, []byte, error) {})}
	refs := []sandbox.CheckpointRef{}
	for uid := range s.Unread() {
		refs = append(refs, sandbox.CheckpointRef{UID: uid})
	}
	for _, k := range s.All() {
		refs = append(refs, k.ref)
	}
	for _, ref := range refs {
		failures = append(failures, s.Erase(ctx, s.Of(ref)))
	}
	return errors.Join(append(failures, s.dropStray(ctx))...)
}
