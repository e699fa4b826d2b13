// Package memimage reads, verifies, links and removes the memory images of checkpoints: directories
// that a runtime wrote and that [Seal] described with checksums. It writes and restores no memory,
// and never repairs an image.
//
// It has no locks; callers serialize changes to one directory.
package memimage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	// manifestName is the file that describes an image, written last.
	manifestName = "image.json"
	// PartSuffix marks directories of images that are being written or removed.
	PartSuffix = ".part"
	// maxManifest bounds a manifest in bytes; one of a tebibyte of memory has less. An import may bring any.
	maxManifest = 4 << 20
)

// Image describes a checkpoint's directory.
type Image struct {
	Build       Build       `json:"build"`
	Compression Compression `json:"compression,omitempty"`
	Created     time.Time   `json:"created"`
	// ChunkSize is the bytes per checksum, except a file's last. Images without checksums have
	// zero.
	ChunkSize int64  `json:"chunkSize,omitempty"`
	Files     []File `json:"files"`
	// Digest is of all files, as "sha256:" and hexadecimal; empty unless CheckpointOptions.Digest
	// is set. [Digest] computes the same.
	Digest string `json:"digest,omitempty"`
	// Paused is how long Checkpoint stopped a container that it left running, including Written;
	// zero without Written. It is not stored.
	Paused time.Duration `json:"-"`
}

// File is a file of an image, by its name in the directory.
type File struct {
	Name string `json:"name"`
	// Size is bytes.
	Size int64 `json:"size"`
	// CRC32C are the checksums (Castagnoli) of its chunks of Image.ChunkSize bytes, in order.
	CRC32C []uint32 `json:"crc32c,omitempty"`
}

// Size is the sum of the files in bytes.
func (i Image) Size() (sum int64) {
	for _, f := range i.Files {
		sum += f.Size
	}
	return sum
}

// Read reads an image's manifest. A missing image is an errs.ErrNotFound. Damage that is visible
// without reading the files is an errs.ErrInvalid; [Verify] finds the rest.
func Read(dir string) (img Image, err error) {
	b, err := readManifest(filepath.Join(dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		return Image{}, fmt.Errorf("no checkpoint at %s: %w", dir, errs.ErrNotFound)
	} else if err != nil {
		return Image{}, fmt.Errorf("read checkpoint: %w", err)
	}
	if img, err = decodeManifest(b); err != nil {
		return Image{}, fmt.Errorf("checkpoint %s: manifest %s %w", dir, manifestName, err)
	}
	for _, f := range img.Files {
		if !filepath.IsLocal(f.Name) || filepath.Base(f.Name) != f.Name {
			return Image{}, fmt.Errorf("checkpoint %s: file name %q: %w", dir, f.Name, errs.ErrInvalid)
		}
		info, err := os.Lstat(filepath.Join(dir, f.Name))
		if errors.Is(err, fs.ErrNotExist) {
			return Image{}, fmt.Errorf("checkpoint %s: %s is missing: %w", dir, f.Name, errs.ErrInvalid)
		} else if err != nil {
			return Image{}, fmt.Errorf("read checkpoint: %w", err)
		}
		if !info.Mode().IsRegular() || info.Size() != f.Size {
			return Image{}, fmt.Errorf("checkpoint %s: %s has %d bytes of %d: %w", dir, f.Name, info.Size(), f.Size, errs.ErrInvalid)
		}
	}
	return img, nil
}

// readManifest reads a file of at most maxManifest bytes; the rest of a larger one is missing, which its checksum shows.
func readManifest(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, maxManifest))
}

// sumFormat ends a manifest with its checksum, as the last field of the JSON object, so that older
// readers accept it.
const sumFormat = `,"crc32c":"%08x"}`

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func encodeManifest(img Image) ([]byte, error) {
	b, err := json.Marshal(img)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(b[:len(b)-1], sumFormat, crc32.Checksum(b, castagnoli)), nil
}

