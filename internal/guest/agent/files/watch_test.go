package files

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
)

// The kernel's note of what a listing has shown may be read late; that of another file at the same
// path is news.
func TestListedOnce(t *testing.T) {
	dir := t.TempDir()
	w := &watch{listed: map[string]listing{}}
	list := func(name string, ago time.Duration) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		w.listed[path] = listing{time.Now().Add(-ago), file}
		return path
	}
	late, gone, replaced := list("late", doubleWithin/2), list("gone", 0), list("replaced", 0)
	if err := errors.Join(os.Remove(gone), os.Rename(list("other", 0), replaced)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]bool{late: true, gone: true, replaced: false, list("old", 2*doubleWithin): false, dir: false} {
		if got := w.wasListed(path); got != want {
			t.Errorf("%s: already reported: %v", path, got)
		}
	}
	if w.wasListed(late) {
		t.Error("two notes are taken for one")
	}
}

// A file may be uploaded and replaced before a watch reads the first of the kernel's notes.
func TestWatchReportsEachUpload(t *testing.T) {
	up, path := NewUploads(), "/d/f"
	up.remember(path, false)
	up.remember(path, true)
	failed := up.remember(path, true)
	up.forget(path, failed)
	w := &watch{uploads: up, reported: map[string]placed{}}
	for i, want := range []bool{false, true, true} { // the last event is another program's rename
		if got, ok := w.nextUpload(path); !ok || got.replaced != want {
			t.Errorf("note %d: %+v, %v, want replaced %v", i, got, ok, want)
		}
	}
	if got, ok := w.nextUpload("/d/other"); ok {
		t.Errorf("never uploaded, yet %+v", got)
	}
}

// A watcher that is created while the agent stops would never be removed.
func TestNoWatcherWhileStopping(t *testing.T) {
	ws := NewWatchers()
	ws.CloseAll()
	w, err := newWatch(t.TempDir(), false, false, account.Database{}, NewUploads())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ws.add(w); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("a watcher: %v", err)
	}
	if err := w.close(); err != nil {
		t.Error(err)
	}
}
