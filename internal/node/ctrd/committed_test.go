package ctrd

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// bookImage has directories to take things from.
func bookImage(t *testing.T) v1.Image {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range []string{"kept/", "kept/a", "kept/b", "replaced/", "replaced/old", "gone/", "gone/x", "tmp/"} {
		h := &tar.Header{Name: name, Mode: 0o755, Typeflag: tar.TypeDir}
		if !strings.HasSuffix(name, "/") {
			h.Typeflag, h.Size = tar.TypeReg, int64(len(name))
		}
		must(t, w.WriteHeader(h))
		if h.Size > 0 {
			_, err := io.WriteString(w, name)
			must(t, err)
		}
	}
	must(t, w.Close())
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	must(t, err)
	img, err := mutate.AppendLayers(image(t, "one"), layer)
	must(t, err)
	return img
}

// book is a containerd with the image and one writable snapshot of it, mounted.
func book(t *testing.T) (c *Client, img Image, dir string) {
	t.Helper()
	c = started(t)
	imgs, err := c.Import(t.Context(), tarOf(t, "x.test/book:1", bookImage(t)), 0, "", nil)
	must(t, err)
	rootfs, err := c.Prepare(t.Context(), "k", imgs[0])
	must(t, err)
	return c, imgs[0], mounted(t, rootfs)
}

func mounted(t *testing.T, r Rootfs) string {
	t.Helper()
	dir := t.TempDir()
	must(t, r.Mount(dir))
	t.Cleanup(func() { must(t, Unmount(dir)) })
	return dir
}

// scribble does all that can be done to a tree, except what no image can carry.
func scribble(t *testing.T, dir string) {
	t.Helper()
	in := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.Remove(in("kept/a")))
	must(t, os.RemoveAll(in("gone")))
	must(t, os.RemoveAll(in("replaced")))
	must(t, os.Mkdir(in("replaced"), 0o711))
	must(t, os.WriteFile(in("replaced/new"), []byte("new"), 0o600))
	must(t, os.WriteFile(in("kept/b"), []byte("changed"), 0o640))
	must(t, os.Lchown(in("kept/b"), 1000, 1001))
	must(t, os.WriteFile(in("tool"), []byte("x"), 0o755))
	must(t, os.Chown(in("tool"), 1000, 0))
	must(t, os.Chmod(in("tool"), 0o755|fs.ModeSetuid|fs.ModeSetgid))
	must(t, unix.Setxattr(in("tool"), "user.note", []byte("a\x00b"), 0))
	must(t, unix.Setxattr(in("tool"), "security.capability", []byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	must(t, os.Symlink("/etc/passwd", in("link")))
	must(t, os.Lchown(in("link"), 7, 8))
	must(t, os.Link(in("tool"), in("kept/tool2")))
	must(t, unix.Mkfifo(in("fifo"), 0o622))
	must(t, unix.Mknod(in("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, os.Mkdir(in("sticky"), 0o777))
	must(t, os.Chmod(in("sticky"), 0o777|fs.ModeSticky))
	must(t, os.WriteFile(in("sticky/odd\nname \xff"), []byte("odd"), 0o600))
	f, err := os.Create(in("sparse"))
	must(t, err)
	must(t, f.Truncate(64<<20))
	_, err = f.WriteAt([]byte("middle"), 30<<20)
	must(t, err)
	must(t, f.Close())
	for _, name := range []string{"tool", "link", "sticky", "kept", "fifo"} {
		old := []unix.Timespec{{Sec: 1e9, Nsec: 123456789}, {Sec: 1e9 + 5, Nsec: 987654321}}
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, in(name), old, unix.AT_SYMLINK_NOFOLLOW))
	}
}

// tell describes all that can be seen of a tree.
func tell(t *testing.T, dir string) map[string]string {
	t.Helper()
	told := map[string]string{}
	inodes := map[uint64]string{}
	must(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		var st unix.Stat_t
		must(t, unix.Lstat(path, &st))
		first, ok := inodes[st.Ino]
		if !ok {
			first, inodes[st.Ino] = rel, rel
		}
		line := fmt.Sprintf("mode=%o owner=%d:%d dev=%x time=%d.%d same=%q", st.Mode, st.Uid, st.Gid, st.Rdev, st.Mtim.Sec, st.Mtim.Nsec, first)
		attrs, err := attributes(path)
		must(t, err)
		for _, name := range slices.Sorted(maps.Keys(attrs)) {
			line += fmt.Sprintf(" %s=%q", name, attrs[name])
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			f, err := os.Open(path)
			must(t, err)
			defer func() { _ = f.Close() }()
			sum := sha256.New()
			_, err = io.Copy(sum, f)
			must(t, err)
			line += fmt.Sprintf(" size=%d sum=%x", st.Size, sum.Sum(nil)[:6])
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			must(t, err)
			line += " to=" + target
		}
		told[rel] = line
		return nil
	}))
	return told
}