// decodeManifest reads a manifest. Those of images without checksums have none either.
func decodeManifest(b []byte) (img Image, err error) {
	if err := json.Unmarshal(b, &img); err != nil || len(img.Files) == 0 {
		return Image{}, fmt.Errorf("cannot be read: %w", errs.ErrInvalid)
	}
	length := len(fmt.Sprintf(sumFormat, 0))
	if len(b) > length {
		whole := append(slices.Clone(b[:len(b)-length]), '}')
		if string(b[len(b)-length:]) == fmt.Sprintf(sumFormat, crc32.Checksum(whole, castagnoli)) {
			return img, img.checkSums()
		}
	}
	if img.ChunkSize != 0 || strings.Contains(string(b), "crc32c") {
		return Image{}, fmt.Errorf("is damaged: its checksum differs: %w", errs.ErrInvalid)
	}
	return img, nil
}

func (i Image) checkSums() error {
	for _, f := range i.Files {
		if i.ChunkSize < 1 || f.Size < 0 || int64(len(f.CRC32C)) != chunks(f.Size, i.ChunkSize) {
			return fmt.Errorf("lacks checksums of %s: %w", f.Name, errs.ErrInvalid)
		}
	}
	return nil
}

// Remove removes an image's directory, atomically as seen by Read. None is success.
func Remove(dir string) error {
	part := dir + PartSuffix
	if err := os.RemoveAll(part); err != nil {
		return fmt.Errorf("remove checkpoint: %w", err)
	}
	if err := os.Rename(dir, part); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove checkpoint: %w", err)
	}
	if err := os.RemoveAll(part); err != nil {
		return fmt.Errorf("remove checkpoint: %w", err)
	}
	return nil
}

// Sweep removes leftovers of interrupted checkpoints, links and removals from a directory of
// images. No such operation may be running.
func Sweep(parent string) error {
	left, err := filepath.Glob(filepath.Join(parent, "*"+PartSuffix))
	if err != nil {
		return fmt.Errorf("sweep checkpoints: %w", err)
	}
	var failures []error
	for _, path := range left {
		failures = append(failures, os.RemoveAll(path))
	}
	if err := errors.Join(failures...); err != nil {
		return fmt.Errorf("sweep checkpoints: %w", err)
	}
	return nil
}

// List names the images in a directory, partial ones included. A missing directory has none.
func List(parent string) (names []string, err error) {
	entries, err := os.ReadDir(parent)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list checkpoints: %w", err)
	}
	return namesOf(entries), nil
}

// namesOf names the images of a directory's entries, each once and in order. There may be tens of thousands.
func namesOf(entries []fs.DirEntry) []string {
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), PartSuffix))
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// Link makes an image available under another directory too, whose parent exists, on the same
// filesystem. The files are shared, without time or space, until both are removed. The directory
// appears complete and durable, or not at all. No image at from is an errs.ErrNotFound, damage that
// Read finds an errs.ErrInvalid, an existing to an errs.ErrConflict.
func Link(ctx context.Context, from, to string) (err error) {
	img, err := Read(from)
	if err != nil {
		return err
	}
	part, err := Begin(to)
	if err != nil {
		return fmt.Errorf("link checkpoint: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("link checkpoint: %w", errors.Join(err, os.RemoveAll(part)))
		}
	}()
	for _, f := range append(slices.Clone(img.Files), File{Name: manifestName}) {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := os.Link(filepath.Join(from, f.Name), filepath.Join(part, f.Name)); err != nil {
			return err
		}
	}
	if err := syncPath(part); err != nil {
		return err
	}
	return place(part, to)
}

// Begin creates the directory that an image is written to.
func Begin(dir string) (part string, err error) {
	if _, err := os.Lstat(dir); err == nil {
		return "", fmt.Errorf("%s exists: %w", dir, errs.ErrConflict)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	part = dir + PartSuffix
	if err := os.RemoveAll(part); err != nil {
		return "", err
	}
	return part, os.Mkdir(part, 0o700)
}

// place renames a durable image.
func place(part, dir string) error {
	if err := os.Rename(part, dir); err != nil {
		return err
	}
	if err := syncPath(filepath.Dir(dir)); err != nil {
		// It may be lost in a crash, so it must not exist now.
		return errors.Join(err, os.RemoveAll(dir))
	}
	return nil
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
