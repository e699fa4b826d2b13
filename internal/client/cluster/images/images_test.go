package images

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// copyOf puts a program under another name. The test itself is one, and static if it was built without cgo.
func copyOf(t *testing.T, name string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, program, 0o700); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestBuild(t *testing.T) {
	file := copyOf(t, "program")
	if _, err := architectureOf(file); err != nil {
		t.Skipf("SKIPPED: the test's own program is no static one: %v", err)
	}
	index, err := Build("a program", "1.2", file)
	must(t, err)
	again, err := Build("a program", "1.2", file)
	must(t, err)
	first, err := index.Digest()
	must(t, err)
	if second, err := again.Digest(); first != second {
		t.Errorf("two runs made %s and %s, %v", first, second, err)
	}
	manifest, err := index.IndexManifest()
	must(t, err)
	if p := manifest.Manifests[0].Platform; p.OS != "linux" || p.Architecture != runtime.GOARCH {
		t.Errorf("platform %+v", p)
	}
	image, err := index.Image(manifest.Manifests[0].Digest)
	must(t, err)
	config, err := image.ConfigFile()
	must(t, err)
	if c := config.Config; c.Entrypoint[0] != "/program" || c.User != user || config.Architecture != runtime.GOARCH {
		t.Errorf("config %+v", config)
	}
	checkLayer(t, image, file)
}

// checkLayer verifies that an image has one file alone.
func checkLayer(t *testing.T, image v1.Image, file string) {
	t.Helper()
	layers, err := image.Layers()
	must(t, err)
	content, err := layers[0].Uncompressed()
	must(t, err)
	defer func() { _ = content.Close() }()
	files := tar.NewReader(content)
	h, err := files.Next()
	if err != nil || h.Name != "program" || h.Mode != 0o755 || len(layers) != 1 {
		t.Fatalf("%d layers, %+v, %v", len(layers), h, err)
	}
	want, err := os.ReadFile(file)
	must(t, err)
	if got, err := io.ReadAll(files); err != nil || string(got) != string(want) {
		t.Errorf("the program has %d bytes in the image, want %d: %v", len(got), len(want), err)
	}
	if _, err := files.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the program: %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestBuildRefuses(t *testing.T) {
	script := filepath.Join(t.TempDir(), "script")
	if err := os.WriteFile(script, []byte("#!/bin/sh\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{script: "script", "/bin/sh": "static", "/none": "none"} {
		if _, err := Build("x", "1", file); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an ErrInvalid that names it", file, err)
		}
	}
}
