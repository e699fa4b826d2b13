package volumes_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/volumes"
)

var ref = volumetree.Ref{Namespace: "team", Name: "data", UID: "uid-1"}

// plain is a machine without disks.
func plain() *disk.Store { return disk.Unavailable(errs.ErrUnavailable) }

func open(t *testing.T, dir string, users ...string) *volumes.Store {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: files get owners")
	}
	s, err := volumes.Open(dir, plain(), func(types.NamespacedName) []string { return users }, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// made returns a store with one volume, whose file takes a mebibyte.
func made(t *testing.T, dir string, users ...string) *volumes.Store {
	t.Helper()
	s := open(t, dir, users...)
	for range 2 { // also again
		if err := s.Make(t.Context(), ref, 1<<30, nil); err != nil {
			t.Fatal(err)
		}
	}
	tree, err := s.Tree(ref)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tree.Close() }()
	if _, _, err := tree.Write("f", strings.NewReader(strings.Repeat("x", 1<<20)), false, volumetree.Attributes{}); err != nil {
		t.Fatal(err)
	}
	return s
}

// What was left half-made or half-removed is removed, and what is whole stays.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	made(t, dir)
	for _, name := range []string{".making-x/data/deep", ".removed-y/data", "team/data/uploads"} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, name), 0o700), os.WriteFile(filepath.Join(dir, name, "upload-1"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	s := open(t, dir)
	if err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
	if uploads, err := os.ReadDir(filepath.Join(dir, "team/data/uploads")); err != nil || len(uploads) != 0 {
		t.Errorf("uploads: %v, %v", uploads, err)
	}
	if all, err := s.List(); err != nil || len(all) != 1 || all[0] != ref {
		t.Errorf("volumes: %v, %v", all, err)
	}
}

func TestRemove(t *testing.T) {
	dir := t.TempDir()
	if err := made(t, dir, "b", "a").Remove(t.Context(), ref); !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), "a, b") {
		t.Errorf("a mounted one: %v", err)
	}
	s := open(t, dir)
	if _, err := s.Source(ref.Key()); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := s.Remove(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if _, err := s.Source(ref.Key()); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("mount of one that is gone: %v", err)
	}
}

// A sandbox that begins while the users are read does not get the volume.
func TestRemoveStopsMounts(t *testing.T) {
	dir := t.TempDir()
	made(t, dir)
	var s *volumes.Store
	asked := false
	s, err := volumes.Open(dir, plain(), func(key types.NamespacedName) []string {
		asked = true
		if _, err := s.Source(key); !errors.Is(err, errs.ErrUnavailable) {
			t.Errorf("mount during the removal: %v", err)
		}
		return nil
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(t.Context(), ref); err != nil || !asked {
		t.Errorf("removed: %v, %v", asked, err)
	}
}

// The directory of another volume of the name is neither used nor removed.
func TestOtherVolume(t *testing.T) {
	dir := t.TempDir()
	s := made(t, dir)
	other := ref
	other.UID = "uid-2"
	err := s.Make(t.Context(), other, 1<<30, nil)
	if !errors.Is(err, errs.ErrConflict) {
		t.Errorf("made: %v", err)
	}
	wantNoPath(t, err, dir)
	if _, err := s.Tree(other); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("opened: %v", err)
	}
	if err := s.Remove(t.Context(), other); err != nil {
		t.Errorf("removed: %v", err)
	}
	if _, err := s.Tree(ref); err != nil {
		t.Error(err)
	}
}

func TestTake(t *testing.T) {
	dir := t.TempDir()
	if err := made(t, dir).Take(ref, 1, 0); err != nil {
		t.Errorf("of a new one: %v", err)
	}
	s := open(t, dir) // as after a restart
	if err := s.Take(ref, 1, 0); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("before it is measured: %v", err)
	}
	if u, err := s.Measure(t.Context(), ref, 2<<20); err != nil || u.Files != 1 || u.Bytes < 1<<20 {
		t.Fatalf("measured %+v, %v", u, err)
	}
	if err := s.Take(ref, 1<<19, 1); err != nil {
		t.Error(err)
	}
	if err := s.Take(ref, 1<<20, 0); !errors.Is(err, volumetree.ErrFull) || !strings.Contains(err.Error(), "its capacity is 2Mi; remove files, or raise") {
		t.Errorf("beyond the capacity: %v", err)
	}
	if err := s.Take(ref, 0, volumetree.MaxFiles); !errors.Is(err, volumetree.ErrFull) || !strings.Contains(err.Error(), "it has at most 1000000 files") {
		t.Errorf("beyond the number of files: %v", err)
	}
	if err := s.Take(ref, -(1 << 19), -1); err != nil {
		t.Error(err)
	}
	if err := s.Take(ref, 1<<19, 0); err != nil {
		t.Errorf("after some was returned: %v", err)
	}
	if _, err := s.Measure(t.Context(), ref, 1<<19); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Source(ref.Key()); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("mount of one over its capacity: %v", err)
	}
}

// elsewhere is a Mounter whose volume has a fault.
type elsewhere struct{ reason string }

func (elsewhere) Attach(context.Context, string, string, volumetree.Remote) error { return nil }
func (elsewhere) Detach(context.Context, string, string) error                    { return nil }
func (e elsewhere) Check(string, string) error {
	return &volumetree.RemoteError{Reason: e.reason, Message: e.reason}
}

// One file that could not be uploaded does not keep the others from use.
func TestRemoteFaults(t *testing.T) {
	for reason, usable := range map[string]bool{volumetree.ReasonUploadFailed: true, "EndpointUnreachable": false} {
		dir := t.TempDir()
		s, err := volumes.Open(dir, plain(), func(types.NamespacedName) []string { return nil }, elsewhere{reason})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Make(t.Context(), ref, 0, &volumetree.Remote{}); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Source(ref.Key()); (err == nil) != usable {
			t.Errorf("%s: error %v", reason, err)
		}
	}
}

// The condition of a Volume shows why it cannot be made, and users see that.
func TestErrorsHaveNoPaths(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	if err := os.WriteFile(filepath.Join(dir, ref.Namespace), nil, 0o600); err != nil { // where a directory belongs
		t.Fatal(err)
	}
	err := s.Make(t.Context(), ref, 1<<30, nil)
	if !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("made: %v", err)
	}
	wantNoPath(t, err, dir)
	if text := errs.Text(err); !strings.HasSuffix(text, "not a directory") {
		t.Errorf("the text has no cause: %s", text)
	}
}

func wantNoPath(t *testing.T, err error, dir string) {
	t.Helper()
	if text := errs.Text(err); strings.Contains(text, dir) || !strings.Contains(err.Error(), dir) {
		t.Errorf("the text for users has a path of the host, or the log has none: %s; %v", text, err)
	}
}
