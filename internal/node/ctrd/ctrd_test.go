package ctrd

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd/ctrdtest"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree/filetreetest"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// started starts a containerd that ends with the test, and a client.
func started(t *testing.T) *Client {
	t.Helper()
	d := ctrdtest.Start(t, ctrdtest.Dir(t))
	c, err := NewClient(Config{Address: d.Address(), Namespace: "test", CallTimeout: eventually.Patience})
	must(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		d.End(t)
	})
	return c
}

func image(t *testing.T, text string) v1.Image {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(t, w.WriteHeader(&tar.Header{Name: "file", Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg}))
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
	must(t, w.Close())
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	must(t, err)
	img, err := mutate.AppendLayers(empty.Image, layer)
	must(t, err)
	cfg, err := img.ConfigFile()
	must(t, err)
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture, cfg.Config.Cmd = "linux", runtime.GOARCH, []string{"/file"}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

// must ends the test on an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func parse(t *testing.T, ref string) name.Reference {
	t.Helper()
	r, err := name.ParseReference(ref)
	must(t, err)
	return r
}

func tarOf(t *testing.T, ref string, img v1.Image) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	must(t, tarball.Write(parse(t, ref), img, &b))
	return &b
}

func TestImportListRemove(t *testing.T) {
	c := started(t)
	tar := tarOf(t, "x.test/a:1", image(t, "one"))
	var steps []string
	size := int64(tar.Len())
	imgs, err := c.Import(t.Context(), tar, size, "y.test/b", func(p Progress) {
		if steps = append(steps, p.Step); p.Done > size {
			t.Errorf("progress %+v beyond %d", p, size)
		}
	})
	if err != nil || len(imgs) != 2 || imgs[0].Ref != "y.test/b:latest" || !slices.Equal(imgs[0].Config.Cmd, []string{"/file"}) {
		t.Fatalf("imported %+v, %v", imgs, err)
	}
	if !slices.Contains(steps, "read") || steps[len(steps)-1] != "done" {
		t.Errorf("steps %v", steps)
	}
	got, err := c.Resolve(t.Context(), "y.test/b")
	if err != nil || got.Digest != imgs[0].Digest {
		t.Errorf("resolved %+v, %v", got, err)
	}
	list, err := c.Images(t.Context())
	if err != nil || len(list) != 2 || list[1].Ref != "y.test/b:latest" || list[1].Size == 0 || list[1].Digest != got.Digest {
		t.Errorf("listed %+v, %v", list, err)
	}
	removedIsNotFound(t, c)
}

func removedIsNotFound(t *testing.T, c *Client) {
	t.Helper()
	must(t, c.RemoveImage(t.Context(), "y.test/b"))
	if err := c.RemoveImage(t.Context(), "y.test/b"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("removed twice: %v", err)
	}
	if _, err := c.Resolve(t.Context(), "y.test/b"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("resolved a removed image: %v", err)
	}
	if _, err := c.Resolve(t.Context(), "NOT valid"); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("resolved nonsense: %v", err)
	}
	if _, err := c.Import(t.Context(), strings.NewReader("no tar"), 0, "", nil); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("imported nonsense: %v", err)
	}
}

// TestCollect has the content of an untagged image removed, and no other's.
func TestCollect(t *testing.T) {
	c := started(t)
	digests := map[string]string{}
	for _, name := range []string{"x.test/a:1", "x.test/b:1"} {
		imgs, err := c.Import(t.Context(), tarOf(t, name, image(t, name)), 0, "", nil)
		must(t, err)
		digests[name] = imgs[0].Digest
		if _, err := c.PartsOf(t.Context(), name, imgs[0].Digest); err != nil {
			t.Fatal(err)
		}
	}
	if list, err := c.Images(t.Context(), "x.test/b:1", "x.test/c:1"); err != nil || len(list) != 1 || list[0].Digest != digests["x.test/b:1"] || list[0].Size == 0 {
		t.Errorf("listed by name %+v, %v", list, err)
	}
	must(t, c.UntagImage(t.Context(), "x.test/a:1"))
	if err := c.UntagImage(t.Context(), "x.test/a:1"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("untagged twice: %v", err)
	}
	must(t, c.Collect(t.Context()))
	if _, err := c.PartsOf(t.Context(), "x.test/a:1", digests["x.test/a:1"]); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("content of the untagged image: %v", err)
	}
	if img, err := c.Resolve(t.Context(), "x.test/b:1"); err != nil {
		t.Error(err)
	} else if _, err := c.Prepare(t.Context(), "of-b", img); err != nil {
		t.Error(err)
	}
	if list, err := c.Images(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("listed %+v, %v", list, err)
	}
}