func same(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	for name := range want {
		if got[name] != want[name] {
			t.Errorf("%s: %q is\n%s, want\n%s", what, name, got[name], want[name])
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%s: %q is there", what, name)
		}
	}
}

// collect runs containerd's collector now.
func collect(t *testing.T, c *Client) {
	t.Helper()
	l, err := c.api.LeasesService().Create(t.Context(), leases.WithRandomID())
	must(t, err)
	must(t, c.api.LeasesService().Delete(t.Context(), l, leases.SynchronousDelete))
}

func TestCopySnapshotHasAll(t *testing.T) {
	c, _, dir := book(t)
	scribble(t, dir)
	must(t, unix.Mknod(filepath.Join(dir, "socket"), unix.S_IFSOCK|0o600, 0))
	deep := dir
	for range 30 {
		deep = filepath.Join(deep, strings.Repeat("d", 100))
		must(t, os.Mkdir(deep, 0o755))
	}
	want := tell(t, dir)
	calls := 0
	made, err := c.CopySnapshot(t.Context(), "k", "copy", func() {
		calls++
		must(t, os.WriteFile(filepath.Join(dir, "later"), []byte("x"), 0o600)) // the source goes on
	})
	must(t, err)
	if made.Name != "copy" || made.Size == 0 || made.Size > 8<<20 || calls != 1 {
		t.Errorf("made %+v, %d calls", made, calls)
	}
	// Any number start from it at the same time, and none sees the others.
	var wg sync.WaitGroup
	rootfs, failures := make([]Rootfs, 4), make([]error, 4)
	for i := range rootfs {
		wg.Go(func() { rootfs[i], failures[i] = c.PrepareFrom(t.Context(), fmt.Sprint("fork", i), "copy") })
	}
	wg.Wait()
	must(t, errors.Join(failures...))
	for i, r := range rootfs {
		at := mounted(t, r)
		same(t, r.Key, tell(t, at), want)
		must(t, os.WriteFile(filepath.Join(at, "mine"), []byte{byte(i)}, 0o600))
	}
	if again, err := c.PrepareFrom(t.Context(), "fork0", "copy"); err != nil || !slices.EqualFunc(again.mounts, rootfs[0].mounts, func(a, b mount.Mount) bool { return fmt.Sprint(a) == fmt.Sprint(b) }) {
		t.Errorf("again: %+v, %v", again, err)
	}
}

func TestCommitSnapshotIsRepeatable(t *testing.T) {
	c, _, dir := book(t)
	scribble(t, dir)
	want := tell(t, dir)
	must(t, Unmount(dir))
	for range 2 {
		made, err := c.CommitSnapshot(t.Context(), "k", "one")
		if err != nil || made.Name != "one" || made.Size == 0 {
			t.Fatalf("%+v, %v", made, err)
		}
	}
	if keys, err := c.Snapshots(t.Context()); err != nil || len(keys) != 0 {
		t.Errorf("writable ones %v, %v", keys, err)
	}
	next, err := c.PrepareFrom(t.Context(), "k", "one") // the key is free
	must(t, err)
	same(t, "resumed", tell(t, mounted(t, next)), want)
	if _, err := c.CommitSnapshot(t.Context(), "k", "one"); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("a name that is taken: %v", err)
	}
	if _, err := c.CopySnapshot(t.Context(), "k", "one", nil); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("a copy to a name that is taken: %v", err)
	}
	for name, err := range map[string]error{
		"commit":  second(c.CommitSnapshot(t.Context(), "none", "two")),
		"copy":    second(c.CopySnapshot(t.Context(), "none", "two", nil)),
		"prepare": second(c.PrepareFrom(t.Context(), "two", "none")),
		"export":  c.ExportCommitted(t.Context(), "none", io.Discard),
	} {
		if !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("%s of nothing: %v", name, err)
		}
	}
	all, err := c.Committed(t.Context())
	if err != nil || len(all) != 1 || all[0].Name != "one" {
		t.Errorf("committed %+v, %v", all, err)
	}
}

func second[T any](_ T, err error) error { return err }

