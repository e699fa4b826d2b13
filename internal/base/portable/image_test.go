package portable

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"path"
	"runtime"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func (l *locked) image(t *testing.T, tag string, a Access) Place {
	t.Helper()
	p, err := ParseImage(l.host+"/team/"+tag, a)
	must(t, err)
	return p
}

// owner has the password, from no file.
func (l *locked) owner() Access { return Access{CAFile: l.ca, Username: "user", Password: "right"} }

func randomImage(t *testing.T) v1.Image {
	t.Helper()
	img, err := random.Image(1000, 2)
	must(t, err)
	return img
}

// pulledImage is an image's layout as the tar has it: each of its files by name, and which one it is of.
func pulledImage(t *testing.T, from Place) (files map[string][]byte, top ocispec.Descriptor) {
	t.Helper()
	l, err := PullImage(t.Context(), from)
	must(t, err)
	files = map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(tarOf(t, l))); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		b, err := io.ReadAll(r)
		must(t, err)
		if hex, isBlob := strings.CutPrefix(h.Name, "blobs/sha256/"); isBlob && digest.FromBytes(b).Encoded() != hex {
			t.Errorf("%s has another content", h.Name)
		}
		files[h.Name] = b
	}
	var index ocispec.Index
	must(t, json.Unmarshal(files[ocispec.ImageIndexFile], &index))
	if len(index.Manifests) != 1 {
		t.Fatalf("the layout has %d things", len(index.Manifests))
	}
	return files, index.Manifests[0]
}

func wantBlobs(t *testing.T, files map[string][]byte, want ...v1.Hash) {
	t.Helper()
	for _, h := range want {
		if files["blobs/sha256/"+h.Hex] == nil {
			t.Errorf("blob %s is missing", h)
		}
	}
	if len(files) != len(want)+2 { // with what makes it a layout
		t.Errorf("%d files, want %d blobs and 2", len(files), len(want))
	}
}

// partsOf are an image's manifest, config and layers.
func partsOf(t *testing.T, img v1.Image) (all []v1.Hash) {
	t.Helper()
	m, err := img.Manifest()
	must(t, err)
	d, err := img.Digest()
	must(t, err)
	all = append(all, d, m.Config.Digest)
	for _, l := range m.Layers {
		all = append(all, l.Digest)
	}
	return all
}

func TestPullImage(t *testing.T) {
	l := newLocked(t)
	l.login(t, "")
	owner, img := l.owner(), randomImage(t)
	one := l.image(t, "one", owner)
	must(t, remote.Write(one.ref, img, one.options(t.Context())...))
	files, top := pulledImage(t, one)
	want := partsOf(t, img)
	wantBlobs(t, files, want...)
	if top.Digest.String() != want[0].String() || top.Annotations[ocispec.AnnotationRefName] != "latest" {
		t.Errorf("the layout is of %+v, want %s", top, want[0])
	}

	l.login(t, "right") // Docker's word is good where there is no other
	if _, top := pulledImage(t, l.image(t, "one@"+want[0].String(), Access{CAFile: l.ca})); top.Digest.String() != want[0].String() {
		t.Errorf("by digest, the layout is of %s, want %s", top.Digest, want[0])
	}
}

// An image for many platforms stays the same one, and comes with what this platform needs of it.
func TestPullImageOfManyPlatforms(t *testing.T) {
	l := newLocked(t)
	l.login(t, "")
	here := randomImage(t)
	at := func(arch string, img v1.Image) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}}
	}
	others := []mutate.IndexAddendum{at("s390x", randomImage(t)), at("riscv64", randomImage(t))}
	many, none := l.image(t, "x:many", l.owner()), l.image(t, "x:none", l.owner())
	index := mutate.AppendManifests(empty.Index, slices.Insert(slices.Clone(others), 1, at(runtime.GOARCH, here))...)
	must(t, remote.WriteIndex(many.ref, index, many.options(t.Context())...))
	must(t, remote.WriteIndex(none.ref, mutate.AppendManifests(empty.Index, others...), none.options(t.Context())...))

	files, top := pulledImage(t, many)
	whole, err := index.Digest()
	must(t, err)
	wantBlobs(t, files, append(partsOf(t, here), whole)...)
	if top.Digest.String() != whole.String() {
		t.Errorf("the layout is of %s, want %s", top.Digest, whole)
	}
	_, err = PullImage(t.Context(), none)
	wantRefusal(t, "an image for others", err, errs.ErrNotFound, "linux/"+runtime.GOARCH)
}

func TestPullImageRefused(t *testing.T) {
	l := newLocked(t)
	l.login(t, "")
	wrong := l.owner()
	wrong.Password = "wrong"
	for what, c := range map[string]struct {
		from  Access
		kind  error
		texts []string
	}{
		"a CA that is not known": {Access{Username: "user", Password: "right"}, errs.ErrForbidden, []string{"is not trusted", "--ca-file", "pull " + l.host}},
		"no password":            {Access{CAFile: l.ca}, errs.ErrForbidden, []string{"401", "no password for " + l.host}},
		"a wrong password":       {wrong, errs.ErrForbidden, []string{"401", "with the password of user"}},
		"nothing there":          {l.owner(), errs.ErrNotFound, nil},
	} {
		_, err := PullImage(t.Context(), l.image(t, "none", c.from))
		wantRefusal(t, what, err, c.kind, c.texts...)
	}
	for _, bad := range []string{"", "Not A Ref", path.Join(l.host, "x@sha256:1")} {
		_, err := ParseImage(bad, Access{})
		wantRefusal(t, bad, err, errs.ErrInvalid, "image reference")
	}
}
