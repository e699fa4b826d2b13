package files

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
)

// doubleWithin is how long after a directory's first listing the kernel's note
// of what that listing has shown may still be read.
const doubleWithin = 10 * time.Second

// watch translates inotify events of a directory. One goroutine
// at a time may use it.
type watch struct {
	root      string
	recursive bool
	entries   bool
	accounts  account.Database
	uploads   *Uploads
	notify    *fsnotify.Watcher
	listed    map[string]listing // reported by a listing already
	swept     time.Time          // when listed was last gone through
	reported  map[string]placed  // the last reported upload of each path
	marks     string             // see mark
	marked    func(path string)
}

// listing is what a listing found at a path.
type listing struct {
	at   time.Time
	file os.FileInfo // nil: gone at once
}

// newWatch watches from its return on; close it.
func newWatch(root string, recursive, entries bool, acc account.Database, up *Uploads) (*watch, error) {
	n, err := fsnotify.NewBufferedWatcher(4096)
	if err != nil {
		return nil, err
	}
	w := &watch{
		root: root, recursive: recursive, entries: entries, accounts: acc, uploads: up,
		notify: n, listed: map[string]listing{}, reported: map[string]placed{},
	}
	if err = n.Add(root); err == nil && recursive {
		_, err = w.descend(root)
	}
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return w, nil
}

// mark makes a directory which the same kernel queue reports, so that a change there shows how
// far that has been read. Watches leave it out. It may fail.
func (w *watch) mark() {
	dir, err := os.MkdirTemp("", stagePrefix+"marks-")
	if err != nil {
		return
	}
	if err := w.notify.Add(dir); err != nil {
		_ = os.Remove(dir)
		return
	}
	w.marks = dir
}

func (w *watch) close() error {
	if w.marks != "" {
		_ = os.RemoveAll(w.marks) // in a directory of temporary files
	}
	return w.notify.Close()
}

// descend watches all directories below dir, and lists what it finds there.
func (w *watch) descend(dir string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, os.ErrNotExist):
			return nil // gone meanwhile
		case err != nil:
			return err
		case path == dir:
			return nil
		}
		found = append(found, path)
		if !d.IsDir() {
			return nil
		}
		if err := w.notify.Add(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	})
	return found, err
}

// translate makes events of one note of the kernel.
func (w *watch) translate(n fsnotify.Event) ([]*filesystempb.FilesystemEvent, error) {
	if isStaged(n.Name) {
		if w.marked != nil && n.Op.Has(fsnotify.Create) {
			w.marked(n.Name)
		}
		return nil, nil
	}
	var events []*filesystempb.FilesystemEvent
	known := n.Op.Has(fsnotify.Create) && w.wasListed(n.Name) // with all that is in it
	for _, t := range w.types(n, known) {
		events = append(events, w.event(n.Name, t))
	}
	if n.Op.Has(fsnotify.Remove) || n.Op.Has(fsnotify.Rename) {
		w.dropBelow(n.Name)
	}
	if !n.Op.Has(fsnotify.Create) || !w.recursive || known {
		return events, nil
	}
	below, err := w.welcome(n.Name)
	for _, path := range below {
		events = append(events, w.event(path, filesystempb.EventType_EVENT_TYPE_CREATE))
	}
	return events, err
}

// types are what happened, in the order in which it must have. known means that the creation
// was reported already.
func (w *watch) types(n fsnotify.Event, known bool) []filesystempb.EventType {
	var types []filesystempb.EventType
	if n.Op.Has(fsnotify.Create) && !known {
		upload, uploaded := w.nextUpload(w.realPath(n.Name))
		if !upload.replaced {
			types = append(types, filesystempb.EventType_EVENT_TYPE_CREATE)
		}
		if uploaded {
			types = append(types, filesystempb.EventType_EVENT_TYPE_WRITE)
		}
	}
	for _, k := range []struct {
		op fsnotify.Op
		t  filesystempb.EventType
	}{
		{fsnotify.Rename, filesystempb.EventType_EVENT_TYPE_RENAME},
		{fsnotify.Chmod, filesystempb.EventType_EVENT_TYPE_CHMOD},
		{fsnotify.Write, filesystempb.EventType_EVENT_TYPE_WRITE},
		{fsnotify.Remove, filesystempb.EventType_EVENT_TYPE_REMOVE},
	} {
		if n.Op.Has(k.op) {
			types = append(types, k.t)
		}
	}
	return types
}

// nextUpload is the upload that a creation shows, if it does. Each shows the next one: the
// file may have been replaced several times before the first note of the kernel is read.
func (w *watch) nextUpload(path string) (placed, bool) {
	upload, ok := w.uploads.lookup(path, w.reported[path].number)
	for p, t := range w.reported {
		if time.Since(t.at) > placedFor {
			delete(w.reported, p)
		}
	}
	if ok {
		w.reported[path] = upload
	}
	return upload, ok
}

// realPath is where an upload to path would have gone.
func (w *watch) realPath(path string) string {
	if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		return filepath.Join(dir, filepath.Base(path))
	}
	return path
}

// welcome watches a new directory and returns the entries that it already has.
func (w *watch) welcome(path string) ([]string, error) {
	st, err := os.Lstat(path)
	if err != nil || !st.IsDir() {
		return nil, nil //nolint:nilerr // what is gone by now needs no watch
	}
	if err := w.notify.Add(path); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		return nil, err
	}
	found, err := w.descend(path)
	now := time.Now()
	fresh := found[:0]
	for _, f := range found {
		if !isStaged(f) {
			file, err := os.Lstat(f)
			if err != nil {
				file = nil
			}
			w.listed[f] = listing{now, file}
			fresh = append(fresh, f)
		}
	}
	return fresh, err
}

// wasListed reports whether a creation was reported already: that of another file
// at the same path was not.
func (w *watch) wasListed(path string) bool {
	found, ok := w.listed[path]
	delete(w.listed, path)
	if time.Since(w.swept) > doubleWithin { // there may be many
		w.swept = time.Now()
		for p, l := range w.listed {
			if time.Since(l.at) > doubleWithin {
				delete(w.listed, p)
			}
		}
	}
	if !ok || time.Since(found.at) > doubleWithin {
		return false
	}
	now, err := os.Lstat(path)
	return err != nil || found.file != nil && os.SameFile(found.file, now)
}

// dropBelow stops watching what was moved away or removed.
func (w *watch) dropBelow(path string) {
	delete(w.listed, path)
	if path == w.root {
		return
	}
	for _, p := range w.notify.WatchList() {
		if p == path || strings.HasPrefix(p, path+"/") {
			// The kernel may have dropped it already.
			_ = w.notify.Remove(p)
		}
	}
}

func (w *watch) event(path string, t filesystempb.EventType) *filesystempb.FilesystemEvent {
	name, err := filepath.Rel(w.root, path)
	if err != nil {
		name = path
	}
	ev := &filesystempb.FilesystemEvent{Name: name, Type: t}
	gone := t == filesystempb.EventType_EVENT_TYPE_REMOVE || t == filesystempb.EventType_EVENT_TYPE_RENAME
	if w.entries && !gone {
		if entry, err := describe(path, w.accounts.Names()); err == nil {
			ev.Entry = entry
		}
	}
	return ev
}