// What was given up lives as long as somebody lives from it, and no longer.
func TestRemoveCommittedOutlivesItsNeed(t *testing.T) {
	c, img, dir := book(t)
	must(t, os.WriteFile(filepath.Join(dir, "mine"), []byte("mine"), 0o600))
	_, err := c.CopySnapshot(t.Context(), "k", "one", nil)
	must(t, err)
	fork, err := c.PrepareFrom(t.Context(), "fork", "one")
	must(t, err)
	must(t, c.RemoveImage(t.Context(), img.Ref))
	for range 2 {
		must(t, c.RemoveCommitted(t.Context(), "one"))
		collect(t, c)
	}
	if all, err := c.Committed(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("committed %+v, %v", all, err)
	}
	if _, err := c.PrepareFrom(t.Context(), "late", "one"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("one that was given up can be started from: %v", err)
	}
	at := mounted(t, fork)
	if b, err := os.ReadFile(filepath.Join(at, "mine")); err != nil || string(b) != "mine" {
		t.Errorf("the fork reads %q, %v", b, err)
	}
	must(t, Unmount(at))
	must(t, c.RemoveSnapshot(t.Context(), "fork"))
	collect(t, c)
	if _, err := c.stat(t.Context(), "one"); !errdefs.IsNotFound(err) {
		t.Errorf("it was not collected: %v", err)
	}
	must(t, c.RemoveCommitted(t.Context(), "one"))
	if err := c.RemoveCommitted(t.Context(), img.chain); err == nil {
		t.Error("a layer of an image was removed")
	}
}

// A copy that fails, or whose maker dies, leaves nothing for long, and can be made again.
func TestCopySnapshotInterrupted(t *testing.T) {
	c, _, dir := book(t)
	scribble(t, dir)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("given up"))
	if _, err := c.CopySnapshot(ctx, "k", "one", nil); err == nil {
		t.Error("a copy that was given up succeeded")
	}
	if _, err := c.stat(t.Context(), "one"+partSuffix); !errdefs.IsNotFound(err) {
		t.Errorf("the failed copy left something: %v", err)
	}
	// As after a crash: a part, and a lease that keeps it while it lasts.
	l, err := c.lease(t.Context())
	must(t, err)
	leased := leases.WithLease(t.Context(), l.ID)
	info, err := c.stat(t.Context(), "k")
	must(t, err)
	_, err = c.preparePart(leased, "one"+partSuffix, info.Parent)
	must(t, err)
	_, err = c.preparePart(leased, "other"+partSuffix, info.Parent)
	must(t, err)
	collect(t, c)
	if keys, err := c.Snapshots(t.Context()); err != nil || !slices.Equal(keys, []string{"k"}) {
		t.Errorf("writable ones %v, %v", keys, err)
	}
	_, err = c.stat(t.Context(), "one"+partSuffix)
	must(t, err)
	_, err = c.CopySnapshot(t.Context(), "k", "one", nil)
	must(t, err)
	c.release(t.Context(), l)
	collect(t, c)
	if _, err := c.stat(t.Context(), "other"+partSuffix); !errdefs.IsNotFound(err) {
		t.Errorf("a part outlived its lease: %v", err)
	}
	if all, err := c.Committed(t.Context()); err != nil || len(all) != 1 {
		t.Errorf("committed %+v, %v", all, err)
	}
	must(t, c.Purge(t.Context()))
	if all, err := c.Committed(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("after the purge %+v, %v", all, err)
	}
}

func TestDepthIsBounded(t *testing.T) {
	c, _, dir := book(t)
	must(t, Unmount(dir))
	for i := range MaxDepth {
		name := fmt.Sprintf("level-%02d", i)
		_, err := c.CommitSnapshot(t.Context(), "k", name)
		must(t, err)
		_, err = c.PrepareFrom(t.Context(), "k", name)
		must(t, err)
	}
	rootfs, err := c.Snapshot(t.Context(), "k")
	must(t, err)
	if b, err := os.ReadFile(filepath.Join(mounted(t, rootfs), "file")); err != nil || string(b) != "one" {
		t.Errorf("at the greatest depth: %q, %v", b, err)
	}
	if _, err := c.CommitSnapshot(t.Context(), "k", "more"); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("commit: %v", err)
	}
	if _, err := c.CopySnapshot(t.Context(), "k", "more", nil); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("copy: %v", err)
	}
}

