// Package volumes keeps volumes as directories of the node, and knows how full they are.
//
//	<namespace>/<name>/uid       the UID of the volume's object
//	<namespace>/<name>/disk.img  its disk, which is mounted at disk
//	<namespace>/<name>/disk/data      its files, which sandboxes mount
//	<namespace>/<name>/disk/uploads   files that are being written to it
//	<namespace>/<name>/remote    what a volume elsewhere has in place of a disk, with data, where it is mounted: lock, log and cache of the process that serves it
//	.making-<UID>, .removed-<UID>
//
// A volume is made beside its place and appears by one rename; it disappears by another, and is removed after that. So
// every crash leaves a whole volume, or none and a directory that [Open] removes. It does not know which volumes there should
// be: one without an object stays.
//
// The disk bounds what sandboxes write as they write it. Volumes from before there were disks, and of machines that can have none, have data and
// uploads beside uid: [Store.Measure] counts them; one that is over its capacity takes no uploads, and no sandbox that starts mounts it.
//
// A volume elsewhere is never removed while it is mounted: a removal would reach into it. Its files are neither measured nor bounded.
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
	"syscall"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/node/disk"
)

const (
	uidFile    = "uid"
	diskFile   = "disk.img"
	diskDir    = "disk"
	dataDir    = "data"
	uploadsDir = "uploads"
	remoteDir  = "remote"
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
	dir   string
	disks *disk.Store
	// changes has volumes that uploads have changed.
	changes chan types.NamespacedName
	// users returns the sandboxes of the node that mount a volume.
	users func(types.NamespacedName) []string
	// mounts has the files of volumes elsewhere; nil: there are none.
	mounts Mounter

	mu sync.Mutex
	// known has what was measured.
	// +checklocks:mu
	known map[types.NamespacedName]*use
	// removing has the volumes that no sandbox may begin to mount.
	// +checklocks:mu
	removing map[types.NamespacedName]bool
}

// Mounter mounts volumes that are elsewhere; package remote has one.
type Mounter interface {
	// Attach mounts one at dir, or checks one that is mounted. state is a directory for what that needs.
	Attach(ctx context.Context, dir, state string, at volumetree.Remote) error
	// Check returns why a volume cannot be used now. It does not wait for the backend.
	Check(dir, state string) error
	// Detach unmounts one. After an error it may still be mounted.
	Detach(ctx context.Context, dir, state string) error
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

// bound returns what keeps an upload of so many bytes out, and the remedy.
func (u *use) bound(bytes int64) string {
	if u.measured.Partial || u.measured.Bytes+u.taken.Bytes+bytes <= u.capacity {
		return fmt.Sprintf("it has at most %d files; remove some", volumetree.MaxFiles)
	}
	return fmt.Sprintf("its capacity is %s; remove files, or raise spec.capacity", resource.NewQuantity(u.capacity, resource.BinarySI))
}

// Open reads the directory of all volumes, or makes it, and removes what an earlier process left half-made or half-removed.
// Where disks have a fault, volumes are plain directories.
func Open(dir string, disks *disk.Store, users func(types.NamespacedName) []string, mounts Mounter) (*Store, error) {
	if err := os.MkdirAll(dir, privateMode); err != nil {
		return nil, fmt.Errorf("make directory of volumes: %w", err)
	}
	if err := os.Chmod(dir, privateMode); err != nil {
		return nil, fmt.Errorf("make directory of volumes: %w", err)
	}
	return &Store{dir: dir, disks: disks, users: users, mounts: mounts, changes: make(chan types.NamespacedName, maxChanges), known: map[types.NamespacedName]*use{}, removing: map[types.NamespacedName]bool{}}, nil
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
			err = s.detach(ctx, path)
			if err == nil {
				err = removeTree(ctx, path)
			}
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
		dir := filepath.Join(namespace, v.Name())
		if _, plain := os.Stat(filepath.Join(dir, uploadsDir)); plain != nil {
			dir = filepath.Join(dir, diskDir)
		}
		if failure := volumetree.RemoveUploads(filepath.Join(dir, uploadsDir)); !errors.Is(failure, fs.ErrNotExist) { // not mounted
			err = errors.Join(err, failure)
		}
	}
	return err
}

// removeTree removes a volume that is out of its place.
func removeTree(ctx context.Context, dir string) error {
	if err := disk.Discard(filepath.Join(dir, diskDir)); err != nil {
		return err
	}
	return volumetree.RemoveAll(ctx, dir)
}

