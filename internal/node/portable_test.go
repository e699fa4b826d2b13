package node

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// artifact is one of a sandbox's files with their image, neither of which is on the node any more, and where
// the files begin in it.
func artifact(t *testing.T, n *Node) (whole []byte, files int) {
	t.Helper()
	s := object(class("runc"))
	ensure(t, n, s)
	if out, code := run(t, n, s, "head -c 300000 /dev/zero > /home/user/kept && echo x >> /home/user/kept"); code != 0 {
		t.Fatalf("%d %s", code, out)
	}
	ask := checkpointOf(s)
	capture1(t, n, ask)
	var exported int64
	l, release, err := n.ExportCheckpoint(t.Context(), ask.Checkpoint, portable.Config{Name: "c", Source: portable.Source{SandboxName: s.Name}}, true,
		func(done, _ int64) { exported = done })
	must(t, err)
	if exported != l.Layers[0].Size {
		t.Errorf("%d bytes are reported, its files have %d", exported, l.Layers[0].Size)
	}
	var b bytes.Buffer
	must(t, l.Write(t.Context(), &b))
	release()
	must(t, n.Remove(t.Context(), refOf(s)))
	must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
	must(t, n.cfg.Containerd.RemoveImage(t.Context(), testImage))
	return b.Bytes(), bytes.Index(b.Bytes(), []byte("blobs/sha256/"+l.Layers[0].Digest.Encoded())) + 512
}

func damagedAt(whole []byte, at int) []byte {
	b := bytes.Clone(whole)
	b[at] ^= 1
	return b
}

// importIt gives a node an artifact under a new name.
func importIt(t *testing.T, n *Node, in io.Reader) (sandbox.CheckpointRef, error) {
	t.Helper()
	uid := uuid.NewString()
	ref := sandbox.CheckpointRef{Namespace: "default", Name: "i-" + uid[:8], UID: types.UID(uid)}
	r, err := portable.Read(in)
	if err == nil {
		_, err = n.ImportCheckpoint(t.Context(), ref, r)
	}
	return ref, err
}

func hasImage(t *testing.T, n *Node) bool {
	t.Helper()
	_, err := n.cfg.Containerd.Resolve(t.Context(), testImage)
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		t.Fatal(err)
	}
	return err == nil
}

// gated stops at a place until it is opened.
type gated struct {
	io.Reader
	releaseResources io.Reader
	reached          chan<- struct{}
	open             <-chan struct{}
}

func (g *gated) Read(b []byte) (int, error) {
	n, err := g.Reader.Read(b)
	if errors.Is(err, io.EOF) && g.releaseResources != nil {
		close(g.reached)
		<-g.open
		g.Reader, g.releaseResources = g.releaseResources, nil
		return g.Reader.Read(b)
	}
	return n, err
}

// The image that an import brings goes with it when it fails, unless another one has come to lie on it; and
// when the import is ready, it stays without it.
func TestBaseOfAnImport(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	whole, files := artifact(t, n)
	bad := damagedAt(whole, files+1000)
	if _, err := importIt(t, n, bytes.NewReader(bad)); !errors.Is(err, errs.ErrInvalid) {
		t.Fatalf("import of what is damaged: %v", err)
	}
	if hasImage(t, n) {
		t.Error("the image of an import that failed is there")
	}
	noCheckpoint(t, n)

	reached, open, first := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	goOn := sync.OnceFunc(func() { close(open) })
	defer goOn()
	go func() {
		_, err := importIt(t, n, &gated{Reader: bytes.NewReader(bad[:files]), releaseResources: bytes.NewReader(bad[files:]), reached: reached, open: open})
		first <- err
	}()
	select {
	case <-reached:
	case err := <-first:
		t.Fatalf("the import ended before its files: %v", err)
	}
	second, err := importIt(t, n, bytes.NewReader(whole))
	must(t, err)
	goOn()
	if err := <-first; !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("import of what is damaged: %v", err)
	}
	if !hasImage(t, n) {
		t.Error("an import that failed has taken the image that another one lies on")
	}
	again, err := importIt(t, n, bytes.NewReader(whole))
	must(t, err)
	must(t, n.DropCheckpoint(t.Context(), second))
	must(t, n.DropCheckpoint(t.Context(), again))
	if !hasImage(t, n) {
		t.Error("the image went with a checkpoint that was ready")
	}
	noCheckpoint(t, n)
	clean(t, n)
}

// An import for which there is no room is refused, from the beginning or while it comes.
func TestRoomForAnImport(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var room atomic.Int64 // bytes; or, if negative, the remaining calls
	room.Store(1 << 40)
	n, _ := m.node(func(c *Config) {
		c.CheckSpace = func(_ string, bytes int64) error {
			if left := room.Load(); (left >= 0 && bytes > left) || (left < 0 && room.Add(1) == 0) {
				return fmt.Errorf("the disk is small: %w", errs.ErrExhausted)
			}
			return nil
		}
	})
	whole, _ := artifact(t, n)
	for what, left := range map[string]int64{"too large": 1000, "full in the image": -2, "full in the files": -3} {
		room.Store(left)
		if _, err := importIt(t, n, bytes.NewReader(whole)); !errors.Is(err, errs.ErrExhausted) || errs.Text(err) != "no disk space for the import: the disk is small" {
			t.Errorf("%s: %v", what, err)
		}
		if hasImage(t, n) {
			t.Errorf("%s: the image is there", what)
		}
		noCheckpoint(t, n)
	}
	room.Store(1 << 40)
	made, err := importIt(t, n, bytes.NewReader(whole))
	must(t, err)
	must(t, n.DropCheckpoint(t.Context(), made))
	clean(t, n)
}

// Issue 11: nothing reported what needs an image.
func TestImageUsers(t *testing.T) {
	t.Parallel()
	n, _ := newMachine(t).node()
	s := object()
	image := ensure(t, n, s).Image
	ask := checkpointOf(s)
	capture1(t, n, ask)
	want := func(sandboxes []sandbox.Ref, checkpoints []sandbox.CheckpointRef) {
		t.Helper()
		ss, cc, err := n.ImageUsers(t.Context(), image)
		if err != nil || !slices.Equal(ss, sandboxes) || !slices.Equal(cc, checkpoints) {
			t.Errorf("users of %s: %v and %v, %v; want %v and %v", image, ss, cc, err, sandboxes, checkpoints)
		}
	}
	want([]sandbox.Ref{refOf(s)}, []sandbox.CheckpointRef{ask.Checkpoint})
	must(t, n.Remove(t.Context(), refOf(s)))
	want(nil, []sandbox.CheckpointRef{ask.Checkpoint})
	must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
	want(nil, nil)
}
