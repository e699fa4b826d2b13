package memimage

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

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
	CPUFeatures Features `json:"cpuFeatures"`
}

// Features are names of processor features. Decoded lists that are the same share their memory, and must not be changed: a list is the
// larger half of what a node notes of a sandbox on disk, of which there are thousands.
type Features []string

// shared has decoded lists by their text. A machine has one, until its processor or the runtime is another.
var shared struct {
	sync.Mutex
	lists map[string]Features
}

// maxShared bounds the lists that are kept.
const maxShared = 16

// UnmarshalJSON decodes a list of strings, unless it has decoded the same text before.
func (f *Features) UnmarshalJSON(text []byte) error {
	shared.Lock()
	defer shared.Unlock()
	if known, ok := shared.lists[string(text)]; ok {
		*f = known
		return nil
	}
	var list []string
	if err := json.Unmarshal(text, &list); err != nil {
		return err
	}
	*f = slices.Clip(list)
	if shared.lists == nil {
		shared.lists = map[string]Features{}
	}
	if len(shared.lists) < maxShared {
		shared.lists[string(text)] = *f
	}
	return nil
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
