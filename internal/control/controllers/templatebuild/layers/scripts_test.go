package layers

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// shells are those of Debian and of Alpine, as far as this machine has them.
func shells(t *testing.T) (all [][]string) {
	t.Helper()
	for _, argv := range [][]string{{"dash"}, {"bash", "--posix"}, {"busybox", "sh"}} {
		if path, err := exec.LookPath(argv[0]); err == nil {
			all = append(all, append([]string{path}, argv[1:]...))
		}
	}
	if len(all) == 0 {
		t.Fatal("no shell")
	}
	return all
}

// archive writes the files of an upload; a name with "->" is a link.
func archive(t *testing.T, path string, files ...string) {
	t.Helper()
	var buf bytes.Buffer
	zip := gzip.NewWriter(&buf)
	w := tar.NewWriter(zip)
	for _, name := range files {
		h := &tar.Header{Name: name, Mode: 0o644, Size: int64(len(name))}
		if link, to, is := strings.Cut(name, "->"); is {
			h = &tar.Header{Name: link, Linkname: to, Typeflag: tar.TypeSymlink}
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte(name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := zip.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, buf.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}

// tree lists the files below a directory, with what they contain.
func tree(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		rel, _ := filepath.Rel(dir, path)
		all = append(all, rel+"="+string(text))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestCopyScript(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		files        []string
		source, dest string // dest is below the test's directory
		want         string
		fails        bool
	}{
		"file to a name":            {[]string{"a.txt"}, "a.txt", "/new/b.txt", "new/b.txt=a.txt", false},
		"file to a directory":       {[]string{"dir/a.txt"}, "dir/a.txt", "/new/", "new/a.txt=dir/a.txt", false},
		"directory":                 {[]string{"dir/a", "dir/sub/b"}, "dir", "/new", "new/a=dir/a new/sub/b=dir/sub/b", false},
		"directory with a slash":    {[]string{"dir/a", "dir/.hidden"}, "dir/", "/new/", "new/.hidden=dir/.hidden new/a=dir/a", false},
		"everything":                {[]string{"a", "dir/b"}, ".", "/new", "new/a=a new/dir/b=dir/b", false},
		"wildcard":                  {[]string{"a.txt", "b.txt", "c.md"}, "*.txt", "/new", "new/a.txt=a.txt new/b.txt=b.txt", false},
		"wildcard of one":           {[]string{"src/a.txt", "c.md"}, "src/*.txt", "/new/", "new/a.txt=src/a.txt", false},
		"name with blanks":          {[]string{"a b.txt"}, "a b.txt", "/c d.txt", "c d.txt=a b.txt", false},
		"name that is an option":    {[]string{"-rf"}, "-rf", "/x", "x=-rf", false},
		"name that is a command":    {[]string{"$(touch x)"}, "$(touch x)", "/y", "y=$(touch x)", false},
		"link":                      {[]string{"a", "l->a"}, "l", "/sub/", "", false},
		"what the archive does not": {[]string{"a"}, "b", "/c", "", true},
	} {
		for _, shell := range shells(t) {
			dir := t.TempDir()
			packed, out := filepath.Join(dir, "files.tar.gz"), filepath.Join(dir, "out")
			archive(t, packed, tt.files...)
			if err := os.Mkdir(out, 0o700); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), shell[0], append(shell[1:], "-c", copyScript, "sh", packed, tt.source, out+tt.dest, "", "")...)
			cmd.Dir = dir
			text, err := cmd.CombinedOutput()
			if (err != nil) != tt.fails {
				t.Errorf("%s, %v: %v\n%s", name, shell, err, text)
				continue
			}
			if tt.fails && string(text) != "the archive has no "+tt.source+"\n" {
				t.Errorf("%s, %v: %q", name, shell, text)
			}
			if name == "link" {
				if to, err := os.Readlink(out + "/sub/l"); to != "a" {
					t.Errorf("%v: the link leads to %q, %v", shell, to, err)
				}
				continue
			}
			if got := strings.Join(tree(t, out), " "); got != tt.want {
				t.Errorf("%s, %v: %q, want %q", name, shell, got, tt.want)
			}
			if left, _ := filepath.Glob(packed + "*"); len(left) > 0 && !tt.fails {
				t.Errorf("%s, %v: left %v", name, shell, left)
			}
		}
	}
}

// TestCopyScriptIntoDirectory: a directory that exists keeps its mode.
func TestCopyScriptIntoDirectory(t *testing.T) {
	t.Parallel()
	for _, shell := range shells(t) {
		dir := t.TempDir()
		packed, out := filepath.Join(dir, "files.tar.gz"), filepath.Join(dir, "out")
		archive(t, packed, "d/a", "d/.b", "d/..c")
		if err := errors.Join(os.Mkdir(out, 0o700), os.Chmod(out, 0o777|fs.ModeSticky)); err != nil {
			t.Fatal(err)
		}
		if text, err := exec.CommandContext(t.Context(), shell[0], append(shell[1:], "-c", copyScript, "sh", packed, "d", out, "", "")...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", shell, err, text)
		}
		if info, err := os.Stat(out); err != nil || info.Mode() != fs.ModeDir|fs.ModeSticky|0o777 {
			t.Errorf("%v: its mode is %v, %v", shell, info.Mode(), err)
		}
		if got := strings.Join(tree(t, out), " "); got != "..c=d/..c .b=d/.b a=d/a" {
			t.Errorf("%v: %q", shell, got)
		}
	}
}

func TestCopyScriptMode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	packed := filepath.Join(dir, "files.tar.gz")
	archive(t, packed, "a")
	if out, err := exec.CommandContext(t.Context(), "sh", "-c", copyScript, "sh", packed, "a", dir+"/b", "", "0751").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if info, err := os.Stat(dir + "/b"); err != nil || info.Mode().Perm() != 0o751 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

func TestWorkdirScript(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, shell := range shells(t) {
		for _, sub := range []string{"a/b c", "a/b c", "-x"} {
			cmd := exec.CommandContext(t.Context(), shell[0], append(shell[1:], "-c", workdirScript, "sh", sub, "")...)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v: %v\n%s", shell, err, out)
			}
			if info, err := os.Stat(filepath.Join(dir, sub)); err != nil || !info.IsDir() {
				t.Errorf("%v: %s: %v", shell, sub, err)
			}
		}
	}
}
