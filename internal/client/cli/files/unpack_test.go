package files

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

func TestCutRemote(t *testing.T) {
	for text, want := range map[string]string{
		"i3k:/a":   "i3k /a",
		"i3k:":     "i3k .",
		"i3k-c1:b": "i3k-c1 b",
		"./a:b":    "",
		"/a:b":     "",
		"plain":    "",
		"A:b":      "",
	} {
		id, p, ok := CutRemote(text)
		if got := strings.TrimSpace(id + " " + p); ok != (want != "") || ok && got != want {
			t.Errorf("%s: %q, %v", text, got, ok)
		}
	}
}

// hostile is a tar that tries to leave its directory in every way.
func hostile(t *testing.T, outside string) io.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(h tar.Header, content string) {
		h.Size = int64(len(content))
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, content); err != nil {
			t.Fatal(err)
		}
	}
	add(tar.Header{Name: "good", Typeflag: tar.TypeReg, Mode: 0o4755}, "good")
	add(tar.Header{Name: "dev", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3}, "")
	add(tar.Header{Name: "out", Typeflag: tar.TypeSymlink, Linkname: outside}, "")
	add(tar.Header{Name: "out/owned", Typeflag: tar.TypeReg, Mode: 0o644}, "evil")
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func quietCopier() *copier {
	return &copier{app: &app.App{Stderr: io.Discard}, progress: terminal.NewProgress(io.Discard)}
}

func TestUnpackStaysInside(t *testing.T) {
	outside, dir := t.TempDir(), filepath.Join(t.TempDir(), "in")
	p := quietCopier()
	if err := unpackDir(hostile(t, outside), dir, p); err == nil {
		t.Error("a file through a link outside: no error")
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) != 0 {
		t.Errorf("written outside: %v, %v", left, err)
	}
	info, err := os.Stat(filepath.Join(dir, "good"))
	if err != nil || info.Mode() != 0o755 {
		t.Errorf("good: %v, %v; want no setuid", info, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "dev")); !os.IsNotExist(err) {
		t.Errorf("a device was made: %v", err)
	}
	for _, name := range []string{"../evil", "/evil", "a/../../evil"} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := unpackDir(&b, dir, p); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(dir), "evil")); !os.IsNotExist(err) {
		t.Errorf("written beside the directory: %v", err)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add([]byte("x"))
	f.Fuzz(func(t *testing.T, b []byte) {
		parent := t.TempDir()
		_ = unpackDir(bytes.NewReader(b), filepath.Join(parent, "in"), quietCopier()) // most are no tars
		if left, err := os.ReadDir(parent); err != nil || len(left) != 1 {
			t.Errorf("beside the directory: %v, %v", left, err)
		}
	})
}

func TestPackLeavesOutWhatIsNoFile(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "socket")) //nolint:noctx // listens at once
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o640); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	c := quietCopier()
	if err := packDir(&b, dir, c); err != nil {
		t.Fatal(err)
	}
	if !c.skipped.Load() {
		t.Error("the socket was left out without a word")
	}
	r := tar.NewReader(&b)
	h, err := r.Next()
	if err != nil || h.Name != "." || h.Typeflag != tar.TypeDir {
		t.Errorf("%+v, %v", h, err)
	}
	h, err = r.Next()
	if err != nil || h.Name != "f" || fs.FileMode(h.Mode) != 0o640 || h.Uname != "" {
		t.Errorf("%+v, %v", h, err)
	}
	if h, err := r.Next(); err != io.EOF {
		t.Errorf("more: %+v, %v", h, err)
	}
}