// home has data and uploads of a volume. Its disk is mounted, unless it has none.
func (s *Store) home(key types.NamespacedName) (dir string, bounded bool, err error) {
	image, dir := s.path(key, diskFile), s.path(key, diskDir)
	if _, err := os.Stat(image); errors.Is(err, fs.ErrNotExist) {
		return s.path(key), false, nil
	}
	mounted, err := s.disks.Attach(image, dir)
	if mounted { // uploads of a process before the machine ended
		err = volumetree.RemoveUploads(filepath.Join(dir, uploadsDir))
	}
	return dir, true, err
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
		return withoutPaths("read volume "+ref.Key().String(), err)
	case string(uid) != string(ref.UID):
		cause := fmt.Errorf("%s is of volume %s: %w", s.path(ref.Key()), uid, errs.ErrConflict)
		return errs.Public(cause, fmt.Sprintf("the node has files of an earlier volume %s; its operator moves them away, or choose another name", ref.Key()))
	}
	return nil
}

// Make makes a volume of a capacity in bytes, and mounts it if it is elsewhere; one that exists is no error. A volumetree.RemoteError says why
// its files cannot be reached.
func (s *Store) Make(ctx context.Context, ref volumetree.Ref, capacity int64, at *volumetree.Remote) error {
	err := s.check(ref)
	if errors.Is(err, errs.ErrNotFound) {
		temp, namespace := filepath.Join(s.dir, making+string(ref.UID)), filepath.Join(s.dir, ref.Namespace)
		if err = s.makeAt(ctx, temp, namespace, ref, capacity, at != nil); err != nil {
			return withoutPaths("make volume "+ref.Key().String(), err)
		}
		failpoint.Reach("volume/made")
		if at == nil { // or the first upload would be refused until it is measured
			s.mu.Lock()
			s.known[ref.Key()] = &use{uid: ref.UID, capacity: capacity}
			s.mu.Unlock()
		}
	}
	switch {
	case err != nil || at == nil:
		return err
	case s.mounts == nil:
		return fmt.Errorf("volume %s is elsewhere, and this node mounts none: %w", ref.Key(), errs.ErrUnavailable)
	}
	return s.mounts.Attach(ctx, s.path(ref.Key(), dataDir), s.path(ref.Key(), remoteDir), *at)
}

// withoutPaths is errs.Retryable with a text for users that has no path of the host: conditions of Volumes show it.
func withoutPaths(action string, err error) error {
	if _, ok := errs.PublicMessage(err); ok {
		return errs.Retryable(fmt.Errorf("%s: %w", action, err))
	}
	text := "the log of the node has the cause"
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		text = errno.Error()
	}
	return errs.Public(errs.Retryable(fmt.Errorf("%s: %w", action, err)), action+": "+text)
}

// remote reports whether a volume is elsewhere.
func (s *Store) remote(key types.NamespacedName) bool {
	_, err := os.Lstat(s.path(key, remoteDir))
	return err == nil
}

// detach unmounts what is mounted in the directory of a volume.
func (s *Store) detach(ctx context.Context, dir string) error {
	if s.mounts == nil {
		return nil
	}
	return s.mounts.Detach(ctx, filepath.Join(dir, dataDir), filepath.Join(dir, remoteDir))
}

// DetachAll unmounts all volumes, before their directories are removed.
func (s *Store) DetachAll(ctx context.Context) error {
	all, err := s.List()
	for _, ref := range all {
		err = errors.Join(err, s.detach(ctx, s.path(ref.Key())))
	}
	return err
}

func (s *Store) makeAt(ctx context.Context, temp, namespace string, ref volumetree.Ref, capacity int64, remote bool) error {
	if err := removeTree(ctx, temp); err != nil {
		return err
	}
	for _, dir := range []string{namespace, temp} {
		if err := os.Mkdir(dir, privateMode); err != nil && (dir != namespace || !errors.Is(err, fs.ErrExist)) {
			return err
		}
	}
	home, err := s.makeHome(ctx, temp, capacity, remote)
	if err == nil {
		err = durable.WriteFile(filepath.Join(temp, uidFile), []byte(ref.UID), fileMode)
	}
	if err == nil {
		err = durable.SyncFilesystem(home)
	}
	if err == nil { // with what is mounted below
		err = os.Rename(temp, s.path(ref.Key()))
	}
	if err != nil {
		return err
	}
	return durable.SyncDirs(namespace, s.dir)
}

