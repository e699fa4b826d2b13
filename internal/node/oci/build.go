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
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// builtFrom identifies the file that a build was computed from.
type builtFrom struct {
	size  int64
	mtime time.Time
	build memimage.Build
}

// Build returns the properties that images written now depend on. It is computed once per file at
// the program's path.
func (r *Runtime) Build(ctx context.Context) (memimage.Build, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	info, err := os.Stat(r.cfg.Binary)
	if err != nil {
		return memimage.Build{}, fmt.Errorf("identify runtime %s: %w", r.cfg.Class, err)
	}
	if k := r.cached; k != nil && k.size == info.Size() && k.mtime.Equal(info.ModTime()) {
		return k.build, nil
	}
	b := memimage.Build{Arch: runtime.GOARCH}
	if b.Version, err = r.Version(ctx); err != nil {
		return memimage.Build{}, err
	}
	sum := sha256.New()
	if err := addFile(ctx, sum, r.cfg.Binary); err != nil {
		return memimage.Build{}, fmt.Errorf("identify runtime %s: %w", r.cfg.Class, err)
	}
	b.SHA256 = hex.EncodeToString(sum.Sum(nil))
	if r.cfg.Class == GVisor {
		out, err := exec.CommandContext(ctx, r.cfg.Binary, "cpu-features").Output()
		if err != nil {
			return memimage.Build{}, fmt.Errorf("read processor features from %s: %w", r.cfg.Class, err)
		}
		b.CPUFeatures = strings.Split(strings.TrimSpace(string(out)), ",")
	}
	r.cached = &builtFrom{size: info.Size(), mtime: info.ModTime(), build: b}
	return b, nil
}

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
