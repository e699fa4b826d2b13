package projection

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/podsource"
)

func files(pairs ...string) map[string]podsource.File {
	all := map[string]podsource.File{}
	for i := 0; i < len(pairs); i += 2 {
		all[pairs[i]] = podsource.File{Data: []byte(pairs[i+1]), Mode: 0o640}
	}
	return all
}

// visible returns what a reader of a volume finds, by path.
func visible(t *testing.T, dir string) (found []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name()[0] == '.' {
			continue
		}
		top, err := filepath.EvalSymlinks(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		err = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			rel, _ := filepath.Rel(top, path)
			text, err := os.ReadFile(path)
			found = append(found, filepath.Join(e.Name(), rel)+"="+string(text))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(found)
	return found
}

func want(t *testing.T, dir string, want ...string) {
	t.Helper()
	if got := visible(t, dir); !slices.Equal(got, want) {
		t.Errorf("the volume has %q, want %q", got, want)
	}
}

func target(t *testing.T, dir string) string {
	t.Helper()
	to, err := os.Readlink(filepath.Join(dir, dataLink))
	if err != nil {
		t.Fatal(err)
	}
	return to
}

func write(t *testing.T, dir string, f map[string]podsource.File) {
	t.Helper()
	if err := Write(dir, f, 0); err != nil {
		t.Fatal(err)
	}
}

func TestWrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "v")
	write(t, dir, files("a", "1", "deep/b", "2", "deep/c", "3"))
	want(t, dir, "a=1", "deep/b=2", "deep/c=3")
	if info, err := os.Stat(filepath.Join(dir, "a")); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("mode: %v, %v", info, err)
	}
	first := target(t, dir)
	open, err := os.Open(filepath.Join(dir, "a"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = open.Close() }()

	write(t, dir, files("a", "1", "deep/b", "2", "deep/c", "3"))
	if target(t, dir) != first {
		t.Error("equal files are written again")
	}
	write(t, dir, files("deep/b", "4", "d", "5"))
	want(t, dir, "d=5", "deep/b=4")
	if entries, _ := os.ReadDir(dir); len(entries) != 4 { // both, ..data and ..HASH
		t.Errorf("it has %v", entries)
	}
	write(t, dir, files("a", "1", "deep/b", "2", "deep/c", "3"))
	if target(t, dir) != first {
		t.Error("the same files have another path")
	}
	write(t, dir, files())
	want(t, dir)
}

// TestWriteAfterCrash: whatever a killed writer leaves, the next one makes the volume whole.
func TestWriteAfterCrash(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "v")
	write(t, dir, files("old", "1"))
	next := files("new", "2")
	half := filepath.Join(dir, ".."+hashOf(next, 0))
	for _, err := range []error{
		os.Mkdir(half, 0o755), os.WriteFile(filepath.Join(half, "other"), nil, 0o600), os.Symlink("nowhere", filepath.Join(dir, newLink)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	write(t, dir, next)
	want(t, dir, "new=2")
	if _, err := os.Stat(filepath.Join(half, "other")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the half-written file: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "new")); err != nil { // killed between the rename and the links
		t.Fatal(err)
	}
	write(t, dir, next)
	want(t, dir, "new=2")
}

func TestCopy(t *testing.T) {
	dir, to := filepath.Join(t.TempDir(), "v"), filepath.Join(t.TempDir(), "copies", "0")
	write(t, dir, files("a", "1", "deep/b", "2"))
	for _, sub := range []string{"a", "deep"} {
		if err := Copy(dir, sub, to+sub); err != nil {
			t.Fatal(err)
		}
	}
	write(t, dir, files("a", "3"))
	if err := Copy(dir, "a", to+"a"); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{to + "a": "1", to + "deep/b": "2"} {
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
	if err := Copy(dir, "none", to+"none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a path that is not there: %v", err)
	}
}
