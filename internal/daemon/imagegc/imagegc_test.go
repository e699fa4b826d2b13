package imagegc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/images"
)

// fakeStore is a store of images, and all that uses them. test/e2e has the real ones.
type fakeStore struct {
	client.Reader
	images    []images.Info
	parts     map[string]ctrd.Parts
	made      []string // digests
	templates []string // names of images
	fails     error
	touched   string // used between the decision and its removal
	untagged  int    // since the last Collect
}

func (s *fakeStore) List(context.Context) ([]images.Info, error) { return slices.Clone(s.images), nil }

func (s *fakeStore) Untag(_ context.Context, ref string, _ time.Time) (bool, error) {
	if ref == s.touched {
		return false, nil
	}
	s.images = slices.DeleteFunc(s.images, func(x images.Info) bool { return x.Ref == ref })
	s.untagged++
	return true, nil
}

func (s *fakeStore) Collect(context.Context) error {
	s.untagged = 0
	return nil
}

func (s *fakeStore) ImageUsers(_ context.Context, digest string) ([]sandbox.Ref, []sandbox.CheckpointRef, error) {
	if slices.Contains(s.made, digest) {
		return []sandbox.Ref{{UID: "made"}}, nil, nil
	}
	return nil, nil, nil
}

func (s *fakeStore) PartsOf(_ context.Context, _, digest string) (ctrd.Parts, error) {
	return s.parts[digest], nil
}

// reader lists the templates.
type reader struct {
	client.Reader
	*fakeStore
}

func (r reader) List(_ context.Context, list client.ObjectList, _ ...client.ListOption) error {
	if all, ok := list.(*extensions.SandboxTemplateList); ok {
		for _, image := range r.templates {
			t := extensions.SandboxTemplate{}
			t.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Image: image}}
			all.Items = append(all.Items, t)
		}
	}
	return r.fails
}

// newFakeStore has images a to e, the longest unused first, each of 10 bytes and 10 that all share.
func newFakeStore() *fakeStore {
	s := &fakeStore{parts: map[string]ctrd.Parts{}}
	for i, name := range strings.Split("a b c d e", " ") {
		x := images.Info{Pulled: true, LastUsed: time.Unix(int64(i), 0)}
		x.Ref, x.Digest = "x.test/"+name+":1", "sha256:"+name
		s.images, s.parts[x.Digest] = append(s.images, x), ctrd.Parts{name: 10, "shared": 10}
	}
	return s
}

func (s *fakeStore) left() (names string) {
	for _, x := range s.images {
		names += strings.TrimSuffix(strings.TrimPrefix(x.Ref, "x.test/"), ":1")
	}
	return names
}

func TestEviction(t *testing.T) {
	broken := fmt.Errorf("away: %w", errs.ErrUnavailable)
	for name, tt := range map[string]struct {
		limit, room int64
		change      func(*fakeStore)
		want        error
		left        string
	}{
		"within":                {limit: 100, room: 40, left: "abcde"},
		"no limit":              {limit: 0, room: 1 << 40, left: "abcde"},
		"beyond":                {limit: 100, room: 41, left: "cde"},
		"more":                  {limit: 100, room: 55, left: "de"},
		"of a sandbox":          {limit: 100, room: 41, change: func(s *fakeStore) { s.made = []string{"sha256:a"} }, left: "ade"},
		"of a template":         {limit: 100, room: 41, change: func(s *fakeStore) { s.templates = []string{"x.test/a:1", "x.test/b:1"} }, left: "abe"},
		"imported":              {limit: 100, room: 41, change: func(s *fakeStore) { s.images[0].Pulled = false }, left: "ade"},
		"being pulled":          {limit: 100, room: 41, change: func(s *fakeStore) { s.images[0].Pulling = true }, left: "ade"},
		"used meanwhile":        {limit: 100, room: 41, change: func(s *fakeStore) { s.touched = "x.test/a:1" }, left: "ade"},
		"a sandbox's two names": {limit: 100, room: 51, change: func(s *fakeStore) { s.made, s.images[1].Digest = []string{"sha256:a"}, "sha256:a" }, left: "be"},
		"all in use":            {limit: 60, room: 10, change: func(s *fakeStore) { s.made = []string{"sha256:a", "sha256:b", "sha256:c", "sha256:d", "sha256:e"} }, want: errs.ErrExhausted, left: "abcde"},
		"too large":             {limit: 60, room: 61, want: errs.ErrExhausted},
		"API server away":       {limit: 60, room: 10, change: func(s *fakeStore) { s.fails = broken }, want: errs.ErrUnavailable, left: "abcde"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFakeStore()
			if tt.change != nil {
				tt.change(s)
			}
			c := New(Config{Store: s, Node: s, Sizes: s, Objects: reader{fakeStore: s}, Limit: tt.limit, Log: slog.New(slog.DiscardHandler)})
			if err := c.Room(t.Context(), tt.room); !errors.Is(err, tt.want) || (err != nil && tt.want == nil) {
				t.Errorf("room for %d: %v, want %v", tt.room, err, tt.want)
			}
			if got := s.left(); got != tt.left || s.untagged != 0 {
				t.Errorf("images %s are left, want %s; the content of %d removed ones is", got, tt.left, s.untagged)
			}
		})
	}
}

func TestPrune(t *testing.T) {
	for name, tt := range map[string]struct {
		all  bool
		left string
	}{"pulled": {false, "bc"}, "all": {true, "b"}} {
		t.Run(name, func(t *testing.T) {
			s := newFakeStore()
			s.made, s.images[2].Pulled = []string{"sha256:b"}, false
			c := New(Config{Store: s, Node: s, Sizes: s, Objects: reader{fakeStore: s}, Limit: 1 << 40, Log: slog.New(slog.DiscardHandler)})
			gone, err := c.Prune(t.Context(), tt.all)
			if err != nil || len(gone) != 5-len(tt.left) || s.left() != tt.left {
				t.Errorf("removed %v, %v; %s are left, want %s", gone, err, s.left(), tt.left)
			}
		})
	}
}
