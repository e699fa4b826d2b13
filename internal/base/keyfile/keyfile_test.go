package keyfile

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestOpenMakesAndKeeps(t *testing.T) {
	f := File{Path: filepath.Join(t.TempDir(), "key"), What: "key of tests", Size: 32, Max: 2}
	if _, err := f.Read(); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), f.Path) {
		t.Errorf("Read of a missing file: %v, want one that names it", err)
	}
	made, err := f.Open()
	if err != nil || len(made) != 1 || len(made[0]) != 32 || bytes.Equal(made[0], make([]byte, 32)) {
		t.Fatalf("Open = %x, %v", made, err)
	}
	if info, err := os.Stat(f.Path); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if again, err := f.Open(); err != nil || !reflect.DeepEqual(again, made) {
		t.Errorf("Open again = %x, %v, want %x", again, err, made)
	}
	want := [][]byte{f.New(), made[0]}
	if err := f.Write(want...); err != nil {
		t.Fatal(err)
	}
	if got, err := f.Read(); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("Read = %x, %v, want %x", got, err, want)
	}
}

func TestMissing(t *testing.T) {
	f := File{Path: filepath.Join(t.TempDir(), "none", "key"), What: "key of tests", Size: 32, Max: 2}
	if _, err := f.Open(); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), f.Path) {
		t.Errorf("Open without a directory: %v", err)
	}
}

func TestLength(t *testing.T) {
	for name, tt := range map[string]struct {
		bytes, max int
		keys       int // 0: refused
	}{
		"one":            {bytes: 4, max: 1, keys: 1},
		"any number":     {bytes: 40, keys: 10},
		"empty":          {bytes: 0, max: 1},
		"cut off":        {bytes: 3, max: 1},
		"one too many":   {bytes: 12, max: 2},
		"with a newline": {bytes: 5},
		"endless":        {bytes: maxSize + 4},
	} {
		t.Run(name, func(t *testing.T) {
			f := File{Path: filepath.Join(t.TempDir(), "key"), What: "key of tests", Size: 4, Max: tt.max}
			content := bytes.Repeat([]byte("k"), tt.bytes)
			if err := os.WriteFile(f.Path, content, mode); err != nil {
				t.Fatal(err)
			}
			keys, err := f.Open()
			if len(keys) != tt.keys || (err != nil) != (tt.keys == 0) {
				t.Errorf("Open = %d keys, %v, want %d", len(keys), err, tt.keys)
			}
			if err != nil && (!errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), f.What+" "+f.Path)) {
				t.Errorf("Open: %v, want an errs.ErrInvalid that names the file", err)
			}
			if left, err := os.ReadFile(f.Path); err != nil || !bytes.Equal(left, content) {
				t.Errorf("the file has changed: %v", err)
			}
		})
	}
}

func TestType(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, mode); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, fifo} {
		if _, err := (File{Path: path, What: "key", Size: 4}).Open(); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("Open of %s: %v, want an errs.ErrInvalid", path, err)
		}
	}
}

// TestOwnerAndMode gives files to other users, which only root can.
func TestOwnerAndMode(t *testing.T) {
	const other = 60701
	for name, tt := range map[string]struct {
		uid      int
		mode     fs.FileMode
		anyOwner bool
		want     string // part of the error; empty: none
	}{
		"own":                           {mode: 0o600},
		"own, read-only":                {mode: 0o400},
		"own, of a group":               {mode: 0o640, want: "chmod 0600"},
		"own, of all":                   {mode: 0o644, want: "its mode is 0644"},
		"own, writable for all":         {mode: 0o602, want: "its mode"},
		"another's":                     {uid: other, mode: 0o600, want: "belongs to user 60701"},
		"another's, allowed":            {uid: other, mode: 0o600, anyOwner: true},
		"another's, of a group":         {uid: other, mode: 0o440, anyOwner: true},
		"another's, writable for group": {uid: other, mode: 0o660, anyOwner: true, want: "chmod 0640"},
		"another's, of all":             {uid: other, mode: 0o444, anyOwner: true, want: "its mode"},
	} {
		t.Run(name, func(t *testing.T) {
			f := File{Path: filepath.Join(t.TempDir(), "key"), What: "key of tests", Size: 4, AnyOwner: tt.anyOwner}
			if err := errors.Join(os.WriteFile(f.Path, []byte("abcd"), mode), os.Chmod(f.Path, tt.mode)); err != nil {
				t.Fatal(err)
			}
			if tt.uid != 0 {
				if os.Geteuid() != 0 {
					t.Skip("needs root to give a file away")
				}
				if err := os.Chown(f.Path, tt.uid, -1); err != nil {
					t.Fatal(err)
				}
			}
			_, err := f.Open()
			if tt.want == "" && err != nil {
				t.Errorf("Open: %v", err)
			}
			if tt.want != "" && (!errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), f.Path)) {
				t.Errorf("Open: %v, want an errs.ErrInvalid with %q", err, tt.want)
			}
		})
	}
}

// TestRootsFile is of a process without root, such as one that reads a Secret of Kubernetes.
func TestRootsFile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs a file of root")
	}
	f := File{Path: filepath.Join(t.TempDir(), "key"), What: "key of tests", Size: 4}
	if err := f.Write([]byte("abcd")); err != nil {
		t.Fatal(err)
	}
	for mode, ok := range map[fs.FileMode]bool{0o440: true, 0o444: false, 0o460: false} {
		if err := os.Chmod(f.Path, mode); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(f.Path)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.check(info, 60701); (err == nil) != ok {
			t.Errorf("mode %04o: %v, want it allowed: %t", mode, err, ok)
		}
	}
}
