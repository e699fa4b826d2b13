package memimage

import (
	"fmt"
	"slices"
	"strings"

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

// Compression says how the memory in an image is written.
type Compression string

// Compressions.
const (
	// NoCompression keeps pages in a file of their own, which a restore reads in parallel and,
	// with RestoreOptions.Background, while the sandbox already runs.
	NoCompression Compression = ""
	// Flate makes the image smaller and both ways much slower.
	Flate Compression = "flate-best-speed"
)
