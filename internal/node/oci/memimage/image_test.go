package memimage

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// sealed creates an image of files with random content.
func sealed(t testing.TB, digest bool, sizes ...int64) (dir string, img Image) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "image")
	part, err := Begin(dir)
	must(t, err)
	source := rand.NewChaCha8([32]byte{1})
	for i, size := range sizes {
		b := make([]byte, size)
		_, _ = source.Read(b)
		must(t, os.WriteFile(filepath.Join(part, fmt.Sprintf("f%d", i)), b, 0o600))
	}
	img = Image{Build: Build{SHA256: "abc"}, Created: time.Unix(1_800_000_000, 0).UTC()}
	must(t, Seal(t.Context(), &img, part, dir, digest))
	return dir, img
}

func TestVerifyImageFindsDamage(t *testing.T) {
	dir, img := sealed(t, true, 0, 100, 2*chunkSize+5)
	must(t, Verify(t.Context(), dir))
	if digest, err := Digest(t.Context(), dir); err != nil || digest != img.Digest || digest == "" {
		t.Errorf("digest %q, %v, want %q", digest, err, img.Digest)
	}
	for _, tt := range []struct {
		file  string
		at    int64
		wants string
	}{
		{"f1", 99, "f1 is damaged between the bytes 0 and 99"},
		{"f2", 0, fmt.Sprintf("f2 is damaged between the bytes 0 and %d", chunkSize-1)},
		{"f2", chunkSize + 7, fmt.Sprintf("f2 is damaged between the bytes %d and %d", chunkSize, 2*chunkSize-1)},
		{"f2", 2*chunkSize + 4, fmt.Sprintf("f2 is damaged between the bytes %d and %d", 2*chunkSize, 2*chunkSize+4)},
	} {
		flip(t, filepath.Join(dir, tt.file), tt.at)
		if err := Verify(t.Context(), dir); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), tt.wants) {
			t.Errorf("%s at %d: %v", tt.file, tt.at, err)
		}
		if digest, err := Digest(t.Context(), dir); err != nil || digest == img.Digest {
			t.Errorf("%s at %d: the digest does not detect it: %v", tt.file, tt.at, err)
		}
		flip(t, filepath.Join(dir, tt.file), tt.at)
	}
	must(t, Verify(t.Context(), dir))
	must(t, os.Truncate(filepath.Join(dir, "f2"), 3))
	if err := Verify(t.Context(), dir); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("cut short: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	other, _ := sealed(t, false, 1)
	if err := Verify(ctx, other); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := Verify(t.Context(), dir+"-none"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("no image: %v", err)
	}
}

// A file that was checked is read again once a page has left the cache, or without the attribute that says so.
func TestVerifyReadsWhatLeftTheCache(t *testing.T) {
	dir, img := sealed(t, false, 3*chunkSize)
	path := filepath.Join(dir, "f0")
	before, err := os.Lstat(path)
	must(t, err)
	damaged := func() bool { return errors.Is(Verify(t.Context(), dir), errs.ErrInvalid) }
	if !img.Files[0].checked(path, before) {
		t.Skip("SKIPPED: the file system has no extended attributes, or the kernel does not tell what is cached")
	}
	flip(t, path, chunkSize)
	must(t, os.Chtimes(path, time.Time{}, before.ModTime())) // as damage of a disk, which no file system knows of
	if damaged() {
		t.Error("a file in the page cache, whose time is that of its check, was read")
	}
	f, err := os.Open(path)
	must(t, err)
	must(t, f.Sync())
	must(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	must(t, f.Close())
	if !damaged() {
		t.Error("nothing was in the cache, and the damage was not found")
	}
	flip(t, path, chunkSize)
	must(t, os.Chtimes(path, time.Time{}, before.ModTime()))
	must(t, Verify(t.Context(), dir))
	must(t, unix.Removexattr(path, checkedName))
	flip(t, path, chunkSize)
	must(t, os.Chtimes(path, time.Time{}, before.ModTime()))
	if !damaged() {
		t.Error("a file without the attribute was not read")
	}
	info, err := os.Lstat(path)
	must(t, err)
	if img.Files[0].checked(path, info) {
		t.Error("a damaged file is marked as checked")
	}
}

// flip flips a bit of a byte, and flips it back.
func flip(t *testing.T, path string, at int64) {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	b[at] ^= 4
	must(t, os.WriteFile(path, b, 0o600))
}

// Any changed bit of a manifest is detected.
func TestManifestDamage(t *testing.T) {
	dir, want := sealed(t, false, 10)
	path := filepath.Join(dir, manifestName)
	b, err := os.ReadFile(path)
	must(t, err)
	var plain struct{ ChunkSize int64 } // readers without checksums parse it as JSON
	if err := json.Unmarshal(b, &plain); err != nil || plain.ChunkSize != chunkSize {
		t.Errorf("%v of %s", err, b)
	}
	for i := range b {
		for bit := range 8 {
			broken := bytes.Clone(b)
			broken[i] ^= 1 << bit
			must(t, os.WriteFile(path, broken, 0o600))
			if img, err := Read(dir); !errors.Is(err, errs.ErrInvalid) {
				t.Fatalf("byte %d as %q: %+v, %v", i, broken[i], img, err)
			}
		}
	}
	must(t, os.WriteFile(path, b, 0o600))
	if got, err := Read(dir); err != nil || got.Files[0].CRC32C[0] != want.Files[0].CRC32C[0] {
		t.Errorf("%+v, %v", got, err)
	}
}

// Images without checksums are read and restored.
func TestImagesWithoutChecksums(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "f"), []byte("12"), 0o600))
	text := `{"build":{"version":"v","sha256":"s","arch":"amd64","cpuFeatures":["fpu"]},"created":"2026-09-05T03:51:02Z","files":[{"name":"f","size":2}]}`
	must(t, os.WriteFile(filepath.Join(dir, manifestName), []byte(text), 0o600))
	must(t, Verify(t.Context(), dir))
	must(t, Link(t.Context(), dir, dir+"-linked"))
	must(t, os.WriteFile(filepath.Join(dir, "f"), []byte("123"), 0o600))
	if err := Verify(t.Context(), dir); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("another size: %v", err)
	}
}

