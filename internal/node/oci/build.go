package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
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
	if err := addFile(ctx, sum, r.cfg.Binary); err != nil {
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

// addFile writes a file to w until ctx ends.
func addFile(ctx context.Context, w io.Writer, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	for {
		_, err := io.CopyN(w, f, 8<<20)
		if errors.Is(err, io.EOF) {
			return nil
		} else if err = errors.Join(err, context.Cause(ctx)); err != nil {
			return err
		}
	}
}
