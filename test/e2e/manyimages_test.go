package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const (
	// manyImages are of one layer that all share, and one of manyBytes.
	manyImages = 2000
	manyBytes  = 32 << 10
	// halfStore is room for about half of them: each takes its layer packed and unpacked, and some KiB more.
	halfStore = manyImages / 2 * (2*manyBytes + 12<<10)
	// exactUse is how exact the last use of an image is after a restart.
	exactUse = 10 * time.Minute
)

// manyServer is a server with thousands of images.
type manyServer struct {
	*server
	registry string
	base     v1.Image
	admin    *adminclient.Client
}

// TestThousandsOfImages has a server list, start with, evict and prune thousands of small images.
func TestThousandsOfImages(t *testing.T) {
	skipInFast(t)
	s := &manyServer{server: newServer(t), registry: startRegistry(t)}
	s.base = helloImage(t, helloProgram(t), "many")
	data := s.value("BARCHAN_DATA_DIR")
	s.admin = adminclient.New(filepath.Join(data, "run", "admin.sock"), data)
	s.took("start without images", s.start)
	s.took(fmt.Sprintf("pull %d images", manyImages), func() { s.pullAll(0, manyImages) })

	// Of the three oldest a template names one, a sandbox runs one, and one is used once more, below.
	s.apply(imageTemplate("named", s.ref(0), "") + "---\n" + imageTemplate("runs", s.ref(1), "") + "---\n" + imageTemplate("used", s.ref(2), ""))
	key := s.localKey()
	s.create(key, "runs")
	s.mustKubectl("", "delete", "sandboxtemplate", "runs")

	before := s.images(manyImages)
	s.stop(syscall.SIGTERM)
	s.set("BARCHAN_IMAGE_STORE", fmt.Sprint(halfStore))
	s.took("start with them", s.start)
	for ref, x := range s.images(manyImages) {
		if was := before[ref]; was.Digest != x.Digest || was.Size != x.Size || !x.Pulled || was.LastUsed.Sub(x.LastUsed).Abs() > exactUse {
			t.Errorf("%+v is after a restart %+v", was, x)
		}
	}
	s.must("rm", s.create(key, "used"))
	s.mustKubectl("", "delete", "sandboxtemplate", "used")
	before = s.images(manyImages)
	s.took("pull one more, and evict", func() {
		s.pullAll(manyImages, manyImages+1)
		eventually.True(t, "the pull has images removed, and the removal ends", func() bool { return s.evicted() })
	})
	s.checkEvicted(before)
	s.took("prune", func() { s.must("image", "prune") })
	if left := s.images(2); left[s.ref(0)].Ref == "" || left[s.ref(1)].Ref == "" {
		t.Errorf("prune left %v", left)
	}
}

func (s *manyServer) ref(i int) string { return fmt.Sprintf("%s/many/%d:1", s.registry, i) }

// took logs how long something took, and the memory of the server.
func (s *manyServer) took(what string, do func()) {
	s.t.Helper()
	began := time.Now()
	do()
	took := time.Since(began)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if err != nil {
		s.t.Error(err)
	}
	s.t.Logf("%s: %s; the server has %s", what, took.Round(time.Millisecond), regexp.MustCompile(`VmRSS:\s*(.*)`).FindSubmatch(status)[1])
}

// images lists all images by name.
func (s *manyServer) images(want int) map[string]adminclient.Image {
	s.t.Helper()
	all := map[string]adminclient.Image{}
	s.took("list", func() {
		list, err := s.admin.Images(s.t.Context())
		if err != nil {
			s.t.Fatal(err)
		}
		for _, x := range list {
			all[x.Ref] = x
		}
	})
	if len(all) != want {
		s.t.Fatalf("%d images are listed, want %d", len(all), want)
	}
	return all
}

// pullAll makes images and has the server pull them, a few at once and about in their order.
func (s *manyServer) pullAll(from, to int) {
	s.t.Helper()
	const atOnce = 4
	next := make(chan int)
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for i := range next {
				if err := s.pull(s.t.Context(), i); err != nil {
					s.t.Errorf("image %d: %v", i, err)
				}
			}
		})
	}
	for i := from; i < to && !s.t.Failed(); i++ {
		next <- i
	}
	close(next)
	workers.Wait()
	if s.t.Failed() {
		s.t.FailNow()
	}
}

func (s *manyServer) pull(ctx context.Context, i int) error {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	if err := w.WriteHeader(&tar.Header{Name: "own", Typeflag: tar.TypeReg, Mode: 0o644, Size: manyBytes}); err != nil {
		return err
	}
	if _, err := io.CopyN(w, rand.Reader, manyBytes); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(s.base, l)
	if err != nil {
		return err
	}
	tag, err := name.ParseReference(s.ref(i), name.Insecure)
	if err != nil {
		return err
	}
	if err := remote.Write(tag, img, remote.WithContext(ctx)); err != nil {
		return err
	}
	_, err = s.admin.Pull(ctx, adminclient.PullRequest{Ref: s.ref(i)}, func(adminclient.Event) {})
	return err
}

// evicted reports whether images were removed, and no more are.
func (s *manyServer) evicted() bool {
	s.t.Helper()
	count := func() int {
		list, err := s.admin.Images(s.t.Context())
		if err != nil {
			s.t.Fatal(err)
		}
		return len(list)
	}
	n := count()
	if n > manyImages {
		return false
	}
	eventually.True(s.t, "as many images are there as a moment ago", func() bool {
		before := n
		n = count()
		return n == before
	})
	return true
}

// checkEvicted requires that those went which were not used for the longest, but none that is needed.
func (s *manyServer) checkEvicted(before map[string]adminclient.Image) {
	s.t.Helper()
	list, err := s.admin.Images(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	left := map[string]bool{}
	for _, x := range list {
		left[x.Ref] = true
	}
	var oldestLeft, newestGone time.Time
	for ref, x := range before {
		switch {
		case !left[ref] && x.LastUsed.After(newestGone):
			newestGone = x.LastUsed
		case left[ref] && ref != s.ref(0) && ref != s.ref(1) && (oldestLeft.IsZero() || x.LastUsed.Before(oldestLeft)):
			oldestLeft = x.LastUsed
		}
	}
	s.t.Logf("%d images are left", len(left))
	if len(left) < manyImages/4 || len(left) > manyImages*3/4 {
		s.t.Errorf("%d images are left of %d, want about half", len(left), manyImages)
	}
	if newestGone.After(oldestLeft) {
		s.t.Errorf("an image that was used at %s is gone, and one that was at %s is not", newestGone, oldestLeft)
	}
	for what, i := range map[string]int{"a template names": 0, "a sandbox runs": 1, "was used": 2, "was pulled last": manyImages} {
		if !left[s.ref(i)] {
			s.t.Errorf("the image that %s is gone", what)
		}
	}
	if slices.IndexFunc(list, func(x adminclient.Image) bool { return x.Ref == s.ref(3) }) >= 0 {
		s.t.Error("the oldest image that nothing uses is left")
	}
}
