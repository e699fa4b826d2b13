// Package volumes keeps volumes as directories of the node, and knows how full they are.
//
//	<namespace>/<name>/uid       the UID of the volume's object
//	<namespace>/<name>/data      its files, which sandboxes mount
//	<namespace>/<name>/uploads   files that are being written to it
//	.making-<UID>, .removed-<UID>
//
// A volume is made beside its place and appears by one rename; it disappears by another, and is removed after that. So
// every crash leaves a whole volume, or none and a directory that [Open] removes. It does not know which volumes there should
// be: one without an object stays.
//
// What sandboxes write is not bounded as they write it. [Store.Measure] counts it; a volume that is over its capacity takes no uploads, and
// no sandbox that starts mounts it.
//
// Store.mu is held over no call.
package volumes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
)

const (
	uidFile    = "uid"
	dataDir    = "data"
	uploadsDir = "uploads"
	making     = ".making-"
	removed    = ".removed-"

	// maxChanges bounds the reports of uploads that wait for a reader. More are dropped: the next one of the volume makes up for it.
	maxChanges = 1024

	privateMode = 0o700
	fileMode    = 0o600
	// sharedMode lets all users of sandboxes write. Those of the host do not reach the directory.
	sharedMode = 0o777
)

// Store has the volumes of one node. It is safe for concurrent use.
type Store struct {
	dir string
	// changes has volumes that uploads have changed.
	changes chan types.NamespacedName
	// users returns the sandboxes of the node that mount a volume.
	users func(types.NamespacedName) []string

	mu sync.Mutex
	// known has what was measured.
	// +checklocks:mu
	known map[types.NamespacedName]*use
	// removing has the volumes that no sandbox may begin to mount.
	// +checklocks:mu
	removing map[types.NamespacedName]bool
}

// use is how full a volume is; guarded by Store.mu.
type use struct {
	uid      types.UID
	capacity int64
	measured volumetree.Usage
	// taken is what uploads have added since.
	taken volumetree.Usage
}

func (u *use) over(bytes, files int64) bool {
	return u.measured.Partial || u.measured.Bytes+u.taken.Bytes+bytes > u.capacity || u.measured.Files+u.taken.Files+files > volumetree.MaxFiles
}

// Open reads the directory of all volumes, or makes it, and removes what an earlier process left half-made or half-removed.
func Open(dir string, users func(types.NamespacedName) []string) (*Store, error) {
	if err := os.MkdirAll(dir, privateMode); err != nil {
		return nil, fmt.Errorf("make directory of volumes: %w", err)
	}
	if err := os.Chmod(dir, privateMode); err != nil {
		return nil, fmt.Errorf("make directory of volumes: %w", err)
	}
	return &Store{dir: dir, users: users, changes: make(chan types.NamespacedName, maxChanges), known: map[types.NamespacedName]*use{}, removing: map[types.NamespacedName]bool{}}, nil
}

// Sweep removes what interrupted calls have left. Call it before any other method, once.
func (s *Store) Sweep(ctx context.Context) error {
	found, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("remove leftovers of volumes: %w", err)
	}
	for _, e := range found {
		path := filepath.Join(s.dir, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), making), strings.HasPrefix(e.Name(), removed):
			err = volumetree.RemoveAll(ctx, path)
		case e.IsDir():
			err = sweepUploads(path)
		}
		if err != nil {
			return fmt.Errorf("remove leftovers of volumes: %w", err)
		}
	}
	return nil
}

func sweepUploads(namespace string) error {
	volumes, err := os.ReadDir(namespace)
	for _, v := range volumes {
		err = errors.Join(err, volumetree.RemoveUploads(filepath.Join(namespace, v.Name(), uploadsDir)))
	}
	return err
}