func TestPullFromLoopbackRegistry(t *testing.T) {
	c := started(t)
	server := httptest.NewServer(registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, 0))))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	ref := host + "/some/image:v1"
	must(t, remote.Write(parse(t, ref), image(t, strings.Repeat("x", 1<<20))))
	var last Progress
	img, err := c.Pull(t.Context(), PullRequest{Ref: ref, Progress: func(p Progress) { last = p }})
	if err != nil || img.Ref != ref || last.Step != "done" || last.Total == 0 {
		t.Fatalf("pulled %+v, %v, last progress %+v", img, err, last)
	}
	if _, err := c.Pull(t.Context(), PullRequest{Ref: host + "/none:v1"}); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("pulled a missing image: %v", err)
	}
	server.Close()
	if _, err := c.Resolve(t.Context(), ref); err != nil {
		t.Errorf("resolve without the registry: %v", err)
	}
	if _, err := c.Pull(t.Context(), PullRequest{Ref: ref}); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("pull without the registry: %v", err)
	}
}

// A sandbox's files survive the removal of its image, and containerd's garbage collection.
func TestSnapshotsOutliveImage(t *testing.T) {
	c := started(t)
	imgs, err := c.Import(t.Context(), tarOf(t, "x.test/a:1", image(t, "one")), 0, "", nil)
	must(t, err)
	if _, err := c.Prepare(t.Context(), "k1", imgs[0]); err != nil {
		t.Fatal(err)
	}
	rootfs, err := c.Prepare(t.Context(), "k1", imgs[0]) // again
	must(t, err)
	dir := t.TempDir()
	must(t, rootfs.Mount(dir, true))
	defer func() { _ = Unmount(dir) }()
	must(t, os.WriteFile(filepath.Join(dir, "new"), []byte("mine"), 0o600))
	upper, ok := rootfs.UpperDir()
	if b, err := os.ReadFile(filepath.Join(upper, "new")); !ok || err != nil || string(b) != "mine" {
		t.Errorf("upper directory %q, %v has %q, %v", upper, ok, b, err)
	}
	record := Container{ID: "k1", Image: imgs[0].Ref, Runtime: "gvisor", Snapshot: "k1", Labels: map[string]string{"a": "b"}}
	for range 2 {
		must(t, c.CreateContainer(t.Context(), record))
	}
	must(t, c.RemoveImage(t.Context(), "x.test/a:1"))
	if usage, err := c.SnapshotUsage(t.Context(), "k1"); err != nil || usage == 0 {
		t.Errorf("usage %d, %v", usage, err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || string(b) != "one" {
		t.Errorf("image's file: %q, %v", b, err)
	}
	records, err := c.Records(t.Context())
	if err != nil || len(records) != 1 || records[0].Snapshot != "k1" || records[0].Labels["a"] != "b" {
		t.Errorf("records %+v, %v", records, err)
	}
	must(t, Unmount(dir))
	wantMountFlags(t, rootfs, dir)
	wantRepeatableRemoval(t, c, dir)
}

// An image's layers say nothing of the disk that they take: what has no room is refused, and leaves nothing.
func TestImageThatExpandsBeyondTheDisk(t *testing.T) {
	c := started(t)
	small, err := c.Import(t.Context(), tarOf(t, "x.test/a:1", image(t, "one")), 0, "", nil)
	must(t, err)
	rootfs, err := c.Prepare(t.Context(), "k1", small[0])
	must(t, err)
	upper, _ := rootfs.UpperDir()
	snapshotsDir := filepath.Dir(filepath.Dir(filepath.Dir(upper)))
	used := func() int64 {
		n, err := durable.Usage(t.Context(), snapshotsDir)
		must(t, err)
		return n
	}
	before := used()
	c.space = func() error {
		if used() > before+64<<20 {
			return errs.Public(errs.ErrExhausted, "no room")
		}
		return nil
	}
	bomb := image(t, strings.Repeat("\x00", 512<<20))
	if _, err := c.Import(t.Context(), tarOf(t, "x.test/bomb:1", bomb), 0, "", nil); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("import: %v", err)
	}
	if _, err := c.Resolve(t.Context(), "x.test/bomb:1"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("its name: %v", err)
	}
	eventually.True(t, "what was unpacked goes", func() bool { return used() < before+1<<20 })
}

// A sandbox may have made directories that no path reaches the end of.
func TestSnapshotOfADeepTree(t *testing.T) {
	c := started(t)
	imgs, err := c.Import(t.Context(), tarOf(t, "x.test/a:1", image(t, "one")), 0, "", nil)
	must(t, err)
	rootfs, err := c.Prepare(t.Context(), "deep", imgs[0])
	must(t, err)
	upper, _ := rootfs.UpperDir()
	filetreetest.Deep(t, upper, 4000)
	if usage, err := c.SnapshotUsage(t.Context(), "deep"); err != nil || usage < 4000*4096 {
		t.Errorf("usage %d, %v", usage, err)
	}
	must(t, c.RemoveSnapshot(t.Context(), "deep"))
	if _, err := os.Lstat(upper); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("its files: %v", err)
	}
	if _, err := c.SnapshotUsage(t.Context(), "deep"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("usage of no snapshot: %v", err)
	}
}

