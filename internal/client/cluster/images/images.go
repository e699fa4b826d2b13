// Package images makes container images of our static programs, without a container runtime. Two runs over the same programs make
// the same images.
package images

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// user runs the programs, where the Pod names none. No file belongs to it.
const user = "65532:65532"

// Build returns an image of one program, which is its entrypoint, for the architecture of each of the files. A file is a static
// ELF program; the image has it in its root directory, by its own name. Errors are errs.ErrInvalid where they are the files'.
func Build(title, version string, files ...string) (v1.ImageIndex, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, file := range files {
		image, platform, err := build(title, version, file)
		if err != nil {
			return nil, fmt.Errorf("image of %s: %w", file, err)
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: platform}})
	}
	return index, nil
}

func build(title, version, file string) (v1.Image, *v1.Platform, error) {
	architecture, err := architectureOf(file)
	if err != nil {
		return nil, nil, err
	}
	program := "/" + filepath.Base(file)
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return pack(program, file) },
		tarball.WithCompressionLevel(gzip.BestSpeed), tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, nil, err
	}
	image, err := mutate.AppendLayers(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON), layer)
	if err != nil {
		return nil, nil, err
	}
	platform := &v1.Platform{OS: "linux", Architecture: architecture}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = platform.OS, platform.Architecture
	config.Config = v1.Config{
		User: user, Entrypoint: []string{program}, WorkingDir: "/",
		Labels: map[string]string{"org.opencontainers.image.title": title, "org.opencontainers.image.version": version},
	}
	image, err = mutate.ConfigFile(image, config)
	return image, platform, err
}

// architectureOf returns Go's name for the architecture of a static program.
func architectureOf(file string) (string, error) {
	program, err := elf.Open(file)
	if err != nil {
		return "", fmt.Errorf("%w: %w", err, errs.ErrInvalid)
	}
	defer func() { _ = program.Close() }()
	for _, p := range program.Progs {
		if p.Type == elf.PT_INTERP {
			return "", fmt.Errorf("it is not a static program: %w", errs.ErrInvalid)
		}
	}
	name, ok := architectures[program.Machine]
	if !ok {
		return "", fmt.Errorf("%s is not supported: %w", program.Machine, errs.ErrInvalid)
	}
	return name, nil
}

// architectures are those that Barchan is built for, by Go's names.
var architectures = map[elf.Machine]string{elf.EM_X86_64: "amd64", elf.EM_AARCH64: "arm64"}

// pack returns a tar of a program alone, as it is read.
func pack(name, file string) (io.ReadCloser, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var head, end bytes.Buffer
	w := tar.NewWriter(&head)
	if err := w.WriteHeader(&tar.Header{Name: path.Base(name), Typeflag: tar.TypeReg, Mode: 0o755, Size: info.Size(), ModTime: time.Unix(0, 0)}); err != nil {
		return nil, err
	}
	const block = 512
	end.Write(make([]byte, (block-info.Size()%block)%block+2*block))
	return struct {
		io.Reader
		io.Closer
	}{io.MultiReader(&head, io.LimitReader(f, info.Size()), &end), f}, nil
}