func TestExportImport(t *testing.T) {
	c, img, dir := book(t)
	scribble(t, dir)
	want := tell(t, dir)
	must(t, unix.Mknod(filepath.Join(dir, "socket"), unix.S_IFSOCK|0o600, 0)) // left out
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, dir, []unix.Timespec{{Sec: 1}, {Sec: 1}}, 0))
	_, err := c.CopySnapshot(t.Context(), "k", "one", nil)
	must(t, err)
	var layers [2]bytes.Buffer
	for i := range layers {
		must(t, c.ExportCommitted(t.Context(), "one", &layers[i]))
	}
	if !bytes.Equal(layers[0].Bytes(), layers[1].Bytes()) {
		t.Error("two exports differ")
	}
	_, err = c.ImportCommitted(t.Context(), "two", img, bytes.NewReader(layers[0].Bytes()))
	must(t, err)
	rootfs, err := c.PrepareFrom(t.Context(), "k2", "two")
	must(t, err)
	same(t, "imported", tell(t, mounted(t, rootfs)), want)
	if all, err := c.Committed(t.Context()); err != nil || len(all) != 2 {
		t.Errorf("committed %+v, %v", all, err)
	}
	keys, err := c.Snapshots(t.Context())
	if slices.Sort(keys); err != nil || !slices.Equal(keys, []string{"k", "k2"}) {
		t.Errorf("writable ones %v, %v", keys, err)
	}
	must(t, os.WriteFile(filepath.Join(dir, whiteoutPrefix+"file"), nil, 0o600))
	_, err = c.CopySnapshot(t.Context(), "k", "three", nil)
	must(t, err)
	if err := c.ExportCommitted(t.Context(), "three", io.Discard); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("a name that is a mark: %v", err)
	}
}

// What comes from elsewhere neither gets out of its directory nor speaks to our kernel.
func TestImportDistrusts(t *testing.T) {
	c, img, dir := book(t)
	must(t, os.WriteFile(filepath.Join(dir, "base"), nil, 0o600))
	_, err := c.CopySnapshot(t.Context(), "k", "base", nil)
	must(t, err)
	for name, b := range map[string][]byte{"noise": bytes.Repeat([]byte("noise"), 1000), "cut": cutTar(t)} {
		if _, err := c.ImportCommitted(t.Context(), name, img, bytes.NewReader(b)); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	outside := filepath.Join(t.TempDir(), "outside")
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		{Name: "../../../../../../../../.." + outside, Typeflag: tar.TypeReg, Mode: 0o600},
		{Name: "up", Typeflag: tar.TypeSymlink, Linkname: filepath.Dir(outside)},
		{Name: "up/outside", Typeflag: tar.TypeReg, Mode: 0o600},
		{Name: "kept/", Typeflag: tar.TypeDir, Mode: 0o700, PAXRecords: map[string]string{
			attrRecord + overlayPrefix + "redirect": "/gone", attrRecord + "user.fine": "yes",
		}},
	} {
		must(t, w.WriteHeader(&h))
	}
	must(t, w.Close())
	_, err = c.ImportCommittedOn(t.Context(), "sly", "base", &b)
	must(t, err)
	if _, err := os.Lstat(outside); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the layer wrote outside: %v", err)
	}
	rootfs, err := c.PrepareFrom(t.Context(), "sly-k", "sly")
	must(t, err)
	attrs, err := attributes(filepath.Join(rootfs.lowers()[0], "kept"))
	must(t, err)
	if _, ok := attrs[overlayPrefix+"redirect"]; ok || string(attrs["user.fine"]) != "yes" {
		t.Errorf("attributes %q", attrs)
	}
}

func cutTar(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(t, w.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o600, Size: 100_000}))
	_, err := w.Write(make([]byte, 100_000))
	must(t, err)
	must(t, w.Close())
	return b.Bytes()[:50_000]
}

// containerd dies at the worst moment: the copy is there or not, and can be made again.
func TestCopySnapshotSurvivesContainerd(t *testing.T) {
	d := supervise(t, shortDir(t))
	c, err := NewClient(Config{Address: d.Address(), Namespace: "test", CallTimeout: eventually.Patience})
	must(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		d.stop()
		must(t, d.Stop(context.WithoutCancel(t.Context())))
	})
	imgs, err := c.Import(t.Context(), tarOf(t, "x.test/book:1", bookImage(t)), 0, "", nil)
	must(t, err)
	rootfs, err := c.Prepare(t.Context(), "k", imgs[0])
	must(t, err)
	dir := mounted(t, rootfs)
	scribble(t, dir)
	want := tell(t, dir)
	killed := func() { must(t, d.process(t).Signal(syscall.SIGKILL)) }
	_, err = c.CopySnapshot(t.Context(), "k", "one", killed)
	d.await(t)
	if err != nil {
		t.Logf("the copy failed: %v", err)
		must(t, c.RemoveCommitted(t.Context(), "one"))
		_, err = c.CopySnapshot(t.Context(), "k", "one", nil)
		must(t, err)
	}
	collect(t, c)
	fork, err := c.PrepareFrom(t.Context(), "fork", "one")
	must(t, err)
	same(t, "fork", tell(t, mounted(t, fork)), want)
	if _, err := c.stat(t.Context(), "one"+partSuffix); !errdefs.IsNotFound(err) {
		t.Errorf("a part is left: %v", err)
	}
}