// List returns the volumes that have a directory.
func (s *Store) List() (all []volumetree.Ref, err error) {
	uids, err := filepath.Glob(filepath.Join(s.dir, "[^.]*", "*", uidFile))
	for _, file := range uids {
		uid, failure := os.ReadFile(file)
		if errors.Is(failure, fs.ErrNotExist) {
			continue // it is being removed
		}
		err = errors.Join(err, failure)
		dir := filepath.Dir(file)
		all = append(all, volumetree.Ref{Namespace: filepath.Base(filepath.Dir(dir)), Name: filepath.Base(dir), UID: types.UID(uid)})
	}
	if err != nil {
		return nil, fmt.Errorf("list volumes: %w", err)
	}
	return all, nil
}

func (s *Store) path(key types.NamespacedName, name ...string) string {
	return filepath.Join(append([]string{s.dir, key.Namespace, key.Name}, name...)...)
}

// check refuses a directory of the volume's name that is another volume's.
func (s *Store) check(ref volumetree.Ref) error {
	uid, err := os.ReadFile(s.path(ref.Key(), uidFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("volume %s has no files: %w", ref.Key(), errs.ErrNotFound)
	case err != nil:
		return errs.Retryable(fmt.Errorf("read volume %s: %w", ref.Key(), err))
	case string(uid) != string(ref.UID):
		return fmt.Errorf("directory %s belongs to a volume that no longer exists; move it away: %w", s.path(ref.Key()), errs.ErrConflict)
	}
	return nil
}

// Make makes a volume; one that exists is no error.
func (s *Store) Make(ctx context.Context, ref volumetree.Ref) error {
	err := s.check(ref)
	if !errors.Is(err, errs.ErrNotFound) {
		return err
	}
	temp, namespace := filepath.Join(s.dir, making+string(ref.UID)), filepath.Join(s.dir, ref.Namespace)
	if err := s.makeAt(ctx, temp, namespace, ref); err != nil {
		return errs.Retryable(fmt.Errorf("make volume %s: %w", ref.Key(), err))
	}
	failpoint.Reach("volume/made")
	return nil
}

func (s *Store) makeAt(ctx context.Context, temp, namespace string, ref volumetree.Ref) error {
	if err := volumetree.RemoveAll(ctx, temp); err != nil {
		return err
	}
	data := filepath.Join(temp, dataDir)
	for _, dir := range []string{namespace, temp, data, filepath.Join(temp, uploadsDir)} {
		if err := os.Mkdir(dir, privateMode); err != nil && (dir != namespace || !errors.Is(err, fs.ErrExist)) {
			return err
		}
	}
	err := errors.Join(os.Chown(data, volumetree.Owner, volumetree.Owner), os.Chmod(data, sharedMode))
	if err == nil {
		err = durable.WriteFile(filepath.Join(temp, uidFile), []byte(ref.UID), fileMode)
	}
	if err == nil {
		err = os.Rename(temp, s.path(ref.Key()))
	}
	if err != nil {
		return err
	}
	return durable.SyncDirs(namespace, s.dir)
}

// Remove removes a volume with its files; one that does not exist is no error. An errs.ErrConflict names the sandboxes that mount it.
func (s *Store) Remove(ctx context.Context, ref volumetree.Ref) error {
	key := ref.Key()
	gone := filepath.Join(s.dir, removed+string(ref.UID))
	switch err := s.check(ref); {
	case errors.Is(err, errs.ErrConflict):
		return nil // its own files are gone
	case err == nil:
		// Set before the users are read: a sandbox's row is written before it asks for the source.
		s.setRemoving(key, true)
		defer s.setRemoving(key, false)
		if users := s.users(key); len(users) > 0 {
			slices.Sort(users)
			return fmt.Errorf("volume %s is mounted by %s: %w", key, strings.Join(users, ", "), errs.ErrConflict)
		}
		err := os.Rename(s.path(key), gone)
		if err == nil {
			err = durable.SyncDirs(s.path(types.NamespacedName{Namespace: key.Namespace}), s.dir)
		}
		if err != nil {
			return errs.Retryable(fmt.Errorf("remove volume %s: %w", key, err))
		}
		failpoint.Reach("volume/unlinked")
	case !errors.Is(err, errs.ErrNotFound):
		return err
	}
	s.forget(ref)
	if err := volumetree.RemoveAll(ctx, gone); err != nil {
		return errs.Retryable(err)
	}
	_ = os.Remove(filepath.Join(s.dir, key.Namespace)) // if it was the last one
	failpoint.Reach("volume/removed")
	return nil
}

func (s *Store) setRemoving(key types.NamespacedName, on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if on {
		s.removing[key] = true
	} else {
		delete(s.removing, key)
	}
}

func (s *Store) forget(ref volumetree.Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u := s.known[ref.Key()]; u != nil && u.uid == ref.UID {
		delete(s.known, ref.Key())
	}
}

// Source returns the directory that a sandbox mounts. The sandbox's row must be written. One that cannot be mounted now is an errs.ErrUnavailable.
func (s *Store) Source(key types.NamespacedName) (string, error) {
	dir := s.path(key, dataDir)
	_, err := os.Stat(dir)
	s.mu.Lock()
	defer s.mu.Unlock()
	switch u := s.known[key]; {
	case errors.Is(err, fs.ErrNotExist) || s.removing[key]:
		return "", fmt.Errorf("volume %q does not exist in namespace %s: %w", key.Name, key.Namespace, errs.ErrUnavailable)
	case err != nil:
		return "", errs.Retryable(fmt.Errorf("find volume: %w", err))
	case u != nil && u.over(0, 0):
		return "", fmt.Errorf("volume %q is over its capacity; remove files by the API, or raise spec.capacity: %w", key.Name, errs.ErrUnavailable)
	}
	return dir, nil
}

// Tree opens a volume's files.
func (s *Store) Tree(ref volumetree.Ref) (*volumetree.Tree, error) {
	if err := s.check(ref); err != nil {
		return nil, err
	}
	return volumetree.Open(s.path(ref.Key(), dataDir), s.path(ref.Key(), uploadsDir))
}

// Measure counts a volume's files, and takes note of its capacity in bytes.
func (s *Store) Measure(ctx context.Context, ref volumetree.Ref, capacity int64) (volumetree.Usage, error) {
	t, err := s.Tree(ref)
	if err != nil {
		return volumetree.Usage{}, err
	}
	defer func() { _ = t.Close() }()
	before := s.takenOf(ref)
	u, err := t.Measure(ctx)
	if err != nil {
		return u, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := &use{uid: ref.UID, capacity: capacity, measured: u}
	if was := s.known[ref.Key()]; was != nil && was.uid == ref.UID { // what was written during the measurement counts twice, until the next
		now.taken.Bytes, now.taken.Files = was.taken.Bytes-before.Bytes, was.taken.Files-before.Files
	}
	s.known[ref.Key()] = now
	return u, nil
}

func (s *Store) takenOf(ref volumetree.Ref) volumetree.Usage {
	s.mu.Lock()
	defer s.mu.Unlock()
	if u := s.known[ref.Key()]; u != nil && u.uid == ref.UID {
		return u.taken
	}
	return volumetree.Usage{}
}

// Changes delivers volumes that uploads have changed.
func (s *Store) Changes() <-chan types.NamespacedName { return s.changes }

// Take reserves bytes and files of a volume for an upload; negative ones return what was not used. The refusal is a volumetree.ErrFull.
func (s *Store) Take(ref volumetree.Ref, bytes, files int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.known[ref.Key()]
	if u == nil || u.uid != ref.UID {
		return errs.Public(errs.ErrUnavailable, fmt.Sprintf("volume %q is being measured; try again", ref.Name))
	}
	if (bytes > 0 || files > 0) && u.over(bytes, files) {
		return errs.Public(volumetree.ErrFull, fmt.Sprintf("volume %q is full: its capacity is %d bytes and %d files", ref.Name, u.capacity, volumetree.MaxFiles))
	}
	u.taken.Bytes += bytes
	u.taken.Files += files
	select {
	case s.changes <- ref.Key():
	default:
	}
	return nil
}