// makeHome makes the directories of a volume, on a disk of its own if it is not elsewhere, and returns where they are.
func (s *Store) makeHome(ctx context.Context, temp string, capacity int64, remote bool) (home string, err error) {
	home = temp
	if s.disks.Fault() == nil && !remote {
		home = filepath.Join(temp, diskDir)
		if err := s.disks.Mount(ctx, filepath.Join(temp, diskFile), home, capacity); err != nil {
			return "", err
		}
	}
	data := filepath.Join(home, dataDir)
	dirs := []string{data, filepath.Join(home, uploadsDir)}
	if remote {
		dirs = append(dirs, filepath.Join(temp, remoteDir))
	}
	for _, dir := range dirs {
		if err := os.Mkdir(dir, privateMode); err != nil {
			return "", err
		}
	}
	if remote { // nothing is written below the mount
		return home, nil
	}
	return home, errors.Join(os.Chown(data, volumetree.Owner, volumetree.Owner), os.Chmod(data, sharedMode))
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
		if err := s.detach(ctx, s.path(key)); err != nil {
			return errs.Retryable(fmt.Errorf("unmount volume %s: %w", key, err))
		}
		failpoint.Reach("volume/detached")
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
	if err := removeTree(ctx, gone); err != nil {
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
	if s.remote(key) {
		return s.path(key, dataDir), s.usable(key)
	}
	home, bounded, err := s.home(key)
	dir := filepath.Join(home, dataDir)
	if err == nil {
		_, err = os.Stat(dir)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch u := s.known[key]; {
	case errors.Is(err, fs.ErrNotExist) || s.removing[key]:
		return "", fmt.Errorf("volume %q does not exist in namespace %s: %w", key.Name, key.Namespace, errs.ErrUnavailable)
	case err != nil:
		return "", errs.Retryable(fmt.Errorf("find volume: %w", err))
	case u != nil && !bounded && u.over(0, 0):
		return "", fmt.Errorf("volume %q is over its capacity; remove files by the API, or raise spec.capacity: %w", key.Name, errs.ErrUnavailable)
	}
	return dir, nil
}

// usable returns why a volume elsewhere cannot be mounted now; it has the volume looked at again.
func (s *Store) usable(key types.NamespacedName) error {
	s.mu.Lock()
	removing := s.removing[key]
	s.mu.Unlock()
	switch {
	case removing:
		return fmt.Errorf("volume %q does not exist in namespace %s: %w", key.Name, key.Namespace, errs.ErrUnavailable)
	case s.mounts == nil:
		return fmt.Errorf("volume %q is elsewhere, and this node mounts none: %w", key.Name, errs.ErrUnavailable)
	}
	err := s.mounts.Check(s.path(key, dataDir), s.path(key, remoteDir))
	if refused := (*volumetree.RemoteError)(nil); errors.As(err, &refused) && refused.Reason == volumetree.ReasonUploadFailed {
		err = nil
	}
	if err != nil {
		s.changed(key)
		return errs.Public(err, fmt.Sprintf("volume %q cannot be used: %s", key.Name, errs.Text(err)))
	}
	return nil
}

func (s *Store) changed(key types.NamespacedName) {
	select {
	case s.changes <- key:
	default:
	}
}

// Tree opens a volume's files.
func (s *Store) Tree(ref volumetree.Ref) (*volumetree.Tree, error) {
	if err := s.check(ref); err != nil {
		return nil, err
	}
	if key := ref.Key(); s.remote(key) {
		if err := s.usable(key); err != nil {
			return nil, err
		}
		data := s.path(key, dataDir)
		return volumetree.Open(data, data)
	}
	home, _, err := s.home(ref.Key())
	if err != nil {
		return nil, errs.Retryable(err)
	}
	return volumetree.Open(filepath.Join(home, dataDir), filepath.Join(home, uploadsDir))
}

// ownInodes are ext4's, and those of the directories data and uploads.
const ownInodes = 13

// count is how full a volume is. A disk knows; it grows to the capacity.
func (s *Store) count(ctx context.Context, ref volumetree.Ref, capacity int64) (u volumetree.Usage, err error) {
	t, err := s.Tree(ref)
	if err != nil {
		return u, err
	}
	defer func() { _ = t.Close() }()
	home, bounded, err := s.home(ref.Key())
	if err != nil {
		return u, errs.Retryable(err)
	}
	if !bounded {
		return t.Measure(ctx)
	}
	if err := s.disks.Mount(ctx, s.path(ref.Key(), diskFile), home, capacity); err != nil {
		return u, err
	}
	on, err := disk.UsageOf(home)
	if on.Total <= capacity+capacity/64+disk.Slack { // not made for a larger one
		on.Used = min(on.Used, capacity)
	}
	return volumetree.Usage{Bytes: on.Used, Files: max(on.Files-ownInodes, 0)}, err
}

// Measure counts a volume's files, and takes note of its capacity in bytes.
func (s *Store) Measure(ctx context.Context, ref volumetree.Ref, capacity int64) (volumetree.Usage, error) {
	before := s.takenOf(ref)
	u, err := s.count(ctx, ref, capacity)
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
	if s.remote(ref.Key()) {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	u := s.known[ref.Key()]
	if u == nil || u.uid != ref.UID {
		return errs.Public(errs.ErrUnavailable, fmt.Sprintf("volume %q is being measured; try again", ref.Name))
	}
	if (bytes > 0 || files > 0) && u.over(bytes, files) {
		return errs.Public(volumetree.ErrFull, fmt.Sprintf("volume %q is full: %s", ref.Name, u.bound(bytes)))
	}
	u.taken.Bytes += bytes
	u.taken.Files += files
	s.changed(ref.Key())
	return nil
}