func wantMountFlags(t *testing.T, rootfs Rootfs, dir string) {
	t.Helper()
	for _, setuid := range []bool{true, false} {
		must(t, rootfs.Mount(dir, setuid))
		var st unix.Statfs_t
		must(t, unix.Statfs(dir, &st))
		if st.Flags&unix.ST_NODEV == 0 || (st.Flags&unix.ST_NOSUID == 0) != setuid || st.Flags&unix.ST_RDONLY != 0 {
			t.Errorf("with setuid %v the mount has flags %#x", setuid, st.Flags)
		}
		must(t, Unmount(dir))
	}
}

func wantRepeatableRemoval(t *testing.T, c *Client, dir string) {
	t.Helper()
	for range 2 {
		must(t, c.RemoveContainer(t.Context(), "k1"))
		must(t, c.RemoveSnapshot(t.Context(), "k1"))
		must(t, Unmount(dir))
	}
	if keys, err := c.Snapshots(t.Context()); err != nil || len(keys) != 0 {
		t.Errorf("snapshots %v, %v", keys, err)
	}
}

// A cancelled change completes before the caller returns: otherwise containerd would complete it
// after the caller's undo.
func TestCancelledPrepareEndsBeforeRemoval(t *testing.T) {
	c := started(t)
	imgs, err := c.Import(t.Context(), tarOf(t, "x.test/a:1", image(t, "one")), 0, "", nil)
	must(t, err)
	for i := range 60 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*50*time.Microsecond)
		_, _ = c.Prepare(ctx, "k", imgs[0])
		_ = c.CreateContainer(ctx, Container{ID: "k", Image: imgs[0].Ref, Runtime: "gvisor", Snapshot: "k"})
		cancel()
		must(t, c.RemoveContainer(t.Context(), "k"))
		must(t, c.RemoveSnapshot(t.Context(), "k"))
	}
	collect(t, c) // waits for calls in containerd
	keys, err := c.Snapshots(t.Context())
	if err != nil || len(keys) != 0 {
		t.Errorf("snapshots %v, %v", keys, err)
	}
	records, err := c.Records(t.Context())
	if err != nil || len(records) != 0 {
		t.Errorf("records %v, %v", records, err)
	}
}

func TestPurgeEmptiesTheNamespace(t *testing.T) {
	c := started(t)
	imgs, err := c.Import(t.Context(), tarOf(t, "x.test/a:1", image(t, "one")), 0, "", nil)
	must(t, err)
	if _, err := c.Prepare(t.Context(), "k", imgs[0]); err != nil {
		t.Fatal(err)
	}
	must(t, c.CreateContainer(t.Context(), Container{ID: "k", Runtime: "gvisor", Snapshot: "k"}))
	must(t, c.Purge(t.Context()))
	records, _ := c.Records(t.Context())
	keys, _ := c.Snapshots(t.Context())
	images, _ := c.Images(t.Context())
	if len(records)+len(keys)+len(images) != 0 {
		t.Errorf("remaining: %v %v %v", records, keys, images)
	}
}

func TestNewClientRefuses(t *testing.T) {
	if _, err := NewClient(Config{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("client without address: %v", err)
	}
}