func TestLinkImage(t *testing.T) {
	from, img := sealed(t, true, 10, 20)
	to := filepath.Join(t.TempDir(), "linked")
	if err := Link(t.Context(), from+"-none", to); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("no image: %v", err)
	}
	must(t, os.Mkdir(to+PartSuffix, 0o700)) // of an interrupted link
	must(t, Link(t.Context(), from, to))
	if err := Link(t.Context(), from, to); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("again: %v", err)
	}
	must(t, Remove(from))
	must(t, Verify(t.Context(), to))
	if got, err := Read(to); err != nil || got.Digest != img.Digest {
		t.Errorf("%+v, %v", got, err)
	}
	if names, err := List(filepath.Dir(to)); err != nil || len(names) != 1 {
		t.Errorf("left: %v, %v", names, err)
	}
	must(t, os.Truncate(filepath.Join(to, "f1"), 1))
	if err := Link(t.Context(), to, from); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("a damaged one: %v", err)
	}
	noImages(t, filepath.Dir(from))
}

// BenchmarkVerifyImage verifies images that are in the page cache: that were checked, and that were not.
//
//	go test -run '^$' -bench Verify ./internal/node/oci/memimage
func BenchmarkVerifyImage(b *testing.B) {
	for name, size := range map[string]int64{"256MiB": 256 << 20, "1GiB": 1 << 30} {
		for _, again := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/again=%t", name, again), func(b *testing.B) {
				dir, _ := sealed(b, false, size)
				b.SetBytes(size)
				for b.Loop() {
					if !again {
						must(b, unix.Removexattr(filepath.Join(dir, "f0"), checkedName))
					}
					must(b, Verify(b.Context(), dir))
				}
			})
		}
	}
}

func TestReadRefuses(t *testing.T) {
	for _, name := range []string{"../x", "a/b", "/etc/passwd", "..", ""} {
		dir := t.TempDir()
		b, err := json.Marshal(Image{Files: []File{{Name: name}}})
		must(t, err)
		must(t, os.WriteFile(filepath.Join(dir, manifestName), b, 0o600))
		if _, err := Read(dir); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("file name %q: %v", name, err)
		}
	}
}

func TestSweep(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "a"+PartSuffix, "x"), 0o700))
	must(t, os.MkdirAll(filepath.Join(dir, "b"), 0o700))
	must(t, Sweep(dir))
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) != 1 || entries[0].Name() != "b" {
		t.Errorf("remaining: %v", entries)
	}
}

// noImages checks that a directory has no image, complete or partial.
func noImages(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) > 0 {
		t.Errorf("%s has %v", dir, entries)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A manifest comes with an import.
func FuzzManifest(f *testing.F) {
	dir, img := sealed(f, true, 0, 100)
	b, err := os.ReadFile(filepath.Join(dir, manifestName))
	must(f, err)
	f.Add(b)
	bare, err := json.Marshal(Image{Files: []File{{Name: "f", Size: 1}}})
	must(f, err)
	f.Add(bare)
	img.ChunkSize = 1<<63 - 1
	b, err = encodeManifest(img)
	must(f, err)
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		img, err := decodeManifest(b)
		if err != nil {
			if !errors.Is(err, errs.ErrInvalid) {
				t.Errorf("%q: %v", b, err)
			}
			return
		}
		for _, f := range img.Files {
			if n := chunks(f.Size, max(img.ChunkSize, 1)); img.ChunkSize > 0 && n != int64(len(f.CRC32C)) {
				t.Errorf("%q: %d checksums of %d", b, len(f.CRC32C), n)
			}
		}
		again, err := encodeManifest(img)
		must(t, err)
		if _, err := decodeManifest(again); img.ChunkSize > 0 && err != nil {
			t.Errorf("%q: not again: %v", b, err)
		}
	})
}

// TestNamesOfMany: a list of all images takes no time that grows with their square.
func TestNamesOfMany(t *testing.T) {
	const n = 300_000
	entries := make([]fs.DirEntry, 0, n+1)
	for i := range n {
		entries = append(entries, named(fmt.Sprintf("i%019d", i)))
	}
	entries = append(entries, named("i0000000000000000007"+PartSuffix))
	began := time.Now()
	if names := namesOf(entries); len(names) != n || names[7] != "i0000000000000000007" {
		t.Errorf("%d names, the eighth is %s", len(names), names[7])
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
}

// named is an entry of a directory.
type named string

func (n named) Name() string             { return string(n) }
func (named) IsDir() bool                { return true }
func (named) Type() fs.FileMode          { return fs.ModeDir }
func (named) Info() (fs.FileInfo, error) { return nil, fs.ErrNotExist }
