package portable

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// FormatVersion is the version that this package writes, and the newest that it reads.
const FormatVersion = 1

// Media types of an artifact and its parts.
const (
	ArtifactType = "application/vnd.barchan.checkpoint.v1"
	ConfigType   = "application/vnd.barchan.checkpoint.config.v1+json"
	FilesType    = ocispec.MediaTypeImageLayer
	AgentType    = "application/vnd.barchan.checkpoint.agent.v1"
	VolumeType   = "application/vnd.barchan.checkpoint.volume.v1.tar"
	MemoryType   = "application/vnd.barchan.checkpoint.memory.v1"
)

// Bounds of the data read into memory, in bytes, and of the number of blobs.
const (
	maxJSON  = 8 << 20
	maxBlobs = 4096
)

// Config describes a checkpoint.
type Config struct {
	// FormatVersion is 1.
	FormatVersion int `json:"formatVersion"`
	// Version is the version of the server that wrote it.
	Version string `json:"version,omitempty"`
	// Name is the checkpoint's, Created the time of its state.
	Name    string    `json:"name"`
	Created time.Time `json:"created"`
	// Architecture is Go's name; Class gvisor or runc.
	Architecture string `json:"architecture"`
	Class        string `json:"class"`
	// Memory is nil for files only.
	Memory *Memory `json:"memory,omitempty"`
	// FilesSize is bytes on the disk of the source machine.
	FilesSize int64 `json:"filesSize"`
	Image     Image `json:"image"`
	// Source is the sandbox of the checkpoint.
	Source Source `json:"source"`
	// Node is opaque data from the writing node to the reading one.
	Node json.RawMessage `json:"node"`
}

// Memory describes the saved memory.
type Memory struct {
	Size int64 `json:"size"` // bytes
	// Digest of all its files.
	Digest string `json:"digest"`
	// RuntimeVersion and RuntimeSHA256 identify the only program that can restore it.
	RuntimeVersion string   `json:"runtimeVersion"`
	RuntimeSHA256  string   `json:"runtimeSHA256"`
	CPUFeatures    []string `json:"cpuFeatures,omitempty"`
}

// Image is the base image of the files.
type Image struct {
	// Reference is the sandbox's full reference, Digest what it resolved to on the machine.
	Reference string `json:"reference"`
	Digest    string `json:"digest"`
	// Chain identifies the content of all its layers, independent of names and compression.
	Chain digest.Digest `json:"chain"`
}

// Source is the metadata of the source sandbox.
type Source struct {
	SandboxName string `json:"sandboxName"`
	ID          string `json:"id,omitempty"`
	// TemplateName is the template of the sandbox on the source machine; empty for none, and in
	// artifacts from before this field.
	TemplateName string `json:"templateName,omitempty"`
	// Blueprint and Policies are as in the status of a Checkpoint.
	Blueprint json.RawMessage `json:"blueprint,omitempty"`
	Policies  json.RawMessage `json:"policies,omitempty"`
	// Secrets means that its memory may hold another tenant's variables.
	Secrets bool `json:"secrets,omitempty"`
}

// Head has all metadata of an artifact.
type Head struct {
	Config Config
	// Layers are the checkpoint's blobs, in the order of this package.
	Layers []ocispec.Descriptor
	// Image is the base image's manifest, nil if it was left out.
	Image *BaseImage

	top   ocispec.Descriptor
	small []smallBlob
}

// BaseImage is the image for one platform, whose content is among the blobs.
type BaseImage struct {
	Descriptor ocispec.Descriptor
	Manifest   []byte
	// Blobs are its config and layers, each once.
	Blobs []ocispec.Descriptor
}

// smallBlob is a blob in memory.
type smallBlob struct {
	ocispec.Descriptor
	content []byte
}

// Title is the file name of a blob in its directory, or the name of its volume.
func Title(d ocispec.Descriptor) string { return d.Annotations[ocispec.AnnotationTitle] }

func invalid(format string, args ...any) error {
	return fmt.Errorf("checkpoint artifact: "+format+": %w", append(args, errs.ErrInvalid)...)
}

// decode reads JSON.
func decode(what string, b []byte, into any) error {
	if err := json.Unmarshal(b, into); err != nil {
		return invalid("its %s cannot be read: %v", what, err)
	}
	return nil
}

// fetch returns the verified content of a metadata blob.
type fetch func(d ocispec.Descriptor) ([]byte, error)

