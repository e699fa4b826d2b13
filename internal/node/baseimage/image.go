package baseimage

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
)

// LabelInputs is the label of an image's config with the hash of its inputs.
const LabelInputs = "dev.barchan.base.inputs"

const (
	annotationName = "io.containerd.image.name" // containerd's importer reads the name from it
	annotationTag  = "org.opencontainers.image.ref.name"
	indexFile      = "index.json"
	tempPrefix     = ".build-"
)

func imageEnv() []string {
	return []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"LANG=C.UTF-8",
	}
}

// build builds the image under the lock that the caller holds. It reports whether a build was needed: the
// image with Debian's Node.js may exist. The warning explains that fallback.
func (c *Config) build(ctx context.Context, report *reporter) (built bool, warning string, err error) {
	if err := sweep(c.Dir); err != nil {
		return false, "", err
	}
	work, err := os.MkdirTemp(c.Dir, tempPrefix)
	if err != nil {
		return false, "", fmt.Errorf("create work directory: %w", err)
	}
	defer func() { err = errors.Join(err, removeWork(work)) }()
	// apt's own user needs access to its directories below.
	if err := os.Chmod(work, 0o755); err != nil {
		return false, "", err
	}
	report.step("fetch Node.js", 0)
	switch err := c.fetchNode(ctx, work); {
	case errors.Is(err, errs.ErrUnavailable):
		c.debianNode = true
		warning = "Node.js is Debian's, and older than " + nodeVersion + ", for npm cannot fetch it: " + err.Error()
		report.step(warning, 0)
		if _, ok := c.find(); ok && !c.Rebuild {
			return false, warning, nil
		}
	case err != nil:
		return false, "", err
	}
	layers, err := c.layers(ctx, work, report)
	if err != nil {
		return false, "", err
	}
	img, err := c.image(layers)
	if err != nil {
		return false, "", fmt.Errorf("assemble image: %w", err)
	}
	report.step("write image", 96)
	tmp := filepath.Join(work, "image")
	if err := c.writeArchive(ctx, tmp, img, layers, report); err != nil {
		return false, "", fmt.Errorf("write image: %w", err)
	}
	if err := os.Rename(tmp, c.path()); err != nil {
		return false, "", err
	}
	return true, warning, durable.SyncDirs(c.Dir)
}

// layers writes Debian's layer, and concurrently that of Node.js.
func (c *Config) layers(ctx context.Context, work string, report *reporter) ([]*layer, error) {
	debian := &layer{path: filepath.Join(work, "debian"), by: "barchan image build " + c.Name}
	if c.debianNode {
		return []*layer{debian}, debian.fill(func(w io.Writer) error { return c.bootstrap(ctx, work, report.count(w), report) })
	}
	epoch, err := c.epoch()
	if err != nil {
		return nil, err
	}
	node := &layer{path: filepath.Join(work, "node"), by: "npm pack"}
	for _, p := range nodePackages() {
		node.by += " " + p.spec()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := node.fill(func(w io.Writer) error { return nodeLayer(ctx, w, work, epoch) }); err != nil {
			cancel(fmt.Errorf("write the layer of Node.js: %w", err))
		}
	})
	err = debian.fill(func(w io.Writer) error { return c.bootstrap(ctx, work, report.count(w), report) })
	if err != nil {
		cancel(err)
	}
	wg.Wait()
	return []*layer{debian, node}, context.Cause(ctx)
}

// image assembles config and manifest of the layers.
func (c *Config) image(layers []*layer) (v1.Image, error) {
	epoch, err := c.epoch()
	if err != nil {
		return nil, err
	}
	base := mutate.MediaType(empty.Image, types.OCIManifestSchema1)
	base = mutate.ConfigMediaType(base, types.OCIConfigJSON)
	parts := make([]mutate.Addendum, len(layers))
	for i, l := range layers {
		parts[i] = mutate.Addendum{Layer: l, History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: l.by}}
	}
	img, err := mutate.Append(base, parts...)
	if err != nil {
		return nil, err
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.Created = v1.Time{Time: epoch}
	file.OS, file.Architecture = "linux", runtime.GOARCH
	file.Config = v1.Config{
		Env:        imageEnv(),
		Cmd:        []string{"/bin/bash"},
		WorkingDir: "/home/user",
		Labels:     map[string]string{LabelInputs: c.inputs()},
	}
	return mutate.ConfigFile(img, file)
}

