package ctrd

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
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
	"github.com/barchan-dev/barchan/internal/node/ctrd/ctrdtest"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree/filetreetest"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// treeImage has directories whose content tests remove.
func treeImage(t *testing.T) v1.Image {
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

// tree is a containerd with the image and one writable snapshot of it, mounted.
func tree(t *testing.T) (c *Client, img Image, dir string) {
	t.Helper()
	c = started(t)
	imgs, err := c.Import(t.Context(), tarOf(t, "x.test/tree:1", treeImage(t)), 0, "", nil)
	must(t, err)
	rootfs, err := c.Prepare(t.Context(), "k", imgs[0])
	must(t, err)
	return c, imgs[0], mounted(t, rootfs)
}

func mounted(t *testing.T, r Rootfs) string {
	t.Helper()
	dir := t.TempDir()
	must(t, r.Mount(dir, true))
	t.Cleanup(func() { must(t, Unmount(dir)) })
	return dir
}

// collect runs containerd's collector now.
func collect(t *testing.T, c *Client) {
	t.Helper()
	l, err := c.api.LeasesService().Create(t.Context(), leases.WithRandomID())
	must(t, err)
	must(t, c.api.LeasesService().Delete(t.Context(), l, leases.SynchronousDelete))
}

// copySnapshot copies a writable snapshot as the node does; copied is called when the writer may continue.
func copySnapshot(ctx context.Context, c *Client, key, name string, copied func()) (_ Committed, err error) {
	p, err := c.BeginCopy(ctx, key, "", name)
	if err != nil {
		return Committed{}, err
	}
	defer func() { err = errors.Join(err, p.Close(ctx)) }()
	if err := p.FinalCopy(ctx); err != nil {
		return Committed{}, err
	}
	if copied != nil {
		copied()
	}
	return p.Commit(ctx)
}

func TestCopySnapshotIsComplete(t *testing.T) {
	c, _, dir := tree(t)
	filetreetest.Change(t, dir)
	must(t, unix.Mknod(filepath.Join(dir, "socket"), unix.S_IFSOCK|0o600, 0))
	deep := dir
	for range 30 {
		deep = filepath.Join(deep, strings.Repeat("d", 100))
		must(t, os.Mkdir(deep, 0o755))
	}
	want := filetreetest.Describe(t, dir)
	calls := 0
	made, err := copySnapshot(t.Context(), c, "k", "copy", func() {
		calls++
		must(t, os.WriteFile(filepath.Join(dir, "later"), []byte("x"), 0o600)) // the writer continues
	})
	must(t, err)
	if made.Name != "copy" || made.Size == 0 || made.Size > 8<<20 || calls != 1 {
		t.Errorf("made %+v, %d calls", made, calls)
	}
	// Concurrent snapshots on it are isolated from each other.
	var wg sync.WaitGroup
	rootfs, failures := make([]Rootfs, 4), make([]error, 4)
	for i := range rootfs {
		wg.Go(func() { rootfs[i], failures[i] = c.PrepareFrom(t.Context(), fmt.Sprint("fork", i), "copy") })
	}
	wg.Wait()
	must(t, errors.Join(failures...))
	for i, r := range rootfs {
		at := mounted(t, r)
		filetreetest.Same(t, r.Key, filetreetest.Describe(t, at), want)
		must(t, os.WriteFile(filepath.Join(at, "mine"), []byte{byte(i)}, 0o600))
	}
	if again, err := c.PrepareFrom(t.Context(), "fork0", "copy"); err != nil || !slices.EqualFunc(again.mounts, rootfs[0].mounts, func(a, b mount.Mount) bool { return fmt.Sprint(a) == fmt.Sprint(b) }) {
		t.Errorf("again: %+v, %v", again, err)
	}
}

func TestCopySnapshotRefuses(t *testing.T) {
	c, _, _ := tree(t)
	_, err := copySnapshot(t.Context(), c, "k", "one", nil)
	must(t, err)
	if _, err := copySnapshot(t.Context(), c, "k", "one", nil); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("a copy to a taken name: %v", err)
	}
	for name, err := range map[string]error{
		"copy":    errOf(copySnapshot(t.Context(), c, "none", "two", nil)),
		"prepare": errOf(c.PrepareFrom(t.Context(), "two", "none")),
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

func errOf[T any](_ T, err error) error { return err }

// A removed snapshot stays until the last snapshot on it is removed.
func TestRemoveCommittedInUse(t *testing.T) {
	c, img, dir := tree(t)
	must(t, os.WriteFile(filepath.Join(dir, "mine"), []byte("mine"), 0o600))
	_, err := copySnapshot(t.Context(), c, "k", "one", nil)
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
		t.Errorf("a snapshot of a removed one succeeded: %v", err)
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

// A copy that fails, or whose process dies, leaves nothing permanent and can be repeated.
func TestCopySnapshotInterrupted(t *testing.T) {
	c, _, dir := tree(t)
	filetreetest.Change(t, dir)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("cancelled"))
	if _, err := copySnapshot(ctx, c, "k", "one", nil); err == nil {
		t.Error("a cancelled copy succeeded")
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
	_, err = copySnapshot(t.Context(), c, "k", "one", nil)
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
	c, _, dir := tree(t)
	must(t, Unmount(dir))
	for i := range MaxDepth {
		name := fmt.Sprintf("level-%02d", i)
		_, err := copySnapshot(t.Context(), c, "k", name, nil)
		must(t, err)
		must(t, c.RemoveSnapshot(t.Context(), "k"))
		_, err = c.PrepareFrom(t.Context(), "k", name)
		must(t, err)
	}
	rootfs, err := c.Snapshot(t.Context(), "k")
	must(t, err)
	if b, err := os.ReadFile(filepath.Join(mounted(t, rootfs), "file")); err != nil || string(b) != "one" {
		t.Errorf("at the greatest depth: %q, %v", b, err)
	}
	if _, err := copySnapshot(t.Context(), c, "k", "more", nil); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("copy: %v", err)
	}
}

func TestExportImport(t *testing.T) {
	c, img, dir := tree(t)
	filetreetest.Change(t, dir)
	want := filetreetest.Describe(t, dir)
	must(t, unix.Mknod(filepath.Join(dir, "socket"), unix.S_IFSOCK|0o600, 0)) // omitted
	must(t, unix.UtimesNanoAt(unix.AT_FDCWD, dir, []unix.Timespec{{Sec: 1}, {Sec: 1}}, 0))
	_, err := copySnapshot(t.Context(), c, "k", "one", nil)
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
	filetreetest.Same(t, "imported", filetreetest.Describe(t, mounted(t, rootfs)), want)
	if all, err := c.Committed(t.Context()); err != nil || len(all) != 2 {
		t.Errorf("committed %+v, %v", all, err)
	}
	keys, err := c.Snapshots(t.Context())
	if slices.Sort(keys); err != nil || !slices.Equal(keys, []string{"k", "k2"}) {
		t.Errorf("writable ones %v, %v", keys, err)
	}
	must(t, os.WriteFile(filepath.Join(dir, ".wh.file"), nil, 0o600))
	_, err = copySnapshot(t.Context(), c, "k", "three", nil)
	must(t, err)
	if err := c.ExportCommitted(t.Context(), "three", io.Discard); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("a name that is a mark: %v", err)
	}
}

// A foreign layer writes nothing outside its directory and sets no attributes of the overlay.
func TestImportForeignLayer(t *testing.T) {
	c, img, _ := tree(t)
	for name, b := range map[string][]byte{"noise": bytes.Repeat([]byte("noise"), 1000), "cut": cutTar(t)} {
		if _, err := c.ImportCommitted(t.Context(), name, img, bytes.NewReader(b)); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	outside := filepath.Join(t.TempDir(), "outside")
	layer := func(all ...tar.Header) io.Reader {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range all {
			must(t, w.WriteHeader(&h))
		}
		must(t, w.Close())
		return &b
	}
	for name, r := range map[string]io.Reader{
		"dots": layer(tar.Header{Name: "../../../../../../../../.." + outside, Typeflag: tar.TypeReg, Mode: 0o600}),
		"link": layer(
			tar.Header{Name: "up", Typeflag: tar.TypeSymlink, Linkname: filepath.Dir(outside)},
			tar.Header{Name: "up/outside", Typeflag: tar.TypeReg, Mode: 0o600},
		),
	} {
		if _, err := c.ImportCommitted(t.Context(), name, img, r); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := os.Lstat(outside); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the layer wrote outside: %v", err)
	}
	_, err := c.ImportCommitted(t.Context(), "sly", img, layer(tar.Header{Name: "kept/", Typeflag: tar.TypeDir, Mode: 0o700, PAXRecords: map[string]string{
		"SCHILY.xattr.trusted.overlay.redirect": "/gone", "SCHILY.xattr.user.fine": "yes",
	}}))
	must(t, err)
	rootfs, err := c.PrepareFrom(t.Context(), "sly-k", "sly")
	must(t, err)
	attrs, err := filetree.Attributes(filepath.Join(rootfs.lowers()[0], "kept"))
	must(t, err)
	if _, ok := attrs["trusted.overlay.redirect"]; ok || string(attrs["user.fine"]) != "yes" {
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

// containerd is killed before the commit: the copy exists or not, and can be repeated.
func TestCopySnapshotContainerdKilled(t *testing.T) {
	d := ctrdtest.Start(t, ctrdtest.Dir(t))
	c, err := NewClient(Config{Address: d.Address(), Namespace: "test", CallTimeout: eventually.Patience})
	must(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		d.End(t)
	})
	imgs, err := c.Import(t.Context(), tarOf(t, "x.test/tree:1", treeImage(t)), 0, "", nil)
	must(t, err)
	rootfs, err := c.Prepare(t.Context(), "k", imgs[0])
	must(t, err)
	dir := mounted(t, rootfs)
	filetreetest.Change(t, dir)
	want := filetreetest.Describe(t, dir)
	killed := func() { must(t, d.Process(t).Signal(syscall.SIGKILL)) }
	_, err = copySnapshot(t.Context(), c, "k", "one", killed)
	d.Await(t)
	if err != nil {
		t.Logf("the copy failed: %v", err)
		must(t, c.RemoveCommitted(t.Context(), "one"))
		_, err = copySnapshot(t.Context(), c, "k", "one", nil)
		must(t, err)
	}
	collect(t, c)
	fork, err := c.PrepareFrom(t.Context(), "fork", "one")
	must(t, err)
	filetreetest.Same(t, "fork", filetreetest.Describe(t, mounted(t, fork)), want)
	if _, err := c.stat(t.Context(), "one"+partSuffix); !errdefs.IsNotFound(err) {
		t.Errorf("a part remains: %v", err)
	}
}
