package dirtar

import (
	"archive/tar"
	"bytes"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/fuzztar"
)

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

func silent() Events { return Events{Entry: func(string) {}, Skip: func(string, string) {}} }

func TestUnpackStaysInside(t *testing.T) {
	outside, dir := t.TempDir(), filepath.Join(t.TempDir(), "in")
	p := silent()
	if err := Unpack(hostile(t, outside), dir, p); err == nil {
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
		if err := Unpack(&b, dir, p); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(dir), "evil")); !os.IsNotExist(err) {
		t.Errorf("written beside the directory: %v", err)
	}
}

// Whatever a sandbox sends, it is written into the directory, as directories, files and links.
func FuzzUnpack(f *testing.F) {
	f.Add([]byte{}, "5 d \n0 d/f content\n1 h d/f\n2 l ../up\n0 l/f x\n3 dev \n6 p ")
	f.Add([]byte{}, "2 l /dev/shm\n0 l/f x\n5 . \n2 d/l ..\n5 d/l/../../up \n0 ../../up x\n0 f x\n5 f ")
	f.Add([]byte("x"), "")
	d := fuzztar.NewDir(f)
	f.Fuzz(func(t *testing.T, b []byte, entries string) {
		if entries != "" { // most other inputs are no tars
			b = fuzztar.Make(entries)
		}
		d.Read(t, func(dir string) { _ = Unpack(bytes.NewReader(b), dir, silent()) }, func(dir string) {
			err := filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
				if err == nil && !e.IsDir() && e.Type()&^fs.ModeSymlink != 0 {
					t.Errorf("%s is %s", name, e.Type())
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
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
	var skipped []string
	on := silent()
	on.Skip = func(name, _ string) { skipped = append(skipped, filepath.Base(name)) }
	if err := Pack(&b, dir, on); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(skipped, []string{"socket"}) {
		t.Errorf("left out: %q", skipped)
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
