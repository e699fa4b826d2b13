package dockerfile

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// filesOf returns the files of the only COPY.
func filesOf(t *testing.T, root *os.Root, instruction, ignore string) *Files {
	t.Helper()
	p, err := Parse([]byte("FROM x\n"+instruction+"\n"), Options{Name: "Dockerfile", Context: root, Ignore: []byte(ignore)})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range p.Steps {
		if s.Files != nil {
			return s.Files
		}
	}
	t.Fatalf("no COPY in %q", p.lines())
	return nil
}

// unpacked returns the entries of an archive: mode, name, and content or link.
func unpacked(t *testing.T, f *Files) string {
	t.Helper()
	var b bytes.Buffer
	if err := f.Archive(&b); err != nil {
		t.Fatal(err)
	}
	zip, err := gzip.NewReader(&b)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return strings.Join(out, "|")
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil || h.Uid != 0 || h.Uname != "" {
			t.Fatalf("%+v, %v", h, err)
		}
		text := fmt.Sprintf("%o %s %s", h.Mode, h.Name, content)
		if h.Linkname != "" {
			text += "-> " + h.Linkname
		}
		out = append(out, strings.TrimSpace(text))
	}
}

func TestArchive(t *testing.T) {
	tree := map[string]string{
		"app.py": "app", "src/main.go": "main", "src/lib/x.go": "x", "src/up": "->../app.py", "src/far": "->/etc/passwd", "src/empty/": "",
		"other/main.go": "other", "file": "->src/main.go", "dir": "->src/lib", "src/" + strings.Repeat("ü", 70) + "/" + strings.Repeat("n", 120): "long",
	}
	long := strings.Repeat("ü", 70)
	whole := "755 %[1]slib/|644 %[1]slib/x.go x"
	tests := map[string]struct{ copy, ignore, want string }{
		"file":              {copy: "COPY app.py /a", want: "644 app.py app"},
		"below":             {copy: "COPY src/lib/x.go /a", want: "644 src/lib/x.go x"},
		"link to a file":    {copy: "COPY file /a", want: "644 file main"},
		"link to a dir":     {copy: "COPY dir /a", want: "755 dir/|644 dir/x.go x"},
		"directory":         {copy: "COPY src/lib /a", want: "755 src/lib/|644 src/lib/x.go x"},
		"links inside":      {copy: "COPY src /a", ignore: "src/" + long, want: "755 src/|755 src/empty/|777 src/far -> /etc/passwd|" + fmt.Sprintf(whole, "src/") + "|644 src/main.go main|777 src/up -> ../app.py"},
		"long names":        {copy: "COPY src/" + long + " /a", want: "755 src/" + long + "/|644 src/" + long + "/" + strings.Repeat("n", 120) + " long"},
		"several":           {copy: "COPY app.py src/lib other /a/", want: "644 app.py app|644 main.go other|644 x.go x"},
		"the later wins":    {copy: "COPY other/main.go src/main.go /a/", want: "644 main.go main"},
		"ignored directory": {copy: "COPY . /a", ignore: "src\nother\n# none\nfile\ndir\n", want: "644 app.py app"},
		"exception":         {copy: "COPY . /a", ignore: "*\n!src/lib\n", want: fmt.Sprintf(whole, "src/")},
		"exception below":   {copy: "COPY src /a", ignore: "src\n!src/lib/x.go\n", want: "644 src/lib/x.go x"},
		"any depth":         {copy: "COPY . /a", ignore: "**/*.go\n**/far\n**/up\n**/empty\nfile\ndir\nsrc/ü*", want: "644 app.py app|755 other/|755 src/|755 src/lib/"},
		"inline":            {copy: "COPY <<A <<\"B\" app.py /a/\n$X\nA\n$Y\nB", want: "644 A|644 B $Y|644 app.py app"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if got := unpacked(t, filesOf(t, open(t, tree), tt.copy, tt.ignore)); strings.ReplaceAll(got, "\n", "") != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
	_, err := Parse([]byte("FROM x\nCOPY src /a\n"), Options{Name: "D", Context: open(t, tree), Ignore: []byte("src\n")})
	if err == nil || !strings.Contains(err.Error(), `D:2: COPY: "src" is excluded by .dockerignore`) {
		t.Error(err)
	}
}

func TestHash(t *testing.T) {
	tree := map[string]string{"d/a": "1", "d/b": "2", "d/l": "->a", "d/m": "->b"}
	hash := func(root *os.Root, instruction string) string {
		t.Helper()
		sum, err := filesOf(t, root, instruction, "").Hash()
		if err != nil || len(sum) != 64 {
			t.Fatalf("%s, %v", sum, err)
		}
		return sum
	}
	first := open(t, tree)
	want := hash(first, "COPY d /a")
	other := open(t, tree)
	if err := os.Chtimes(filepath.Join(other.Name(), "d/a"), time.Unix(1, 0), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if got := hash(other, "COPY ./d/ /a"); got != want {
		t.Error("the hash depends on times, or on how a path is written")
	}
	changes := map[string]func(dir string) error{
		"content": func(dir string) error { return os.WriteFile(filepath.Join(dir, "d/a"), []byte("3"), 0o644) },
		"mode":    func(dir string) error { return os.Chmod(filepath.Join(dir, "d/a"), 0o755) },
		"name":    func(dir string) error { return os.Rename(filepath.Join(dir, "d/a"), filepath.Join(dir, "d/c")) },
		"link": func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, "d/l")), os.Symlink("b", filepath.Join(dir, "d/l")))
		},
		"more": func(dir string) error { return os.Mkdir(filepath.Join(dir, "d/e"), 0o755) },
		"swap": func(dir string) error { // contents that are the same in a row
			return errors.Join(os.WriteFile(filepath.Join(dir, "d/a"), []byte("12"), 0o644), os.WriteFile(filepath.Join(dir, "d/b"), nil, 0o644))
		},
	}
	for name, change := range changes {
		root := open(t, tree)
		if err := change(root.Name()); err != nil {
			t.Fatal(err)
		}
		if hash(root, "COPY d /a") == want {
			t.Errorf("%s: the hash is the same", name)
		}
	}
	for _, instruction := range []string{"COPY d /b", "COPY d /a/", "COPY d/a /a"} {
		if hash(first, instruction) == want {
			t.Errorf("%s: the hash is the same", instruction)
		}
	}
}

// TestChangeBetween changes files after their hash was read.
func TestChangeBetween(t *testing.T) {
	for name, content := range map[string]string{"other": "2", "shorter": "", "longer": "12"} {
		root := open(t, map[string]string{"a": "1"})
		f := filesOf(t, root, "COPY a /a", "")
		if _, err := f.Hash(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root.Name(), "a"), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := f.Archive(io.Discard); !errors.Is(err, errs.ErrConflict) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSpecialFiles(t *testing.T) {
	root := open(t, map[string]string{"d/a": "1"})
	if err := syscall.Mkfifo(filepath.Join(root.Name(), "d/pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := Parse([]byte("FROM x\nCOPY d /d\n"), Options{Name: "D", Context: root})
	if err == nil || !strings.Contains(err.Error(), `D:2: COPY: "d/pipe" is a socket, a FIFO or a device, which cannot be copied`) {
		t.Error(err)
	}
	filesOf(t, root, "COPY d /d", "d/pipe") // not refused
}
