package ctrd

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// An exported image has the image's layers, those of snapshots with what they remove, and the changed configuration, for
// containerd and for Docker.
func TestExportImage(t *testing.T) {
	c := started(t)
	imgs, err := c.Import(t.Context(), tarOf(t, "x.test/a:1", image(t, "one")), 0, "", nil)
	must(t, err)
	lower := commitFiles(t, c, imgs[0], "", "first", func(dir string) {
		must(t, os.WriteFile(filepath.Join(dir, "new"), []byte("two"), 0o600))
	})
	upper := commitFiles(t, c, imgs[0], lower, "second", func(dir string) {
		must(t, os.Remove(filepath.Join(dir, "file")))
	})
	names, chain, err := c.SnapshotsAbove(t.Context(), upper)
	if err != nil || !slices.Equal(names, []string{lower, upper}) || chain != imgs[0].Chain() {
		t.Fatalf("snapshots %v on %s, %v", names, chain, err)
	}
	var tar, again bytes.Buffer
	x := ImageExport{
		Digest: imgs[0].Digest, Name: "y.test/b:1", Layers: []ExportLayer{{lower, "RUN first"}, {upper, "RUN second"}},
		Change: func(i *ocispec.Image) { i.Config.Env = append(i.Config.Env, "A=b") },
	}
	must(t, c.ExportImage(t.Context(), x, &tar))
	must(t, c.ExportImage(t.Context(), x, &again))
	if !bytes.Equal(tar.Bytes(), again.Bytes()) {
		t.Error("two exports differ")
	}
	file := filepath.Join(t.TempDir(), "image.tar")
	must(t, os.WriteFile(file, tar.Bytes(), 0o600))
	wantDockerImage(t, file)

	must(t, c.RemoveImage(t.Context(), "x.test/a:1"))
	back, err := c.Import(t.Context(), &tar, 0, "", nil)
	if err != nil || len(back) != 1 || back[0].Ref != "y.test/b:1" || !slices.Contains(back[0].Config.Env, "A=b") {
		t.Fatalf("imported %+v, %v", back, err)
	}
	rootfs, err := c.Prepare(t.Context(), "k", back[0])
	must(t, err)
	dir := t.TempDir()
	must(t, rootfs.Mount(dir, true))
	defer func() { must(t, Unmount(dir)) }()
	if b, err := os.ReadFile(filepath.Join(dir, "new")); string(b) != "two" {
		t.Errorf("the file of the first layer: %q, %v", b, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "file")); !os.IsNotExist(err) {
		t.Errorf("the file that the second layer removes: %v", err)
	}
}

// wantDockerImage reads a tar as `docker load` does.
func wantDockerImage(t *testing.T, file string) {
	t.Helper()
	img, err := tarball.ImageFromPath(file, nil)
	must(t, err)
	cfg, err := img.ConfigFile()
	must(t, err)
	if h := cfg.History; len(h) < 2 || h[len(h)-2].CreatedBy != "RUN first" || h[len(h)-1].CreatedBy != "RUN second" || len(cfg.RootFS.DiffIDs) != 3 || cfg.Architecture != runtime.GOARCH {
		t.Errorf("configuration %+v", cfg)
	}
	var flat bytes.Buffer
	files := mutate.Extract(img)
	_, err = flat.ReadFrom(files)
	must(t, err)
	must(t, files.Close())
	if s := flat.String(); !strings.Contains(s, "two") || strings.Contains(s, "one") {
		t.Error("the layers have other files")
	}
}

// commitFiles makes a committed snapshot on an image, or on another one.
func commitFiles(t *testing.T, c *Client, img Image, on, name string, change func(dir string)) string {
	t.Helper()
	key := "work-" + name
	var rootfs Rootfs
	var err error
	if on == "" {
		rootfs, err = c.Prepare(t.Context(), key, img)
	} else {
		rootfs, err = c.PrepareFrom(t.Context(), key, on)
	}
	must(t, err)
	dir := t.TempDir()
	must(t, rootfs.Mount(dir, true))
	change(dir)
	must(t, Unmount(dir))
	s, err := c.BeginCopy(t.Context(), key, "", name)
	must(t, err)
	must(t, s.FinalCopy(t.Context()))
	_, err = s.Commit(t.Context())
	must(t, err)
	must(t, s.Close(t.Context()))
	must(t, c.RemoveSnapshot(t.Context(), key))
	return name
}
