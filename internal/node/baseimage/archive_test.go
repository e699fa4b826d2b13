package baseimage_test

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
)

type entry struct {
	*tar.Header
	data string // of small files
}

type image struct {
	name, digest string
	config       v1.ConfigFile
	files        map[string]entry
}

// readImage reads an OCI archive independently of the tested code, and verifies its digests and sizes.
func readImage(t *testing.T, path string) image {
	t.Helper()
	dir := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), "tar", "-C", dir, "-xf", path).CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	blob := func(d v1.Descriptor) string {
		p := filepath.Join(dir, "blobs", d.Digest.Algorithm, d.Digest.Hex)
		f, err := os.Open(p)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		got, size, err := v1.SHA256(f)
		if err != nil || got != d.Digest || size != d.Size {
			t.Fatalf("blob is %s of %d bytes (%v), want %s of %d", got, size, err, d.Digest, d.Size)
		}
		return p
	}
	var index v1.IndexManifest
	readJSON(t, filepath.Join(dir, "index.json"), &index)
	top := index.Manifests[0]
	img := image{name: top.Annotations["io.containerd.image.name"], digest: top.Digest.String(), files: map[string]entry{}}
	var manifest v1.Manifest
	readJSON(t, blob(top), &manifest)
	readJSON(t, blob(manifest.Config), &img.config)
	if len(manifest.Layers) == 0 || len(manifest.Layers) != len(img.config.RootFS.DiffIDs) {
		t.Fatalf("%d layers, %d diff IDs", len(manifest.Layers), len(img.config.RootFS.DiffIDs))
	}
	for i, l := range manifest.Layers {
		plain := readLayer(t, blob(l), img.files)
		if want := img.config.RootFS.DiffIDs[i]; plain != want {
			t.Errorf("diff ID of layer %d is %s, want %s", i, plain, want)
		}
	}
	return img
}

func readLayer(t *testing.T, path string, files map[string]entry) v1.Hash {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := zstd.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	pr, pw := io.Pipe()
	var sum v1.Hash
	done := make(chan error, 1)
	go func() {
		var err error
		sum, _, err = v1.SHA256(pr)
		done <- err
	}()
	both := io.TeeReader(z, pw)
	for tr := tar.NewReader(both); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		e := entry{Header: h}
		if h.Size < 64<<10 {
			data, err := io.ReadAll(tr)
			if err != nil {
				t.Fatal(err)
			}
			e.data = string(data)
		}
		files[strings.Trim(strings.TrimPrefix(h.Name, "./"), "/")] = e
	}
	_, err = io.Copy(io.Discard, both) // including bytes after the end mark
	if err := errors.Join(err, pw.Close(), <-done); err != nil {
		t.Fatal(fmt.Errorf("read layer: %w", err))
	}
	return sum
}

func readJSON(t *testing.T, path string, into any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, into); err != nil {
		t.Fatal(err)
	}
}
