package portable

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	served "github.com/google/go-containerregistry/pkg/registry"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func bytesOf(b string) Content {
	return func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, b)
		return err
	}
}

// sample is an artifact with two files of the same content, and a base image with the same layer twice.
func sample(t testing.TB, withImage bool) *Layout {
	t.Helper()
	var layers []Layer
	for _, x := range [][3]string{
		{FilesType, "", "files"},
		{AgentType, "", "agent"},
		{VolumeType, "claims/data", "volume"},
		{MemoryType, "pages", strings.Repeat("p", 5000)},
		{MemoryType, "twin", "same"},
		{MemoryType, "image.json", "same"},
	} {
		l, err := Measure(t.Context(), x[0], x[1], bytesOf(x[2]))
		must(t, err)
		layers = append(layers, l)
	}
	config := Config{
		Name: "one", Created: time.Unix(1_800_000_000, 0), Architecture: "amd64", Class: "gvisor", Source: Source{SandboxName: "source"},
		Image: Image{Reference: "docker.io/library/x:latest", Digest: "d", Chain: digest.FromString("chain")}, Node: json.RawMessage(`{"a":1}`),
	}
	contents := map[digest.Digest]string{}
	var base *BaseImage
	if withImage {
		desc := func(kind, text string) ocispec.Descriptor {
			d := ocispec.Descriptor{MediaType: kind, Digest: digest.FromString(text), Size: int64(len(text))}
			contents[d.Digest] = text
			return d
		}
		layer := desc(ocispec.MediaTypeImageLayer, "layer")
		raw, err := json.Marshal(ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest, Config: desc(ocispec.MediaTypeImageConfig, "{}"), Layers: []ocispec.Descriptor{layer, layer}})
		must(t, err)
		base = &BaseImage{Descriptor: ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromBytes(raw), Size: int64(len(raw))}, Manifest: raw}
	}
	l, err := NewLayout(config, base, func(d ocispec.Descriptor) Content { return bytesOf(contents[d.Digest]) }, layers)
	must(t, err)
	return l
}

func tarOf(t testing.TB, l *Layout) []byte {
	t.Helper()
	var b bytes.Buffer
	must(t, l.Write(t.Context(), &b))
	if int64(b.Len()) != l.Size() {
		t.Errorf("the tar has %d bytes, Size returns %d", b.Len(), l.Size())
	}
	return b.Bytes()
}

// readAll reads a tar to its end.
func readAll(r io.Reader) (titles []string, err error) {
	in, err := Read(r)
	if err != nil {
		return nil, err
	}
	for {
		b, err := in.Next()
		if errors.Is(err, io.EOF) {
			return titles, nil
		} else if err != nil {
			return titles, err
		}
		if err := b.Close(); err != nil {
			return titles, err
		}
		titles = append(titles, Title(b.Descriptor))
	}
}

func TestTar(t *testing.T) {
	for _, withImage := range []bool{false, true} {
		whole := tarOf(t, sample(t, withImage))
		titles, err := readAll(bytes.NewReader(whole))
		want := []string{"", "", "claims/data", "pages", "twin", "image.json"}
		if withImage {
			want = append([]string{"", ""}, want...)
		}
		if err != nil || !slices.Equal(titles, want) {
			t.Errorf("%q, %v, want %q", titles, err, want)
		}
		again, err := OpenFile(t.Context(), bytes.NewReader(whole), int64(len(whole)))
		must(t, err)
		if !bytes.Equal(tarOf(t, again), whole) {
			t.Error("what a file has is another tar")
		}
	}
}

// Any truncation or change of a tar's contents is detected.
func TestDamagedTar(t *testing.T) {
	whole := tarOf(t, sample(t, true))
	for n := 0; n < len(whole)-1024-tarBlock; n += 97 {
		if _, err := readAll(bytes.NewReader(whole[:n])); !errors.Is(err, errs.ErrInvalid) {
			t.Fatalf("cut at %d of %d: %v", n, len(whole), err)
		}
	}
	at := bytes.Index(whole, []byte("ppppp")) + 100
	whole[at] ^= 1
	if _, err := readAll(bytes.NewReader(whole)); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "pages") {
		t.Errorf("a flipped bit: %v", err)
	}
}

func TestRegistry(t *testing.T) {
	srv := httptest.NewServer(served.New(served.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo))))
	defer srv.Close()
	for name, withImage := range map[string]bool{"with": true, "without": false} {
		place, err := ParsePlace(Scheme+strings.TrimPrefix(srv.URL, "http://")+"/team/x:"+name, Access{})
		must(t, err)
		whole := tarOf(t, sample(t, withImage))
		for range 2 { // the second finds all blobs there
			in, err := Read(bytes.NewReader(whole))
			must(t, err)
			must(t, Push(t.Context(), in, place))
		}
		l, err := Pull(t.Context(), place)
		must(t, err)
		if !bytes.Equal(tarOf(t, l), whole) {
			t.Errorf("%s image: what was pulled is another tar", name)
		}
	}
	none, err := ParsePlace(Scheme+strings.TrimPrefix(srv.URL, "http://")+"/team/none", Access{})
	must(t, err)
	if _, err := Pull(t.Context(), none); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("none: %v", err)
	}
	if _, err := ParsePlace("oci://nothing", Access{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("no repository: %v", err)
	}
}

// FuzzRead feeds arbitrary input; Read must return an error with a reason and never panic.
func FuzzRead(f *testing.F) {
	f.Add(tarOf(f, sample(f, true)))
	f.Add(tarOf(f, sample(f, false)))
	f.Fuzz(func(t *testing.T, b []byte) {
		in, err := Read(bytes.NewReader(b))
		if err == nil {
			for _, d := range in.Layers {
				if title := Title(d); strings.Contains(title, "..") && strings.ContainsAny(title, "/\x00") && !checkTitle(d) {
					t.Errorf("title %q", title)
				}
			}
		} else if !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%v", err)
		}
	})
}

func FuzzManifest(f *testing.F) {
	for _, b := range sample(f, true).small {
		f.Add(b.content)
	}
	f.Fuzz(func(_ *testing.T, b []byte) {
		h := &Head{}
		_, _ = h.readManifest(b)
		_ = h.readConfig(b)
		_ = h.readImage(ocispec.Descriptor{}, b)
		_, _, _ = choose(b)
	})
}
