package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/errs"
)

const (
	// manifestName is the file in an image's directory that describes it, written last.
	manifestName = "image.json"
	// partSuffix marks directories of images that are being written or removed.
	partSuffix = ".part"
)

// Build is the identity of a runtime on a machine, as far as an image depends on it.
type Build struct {
	// Version is the program's own word, SHA256 that of its file in hexadecimal.
	Version string `json:"version"`
	SHA256  string `json:"sha256"`
	// Arch is Go's name of the architecture.
	Arch string `json:"arch"`
	// CPUFeatures are those of the processor that programs in a sandbox may see and use.
	CPUFeatures []string `json:"cpuFeatures"`
}

// Restores returns nil if b can restore images of a build: it must be the same program, on a
// processor with at least the same features. Otherwise it is an errs.ErrConflict.
func (b Build) Restores(image Build) error {
	if b.SHA256 != image.SHA256 {
		return fmt.Errorf("the image needs the runtime's build %q (SHA-256 %.12s), this is %q (%.12s): %w",
			image.Version, image.SHA256, b.Version, b.SHA256, errs.ErrConflict)
	}
	if b.Arch != image.Arch {
		return fmt.Errorf("the image is of architecture %s, this is %s: %w", image.Arch, b.Arch, errs.ErrConflict)
	}
	var missing []string
	for _, f := range image.CPUFeatures {
		if !slices.Contains(b.CPUFeatures, f) {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("the image needs a processor with %s: %w", strings.Join(missing, ", "), errs.ErrConflict)
	}
	return nil
}

// builtFrom says which file a build was computed of.
type builtFrom struct {
	size  int64
	mtime time.Time
	build Build
}

// Build is what images written now depend on. It is computed once for each file that is put
// at the program's path.
func (r *Runtime) Build(ctx context.Context) (Build, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	info, err := os.Stat(r.cfg.Binary)
	if err != nil {
		return Build{}, fmt.Errorf("identify runtime %s: %w", r.cfg.Class, err)
	}
	if k := r.known; k != nil && k.size == info.Size() && k.mtime.Equal(info.ModTime()) {
		return k.build, nil
	}
	b := Build{Arch: runtime.GOARCH}
	if b.Version, err = r.Version(ctx); err != nil {
		return Build{}, err
	}
	sum := sha256.New()
	if _, err := addFile(ctx, sum, r.cfg.Binary); err != nil {
		return Build{}, fmt.Errorf("identify runtime %s: %w", r.cfg.Class, err)
	}
	b.SHA256 = hex.EncodeToString(sum.Sum(nil))
	if r.cfg.Class == GVisor {
		out, err := exec.CommandContext(ctx, r.cfg.Binary, "cpu-features").Output()
		if err != nil {
			return Build{}, fmt.Errorf("ask %s for the processor's features: %w", r.cfg.Class, err)
		}
		b.CPUFeatures = strings.Split(strings.TrimSpace(string(out)), ",")
	}
	r.known = &builtFrom{size: info.Size(), mtime: info.ModTime(), build: b}
	return b, nil
}

// Image describes a checkpoint's directory.
type Image struct {
	Build       Build       `json:"build"`
	Compression Compression `json:"compression,omitempty"`
	Created     time.Time   `json:"created"`
	Files       []ImageFile `json:"files"`
}

// ImageFile is a file of an image, by its name in the directory.
type ImageFile struct {
	Name string `json:"name"`
	// Size is bytes.
	Size int64 `json:"size"`
}

// Size is the sum of the files in bytes.
func (i Image) Size() (sum int64) {
	for _, f := range i.Files {
		sum += f.Size
	}
	return sum
}

// ReadImage reads what an image's directory says of itself. None is an errs.ErrNotFound. One
// whose files lack something that can be seen without reading them is an errs.ErrInvalid;
// [DigestImage] sees the rest.
func ReadImage(dir string) (img Image, err error) {
	b, err := os.ReadFile(filepath.Join(dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		return Image{}, fmt.Errorf("no checkpoint at %s: %w", dir, errs.ErrNotFound)
	} else if err != nil {
		return Image{}, fmt.Errorf("read checkpoint: %w", err)
	}
	if err := json.Unmarshal(b, &img); err != nil || len(img.Files) == 0 {
		return Image{}, fmt.Errorf("checkpoint %s: its description cannot be read: %w", dir, errs.ErrInvalid)
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

// DigestImage reads an image through and returns a digest of all its files, as "sha256:" and
// hexadecimal. It is for whoever keeps the digest apart from the image.
func DigestImage(ctx context.Context, dir string) (string, error) {
	img, err := ReadImage(dir)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	for _, f := range append(slices.Clone(img.Files), ImageFile{Name: manifestName}) {
		_, _ = fmt.Fprintf(sum, "%s %d\n", f.Name, f.Size)
		if n, err := addFile(ctx, sum, filepath.Join(dir, f.Name)); err != nil {
			return "", fmt.Errorf("digest of checkpoint %s: %w", dir, err)
		} else if f.Size != 0 && n != f.Size {
			return "", fmt.Errorf("checkpoint %s: %s has %d bytes of %d: %w", dir, f.Name, n, f.Size, errs.ErrInvalid)
		}
	}
	return "sha256:" + hex.EncodeToString(sum.Sum(nil)), nil
}

// addFile writes a file to w until ctx ends.
func addFile(ctx context.Context, w io.Writer, path string) (n int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	for {
		m, err := io.CopyN(w, f, 8<<20)
		n += m
		if errors.Is(err, io.EOF) {
			return n, nil
		} else if err = errors.Join(err, context.Cause(ctx)); err != nil {
			return n, err
		}
	}
}

// RemoveImage removes an image's directory, whole or not at all as ReadImage sees it. None is
// success.
func RemoveImage(dir string) error {
	part := dir + partSuffix
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

// SweepImages removes from a directory of images what interrupted checkpoints and removals
// left. Call it when none is under way there.
func SweepImages(parent string) error {
	left, err := filepath.Glob(filepath.Join(parent, "*"+partSuffix))
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

// ListImages names the images in a directory, those that are being written or removed too. No
// directory is none.
func ListImages(parent string) (names []string, err error) {
	entries, err := os.ReadDir(parent)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list checkpoints: %w", err)
	}
	for _, e := range entries {
		if name := strings.TrimSuffix(e.Name(), partSuffix); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// beginImage makes the directory under whose name an image is written.
func beginImage(dir string) (part string, err error) {
	if _, err := os.Lstat(dir); err == nil {
		return "", fmt.Errorf("%s exists: %w", dir, errs.ErrConflict)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	part = dir + partSuffix
	if err := os.RemoveAll(part); err != nil {
		return "", err
	}
	return part, os.Mkdir(part, 0o700)
}

// sealImage describes a written image, makes it durable and gives it its name.
func sealImage(img Image, part, dir string) ([]ImageFile, error) {
	entries, err := os.ReadDir(part)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return nil, err
		}
		img.Files = append(img.Files, ImageFile{Name: e.Name(), Size: info.Size()})
	}
	b, err := json.Marshal(img)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(part, manifestName), b, 0o600); err != nil {
		return nil, err
	}
	for _, name := range append(slices.Clone(img.Files), ImageFile{Name: manifestName}, ImageFile{Name: "."}) {
		if err := syncPath(filepath.Join(part, name.Name)); err != nil {
			return nil, err
		}
	}
	if err := os.Rename(part, dir); err != nil {
		return nil, err
	}
	if err := syncPath(filepath.Dir(dir)); err != nil {
		// It may not be there after a crash, so it must not be there now.
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return img.Files, nil
}

// syncPath makes a file or directory durable.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
