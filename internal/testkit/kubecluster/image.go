package kubecluster

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// PodImage is an image that each node has. Its program, /pod, waits; `/pod serve :8080` answers HTTP
// requests with the name of the host; `/pod echo` prints its arguments; `/pod cat` copies its input;
// `/pod api /version` prints what the API server responds to the Pod's ServiceAccount.
const PodImage = "barchan.test/pod:1"

// Image describes a small image to write.
type Image struct {
	// Name is a whole reference, such as barchan.test/pod:1.
	Name string
	// Root is a tar of a root file system, below Files; empty: none.
	Root string
	// Files are executable files to copy into the image, by their absolute paths there.
	Files map[string]string
	// Config has the command, environment and user.
	Config ocispec.ImageConfig
}

// WriteImage writes an image as an OCI layout in a tar, for [Cluster.ImportImage], and returns its path.
func WriteImage(t testing.TB, img Image) (ociTar string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.tar")
	if err := img.write(path); err != nil {
		t.Fatal(err)
	}
	return path
}

func (i Image) write(path string) error {
	layers, err := i.layers()
	if err != nil {
		return err
	}
	var ids []digest.Digest
	var described []ocispec.Descriptor
	for _, layer := range layers { // they are not compressed
		ids, described = append(ids, digest.FromBytes(layer)), append(described, descriptor(ocispec.MediaTypeImageLayer, layer))
	}
	platform := ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH}
	config, err := json.Marshal(ocispec.Image{
		Platform: platform, Config: i.Config,
		RootFS: ocispec.RootFS{Type: "layers", DiffIDs: ids},
	})
	if err != nil {
		return err
	}
	version := specs.Versioned{SchemaVersion: 2}
	manifest, err := json.Marshal(ocispec.Manifest{
		Versioned: version, MediaType: ocispec.MediaTypeImageManifest,
		Config: descriptor(ocispec.MediaTypeImageConfig, config),
		Layers: described,
	})
	if err != nil {
		return err
	}
	top := descriptor(ocispec.MediaTypeImageManifest, manifest)
	top.Platform = &platform
	top.Annotations = map[string]string{"io.containerd.image.name": i.Name}
	index, err := json.Marshal(ocispec.Index{Versioned: version, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{top}})
	if err != nil {
		return err
	}
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	files := []tarFile{{"oci-layout", 0o644, []byte(`{"imageLayoutVersion":"1.0.0"}`)}, {"index.json", 0o644, index}}
	for _, b := range append(layers, config, manifest) {
		files = append(files, tarFile{"blobs/sha256/" + digest.FromBytes(b).Encoded(), 0o644, b})
	}
	for _, f := range files {
		if err := f.write(w); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(path, out.Bytes(), 0o600)
}

func (i Image) layers() (all [][]byte, err error) {
	if i.Root != "" {
		root, err := os.ReadFile(i.Root)
		if err != nil {
			return nil, err
		}
		all = append(all, root)
	}
	files, err := i.files()
	return append(all, files), err
}

// files is the layer of Files.
func (i Image) files() ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, dir := range []string{"tmp/", "etc/"} {
		if err := w.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o1777}); err != nil {
			return nil, err
		}
	}
	for target, source := range i.Files {
		content, err := os.ReadFile(source)
		if err != nil {
			return nil, err
		}
		if err := (tarFile{target[1:], 0o755, content}).write(w); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return out.Bytes(), err
}

type tarFile struct {
	name    string
	mode    int64
	content []byte
}

func (f tarFile) write(w *tar.Writer) error {
	h := &tar.Header{Name: f.name, Typeflag: tar.TypeReg, Mode: f.mode, Size: int64(len(f.content))}
	if err := w.WriteHeader(h); err != nil {
		return err
	}
	_, err := io.Copy(w, bytes.NewReader(f.content))
	return err
}

func descriptor(mediaType string, content []byte) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content))}
}

// buildPod builds the program of [PodImage].
func buildPod(t testing.TB, path string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-ldflags=-s -w", "-o", path,
		"github.com/barchan-dev/barchan/internal/testkit/kubecluster/testdata/pod")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.WaitDelay = eventually.Patience
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the program of Pods: %v\n%s", err, out)
	}
}