// readHead reads an artifact's metadata, from the top down, in the order of this package.
func readHead(top ocispec.Descriptor, get fetch) (*Head, error) {
	h := &Head{top: top}
	take := func(what string, d ocispec.Descriptor) ([]byte, error) {
		if err := checkSmall(what, d); err != nil {
			return nil, err
		}
		b, err := get(d)
		if err == nil {
			h.small = append(h.small, smallBlob{d, b})
		}
		return b, err
	}
	artifact := top
	var image *ocispec.Descriptor
	if top.MediaType == ocispec.MediaTypeImageIndex {
		b, err := take("index", top)
		if err != nil {
			return nil, err
		}
		if artifact, image, err = choose(b); err != nil {
			return nil, err
		}
	} else {
		h.top.ArtifactType = ArtifactType // a registry does not return it; the manifest must have it
	}
	b, err := take("manifest", artifact)
	if err != nil {
		return nil, err
	}
	config, err := h.readManifest(b)
	if err != nil {
		return nil, err
	}
	if b, err = take("config", config); err != nil {
		return nil, err
	}
	if err := h.readConfig(b); err != nil || image == nil {
		return h, err
	}
	if b, err = take("base image's manifest", *image); err != nil {
		return nil, err
	}
	return h, h.readImage(*image, b)
}

func checkSmall(what string, d ocispec.Descriptor) error {
	if err := checkBlob(d); err != nil {
		return err
	}
	if d.Size > maxJSON {
		return invalid("its %s has %d bytes, want at most %d", what, d.Size, maxJSON)
	}
	return nil
}

// checkBlob rejects a descriptor without content.
func checkBlob(d ocispec.Descriptor) error {
	if err := d.Digest.Validate(); err != nil || d.Digest.Algorithm() != digest.SHA256 || d.Size < 0 || len(d.URLs) > 0 {
		return invalid("blob %q of %d bytes: want a digest of SHA-256, a size, and no addresses", d.Digest, d.Size)
	}
	return nil
}

// choose finds the checkpoint, and the base image, in an index.
func choose(b []byte) (artifact ocispec.Descriptor, image *ocispec.Descriptor, err error) {
	var index ocispec.Index
	if err := decode("index", b, &index); err != nil {
		return artifact, nil, err
	}
	for i := range index.Manifests {
		switch d := &index.Manifests[i]; {
		case d.ArtifactType == ArtifactType && artifact.Digest == "":
			artifact = *d
		case d.ArtifactType == "" && image == nil && (d.MediaType == ocispec.MediaTypeImageManifest || d.MediaType == dockerManifest):
			image = d
		default:
			return artifact, nil, invalid("its index has more than a checkpoint and an image, such as %s", d.Digest)
		}
	}
	if artifact.Digest == "" {
		return artifact, nil, invalid("there is no checkpoint in its index (artifactType %s)", ArtifactType)
	}
	return artifact, image, nil
}

// dockerManifest is the older form of an image's manifest.
const dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"

// readManifest reads the artifact's manifest, and returns the config's descriptor.
func (h *Head) readManifest(b []byte) (config ocispec.Descriptor, err error) {
	var m ocispec.Manifest
	if err := decode("manifest", b, &m); err != nil {
		return config, err
	}
	if m.ArtifactType != ArtifactType || m.Config.MediaType != ConfigType {
		return config, invalid("its type is %q with a config of type %q, want %s and %s", m.ArtifactType, m.Config.MediaType, ArtifactType, ConfigType)
	}
	h.Layers = m.Layers
	return m.Config, checkLayers(m.Layers)
}

// stages is the order of layers; each may come again but for those of one.
var stages = map[string]struct {
	order  int
	once   bool
	titled bool
}{
	FilesType:  {order: 0, once: true},
	AgentType:  {order: 1, once: true},
	VolumeType: {order: 2, titled: true},
	MemoryType: {order: 3, titled: true},
}

func checkLayers(layers []ocispec.Descriptor) error {
	if len(layers) == 0 || len(layers) > maxBlobs || layers[0].MediaType != FilesType {
		return invalid("its layers: want from 1 to %d, the first of type %s", maxBlobs, FilesType)
	}
	seen := map[string]bool{}
	last := 0
	for i, d := range layers {
		at := fmt.Sprintf("layers[%d]", i)
		stage, known := stages[d.MediaType]
		key := d.MediaType + " " + Title(d)
		switch err := checkBlob(d); {
		case err != nil:
			return err
		case !known:
			return invalid("%s: type %q is not known; a newer barchan may read it", at, d.MediaType)
		case stage.order < last:
			return invalid("%s: type %s comes too late", at, d.MediaType)
		case stage.once && i > 0 && layers[i-1].MediaType == d.MediaType, seen[key]:
			return invalid("%s: there are two of type %s with title %q", at, d.MediaType, Title(d))
		case stage.titled && !checkTitle(d):
			return invalid("%s: title %q: want a name, or for a volume claims/NAME or scratch/NAME", at, Title(d))
		}
		seen[key], last = true, stage.order
	}
	return nil
}