// writeArchive writes img as an OCI layout in a tar, index first so that it is found fast, and syncs the
// file.
func (c *Config) writeArchive(ctx context.Context, path string, img v1.Image, layers []*layer, report *reporter) error {
	manifest, err := img.RawManifest()
	if err != nil {
		return err
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return err
	}
	index, err := c.index(img)
	if err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }() // a second Close after success does nothing

	t := tar.NewWriter(report.count(file))
	write := func(name string, size int64, r io.Reader) error {
		h := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size, Format: tar.FormatUSTAR}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		_, err := io.Copy(t, portable.WithContext(ctx, r))
		return err
	}
	for _, f := range []struct {
		name string
		data []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{indexFile, index},
		{blobName(digestOf(manifest)), manifest},
		{blobName(digestOf(config)), config},
	} {
		if err := write(f.name, int64(len(f.data)), bytes.NewReader(f.data)); err != nil {
			return err
		}
	}
	for _, l := range layers {
		blob, err := l.Compressed()
		if err != nil {
			return err
		}
		if err := errors.Join(write(blobName(l.digest), l.size, blob), blob.Close()); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), file.Sync(), file.Close())
}

// index returns the layout's index, which names the image.
func (c *Config) index(img v1.Image) ([]byte, error) {
	digest, err := img.Digest()
	if err != nil {
		return nil, err
	}
	size, err := img.Size()
	if err != nil {
		return nil, err
	}
	return json.Marshal(v1.IndexManifest{
		SchemaVersion: 2,
		MediaType:     types.OCIImageIndex,
		Manifests: []v1.Descriptor{{
			MediaType: types.OCIManifestSchema1,
			Size:      size,
			Digest:    digest,
			Platform:  &v1.Platform{OS: "linux", Architecture: runtime.GOARCH},
			Annotations: map[string]string{
				annotationName: c.Ref,
				annotationTag:  c.Ref[strings.LastIndex(c.Ref, ":")+1:],
			},
		}},
	})
}

// readDigest returns the digest of the manifest in a finished image's index, and the file's size. It reads
// all headers of the archive, so that a truncated file is rejected.
func readDigest(path string) (digest string, size int64, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return "", 0, err
	}
	for t := tar.NewReader(file); ; {
		h, err := t.Next()
		switch {
		case errors.Is(err, io.EOF) && digest != "":
			return digest, info.Size(), nil
		case err != nil:
			return "", 0, fmt.Errorf("read archive %s: %w", path, err)
		case h.Name != indexFile:
			continue
		}
		index, err := v1.ParseIndexManifest(io.LimitReader(t, 1<<20))
		if err != nil {
			return "", 0, fmt.Errorf("read index of %s: %w", path, err)
		}
		if len(index.Manifests) != 1 {
			return "", 0, fmt.Errorf("index of %s has %d images, want 1", path, len(index.Manifests))
		}
		digest = index.Manifests[0].Digest.String()
	}
}

// layer is a compressed file system in a file.
type layer struct {
	path, by       string // the file, and its creator
	digest, diffID v1.Hash
	size           int64
}

// fill writes the output of produce, compressed, to the layer's file.
func (l *layer) fill(produce func(io.Writer) error) error {
	file, err := os.OpenFile(l.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	packed, plain := sha256.New(), sha256.New()
	z, err := zstd.NewWriter(io.MultiWriter(file, packed))
	if err != nil {
		return err
	}
	if err := produce(io.MultiWriter(z, plain)); err != nil {
		return errors.Join(err, z.Close())
	}
	if err := errors.Join(z.Close(), file.Close()); err != nil {
		return fmt.Errorf("write layer: %w", err)
	}
	info, err := os.Stat(l.path)
	if err != nil {
		return err
	}
	l.size, l.digest, l.diffID = info.Size(), hashOf(packed), hashOf(plain)
	return nil
}

func (l *layer) Digest() (v1.Hash, error)             { return l.digest, nil }
func (l *layer) DiffID() (v1.Hash, error)             { return l.diffID, nil }
func (l *layer) Size() (int64, error)                 { return l.size, nil }
func (l *layer) MediaType() (types.MediaType, error)  { return types.OCILayerZStd, nil }
func (l *layer) Compressed() (io.ReadCloser, error)   { return os.Open(l.path) }
func (l *layer) Uncompressed() (io.ReadCloser, error) { return nil, errors.ErrUnsupported }

func hashOf(h hash.Hash) v1.Hash {
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(h.Sum(nil))}
}

func digestOf(data []byte) v1.Hash {
	sum := sha256.Sum256(data)
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
}

func blobName(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }

// sweep removes leftovers of killed builds; the lock excludes running ones.
func sweep(dir string) error {
	old, err := filepath.Glob(filepath.Join(dir, tempPrefix+"*"))
	if err != nil {
		return err
	}
	for _, work := range old {
		if err := removeWork(work); err != nil {
			return fmt.Errorf("remove leftovers of an earlier build: %w", err)
		}
	}
	return nil
}

// removeWork removes a work directory, unless something is mounted below it, which could be deleted too.
func removeWork(work string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("find mounts below %s: %w", work, err)
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], work+"/") {
			return fmt.Errorf("%s is mounted: unmount it and remove %s", f[4], work)
		}
	}
	return os.RemoveAll(work)
}
