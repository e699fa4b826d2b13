package memimage

import (
	"fmt"
	"slices"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Build identifies a runtime on a host, as far as an image depends on it.
type Build struct {
	// Version is the program's version string, SHA256 the hash of its file in hexadecimal.
	Version string `json:"version"`
	SHA256  string `json:"sha256"`
	// Arch is Go's name of the architecture.
	Arch string `json:"arch"`
	// CPUFeatures are the processor features that programs in a sandbox may use.
	CPUFeatures []string `json:"cpuFeatures"`
}

// Restores returns nil if b can restore images of a build: the same program, on a processor with at
// least the same features. Otherwise it is an errs.ErrConflict.
func (b Build) Restores(image Build) error {
	if b.SHA256 != image.SHA256 {
		return fmt.Errorf("image requires runtime build %q (SHA-256 %.12s), not %q (%.12s): %w",
			image.Version, image.SHA256, b.Version, b.SHA256, errs.ErrConflict)
	}
	if b.Arch != image.Arch {
		return fmt.Errorf("image requires architecture %s, not %s: %w", image.Arch, b.Arch, errs.ErrConflict)
	}
	var missing []string
	for _, f := range image.CPUFeatures {
		if !slices.Contains(b.CPUFeatures, f) {
			missing = append(missing, f)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("image requires a processor with %s: %w", strings.Join(missing, ", "), errs.ErrConflict)
	}
	return nil
}

// Compression is the format of the memory in an image.
type Compression string

// Compressions.
const (
	// NoCompression keeps pages in a separate file, which a restore reads in parallel and, with
	// RestoreOptions.Background, while the sandbox already runs.
	NoCompression Compression = ""
	// Flate makes the image smaller and both directions much slower.
	Flate Compression = "flate-best-speed"
)
