package cli

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

func TestWords(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{age(-time.Second), "0s"},
		{age(119 * time.Second), "119s"},
		{age(2 * time.Minute), "2m"},
		{age(119 * time.Minute), "119m"},
		{age(47 * time.Hour), "47h"},
		{age(49 * time.Hour), "2d"},
		{since(time.Time{}), "-"},
		{left(time.Time{}), "-"},
		{size(0), "0 B"},
		{size(1023), "1023 B"},
		{size(1 << 20), "1.0 MiB"},
		{size(1536 << 20), "1.5 GiB"},
		{size(1 << 60), "1048576.0 TiB"},
		{pairs(map[string]string{"b": "2", "a": "1"}), "a=1,b=2"},
		{quoteShell("it's"), `'it'\''s'`},
		{quoteFish(`a\'`), `'a\\\''`},
		{dialable("0.0.0.0:80"), "127.0.0.1:80"},
		{dialable("[::]:80"), "127.0.0.1:80"},
		{dialable(":80"), "127.0.0.1:80"},
		{dialable("10.0.0.1:80"), "10.0.0.1:80"},
		{milli(0.26), "300µs"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

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
		id, p, ok := cutRemote(text)
		if got := strings.TrimSpace(id + " " + p); ok != (want != "") || ok && got != want {
			t.Errorf("%s: %q, %v", text, got, ok)
		}
	}
}

func TestSandboxAddress(t *testing.T) {
	for url, want := range map[string]string{
		"http://127.0.0.1:7700":     "http://127.0.0.1:7700",
		"http://[::1]:7700":         "http://[::1]:7700",
		"http://localhost:7700":     "http://localhost:7700",
		"https://api.sbx.test":      "https://80-" + id1 + ".sbx.test",
		"https://api.sbx.test:8443": "https://80-" + id1 + ".sbx.test:8443",
	} {
		base, h := (&target{url: url}).sandboxAddress(id1, 80)
		if base != want || h.Get("E2b-Sandbox-Id") != id1 || h.Get("E2b-Sandbox-Port") != "80" {
			t.Errorf("%s: %s %v, want %s", url, base, h, want)
		}
	}
	if base, _ := (&target{url: "http://a", sandboxURL: "https://b"}).sandboxAddress(id1, 80); base != "https://b" {
		t.Errorf("set: %s", base)
	}
}

func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // listens at once
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	err = canListen(t.Context(), l.Addr().String())
	if err == nil || err.Error() != l.Addr().String()+" is in use by another program" {
		t.Errorf("got %v", err)
	}
	if err := canListen(t.Context(), "127.0.0.1:0"); err != nil {
		t.Error(err)
	}
}

func TestProgressWithoutTerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := newProgress(&out)
		p.event(adminclient.Event{Step: "fetch"})
		for n := range int64(10_000) { // of 25 s
			p.event(adminclient.Event{Step: "unpack", Message: fmt.Sprint("file ", n), Done: n, Total: 10_000})
			time.Sleep(2500 * time.Microsecond)
		}
		p.event(adminclient.Event{Step: "unpack", Done: 10_000, Total: 10_000})
		p.event(adminclient.Event{Step: "unpack", Done: 10_000, Total: 10_000})
		p.event(adminclient.Event{Message: "almost there"})
		p.end()
		want := "fetch\nunpack: file 0   0%\nunpack: file 4000  40%\nunpack: file 8000  80%\nunpack 100%\nalmost there\n"
		if out.String() != want {
			t.Errorf("got %q, want %q", out.String(), want)
		}
	})
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
	return &copier{app: &app{stderr: io.Discard}, progress: newProgress(io.Discard)}
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

// TestPlain has no character reach a terminal that commands it, or turns text around.
func TestPlain(t *testing.T) {
	for text, want := range map[string]string{
		"näme 名 🙂":                     "näme 名 🙂",
		"a\x1b[2Jb\rc\nd\te\x00\x7f":   `a\x1b[2Jb\rc\nd\te\x00\x7f`,
		"\u009b31m":                    `\u009b31m`,
		"abc\u202etxt.exe\u2066\u200f": `abc\u202etxt.exe\u2066\u200f`,
		"\xff\xfe ok":                  `\xff\xfe ok`,
		"it's":                         "it's",
		strings.Repeat("é", 600):       strings.Repeat("é", maxPlain) + "…",
	} {
		if got := plain(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

func TestDecodeObjects(t *testing.T) {
	got, err := decodeObjects(strings.NewReader(`
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: A, metadata: {name: a}}
- {apiVersion: v1, kind: B, metadata: {name: b}}
---
---
{"apiVersion": "v1", "kind": "C", "metadata": {"name": "c"}}
`))
	if err != nil || len(got) != 3 || got[1].GetKind() != "B" || got[2].GetName() != "c" {
		t.Errorf("%v, %v", got, err)
	}
	for text, want := range map[string]string{
		"kind: A\nmetadata: {name: a}":                             "document 1: apiVersion is missing",
		"apiVersion: v1\nkind: A":                                  "document 1: metadata.name of the A is missing",
		"apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1}\n": "document 1: kind is missing",
		"a: [":   "document 1: ",
		"- a":    "document 1: ",
		`{"a":1`: "document 1: ",
	} {
		if _, err := decodeObjects(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
}