// checkTitle reports whether a title is valid for a file in a directory, or for a volume.
func checkTitle(d ocispec.Descriptor) bool {
	name := Title(d)
	if d.MediaType == VolumeType {
		kind, rest, ok := strings.Cut(name, "/")
		if !ok || (kind != "claims" && kind != "scratch") {
			return false
		}
		name = rest
	}
	return IsName(name)
}

// IsName reports whether a name is that of a single directory entry.
func IsName(name string) bool {
	return name != "" && name[0] != '.' && len(name) <= 255 && filepath.IsLocal(name) && filepath.Base(name) == name && !strings.ContainsRune(name, 0)
}

func (h *Head) readConfig(b []byte) error {
	var version struct{ FormatVersion int }
	if err := decode("config", b, &version); err != nil {
		return err
	}
	if v := version.FormatVersion; v < 1 || v > FormatVersion {
		return invalid("config.formatVersion: %d, this barchan reads from 1 to %d", v, FormatVersion)
	}
	if err := decode("config", b, &h.Config); err != nil {
		return err
	}
	c := &h.Config
	switch {
	case c.Source.SandboxName == "":
		return invalid("config.source.sandboxName: is empty")
	case c.Architecture == "" || c.Class == "":
		return invalid("config: want architecture and class")
	case c.Image.Reference == "" || c.Image.Chain.Validate() != nil:
		return invalid("config.image: reference %q and chain %q do not name an image", c.Image.Reference, c.Image.Chain)
	case len(c.Node) == 0:
		return invalid("config.node: is empty")
	}
	return nil
}

func (h *Head) readImage(d ocispec.Descriptor, b []byte) error {
	var m ocispec.Manifest
	if err := decode("base image's manifest", b, &m); err != nil {
		return err
	}
	if len(m.Layers) > maxBlobs {
		return invalid("its base image has %d layers, want at most %d", len(m.Layers), maxBlobs)
	}
	h.Image = &BaseImage{Descriptor: d, Manifest: b}
	seen := map[digest.Digest]bool{}
	for _, blob := range append([]ocispec.Descriptor{m.Config}, m.Layers...) {
		if err := checkBlob(blob); err != nil {
			return err
		}
		if !seen[blob.Digest] {
			seen[blob.Digest] = true
			h.Image.Blobs = append(h.Image.Blobs, blob)
		}
	}
	return nil
}

// blobs returns the blobs that are not in memory, in the order of this package.
func (h *Head) blobs() []ocispec.Descriptor {
	var all []ocispec.Descriptor
	if h.Image != nil {
		all = append(all, h.Image.Blobs...)
	}
	return append(all, h.Layers...)
}

// describe makes a small blob.
func describe(mediaType string, v any) (smallBlob, error) {
	b, ok := v.([]byte)
	if !ok {
		var err error
		if b, err = json.Marshal(v); err != nil {
			return smallBlob{}, fmt.Errorf("describe checkpoint: %w", err)
		}
	}
	return smallBlob{ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(b), Size: int64(len(b))}, b}, nil
}

// newHead returns the metadata of an artifact to be written.
func newHead(config Config, image *BaseImage, layers []ocispec.Descriptor) (*Head, error) {
	config.FormatVersion = FormatVersion
	c, err := describe(ConfigType, config)
	if err != nil {
		return nil, err
	}
	m, err := describe(ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, ArtifactType: ArtifactType,
		Config: c.Descriptor, Layers: layers,
		Annotations: map[string]string{ocispec.AnnotationCreated: config.Created.UTC().Format(time.RFC3339), ocispec.AnnotationTitle: config.Name},
	})
	if err != nil {
		return nil, err
	}
	m.ArtifactType = ArtifactType
	small := map[digest.Digest][]byte{m.Digest: m.content, c.Digest: c.content}
	top := m.Descriptor
	if image != nil {
		small[image.Descriptor.Digest] = image.Manifest
		index, err := describe(ocispec.MediaTypeImageIndex, ocispec.Index{
			Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex,
			Manifests: []ocispec.Descriptor{m.Descriptor, image.Descriptor},
		})
		if err != nil {
			return nil, err
		}
		small[index.Digest], top = index.content, index.Descriptor
	}
	return readHead(top, func(d ocispec.Descriptor) ([]byte, error) { return bytes.Clone(small[d.Digest]), nil })
}
