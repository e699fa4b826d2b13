package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestFullDiskWhileImporting has the disk of a server fill while a checkpoint comes to it. Nothing of it may
// stay, running sandboxes continue, and with enough space the same import succeeds.
func TestFullDiskWhileImporting(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServerOnDisk(t, "4G")
	s.set("BARCHAN_STORE_AFTER", "0s")
	b := s.startWithOnlooker()
	s.apply(travelTemplate)
	empty := s.inContainerd()
	source := s.beginTale()
	s.exec(source, "head -c 200000000 /dev/urandom > /home/user/larger")
	before := s.tale(source)
	name := s.checkpointOf(source)
	file := filepath.Join(t.TempDir(), "tale.tar")
	s.data("checkpoint", "export", name, file)
	s.must("kill", source)
	s.dropCheckpoints(name)
	s.collect()
	s.untilInContainerd(empty)

	t.Run("too small from the beginning", func(t *testing.T) {
		s := s.in(t)
		giveBack := take(t, s.dir, 300<<20) // more than is kept for what runs, and less than both need
		defer giveBack()
		s.leavesNothing("a disk that is too small", func() (string, error) { return s.try("checkpoint", "import", file, "--name", "small") }, noRoom)
	})
	for _, kind := range []string{baseLayer, portable.FilesType} {
		t.Run("full in "+strings.ReplaceAll(kind, "/", " "), func(t *testing.T) {
			s := s.in(t)
			if kind == baseLayer {
				s.withoutBaseImage()
			}
			giveBack := func() {}
			defer func() { giveBack() }()
			s.leavesNothing("a disk that fills", func() (string, error) {
				return s.importHeldUp(file, kind, func() { giveBack = take(t, s.dir, 100<<20) })
			}, noRoom, "are kept for what runs")
			onlooker{s, b.id}.mustLive()
			giveBack()
			giveBack = func() {}
			s.untilTaken(file)
			s.must("kill", s.continuesFrom(before, "held"))
			s.dropCheckpoints("held")
			s.collect()
			s.untilInContainerd(empty)
		})
	}
	t.Run("wholly full", func(t *testing.T) {
		s := s.in(t)
		s.stop(syscall.SIGTERM)
		s.set("BARCHAN_RESERVE_DISK", "0")
		s.start()
		var giveBack func()
		objects := s.checkpoints()
		out, err := s.importHeldUp(file, portable.FilesType, func() { giveBack = s.takeWithReserve(40 << 20) })
		if exitCode(err) != 1 || !slices.ContainsFunc([]string{"the disk is full", "the server ended", "reach the server"}, func(r string) bool { return strings.Contains(out, r) }) {
			t.Errorf("import = %v\n%s", err, out)
		}
		t.Logf("output: %s", out)
		giveBack()
		s.untilNothingWrong() // it may still have to restart in place
		onlooker{s, b.id}.mustLive()
		eventually.NoError(t, "its object goes, or has failed", func() error {
			if now := s.checkpoints(); slices.Equal(now, objects) {
				return nil
			}
			if got, err := s.kubectl("", "get", "checkpoints.barchan.dev", "held", "-o", "jsonpath={.status.phase}"); err != nil || got != "Failed" {
				return fmt.Errorf("%s: %w", got, err) // it may just have gone
			}
			s.dropCheckpoints("held")
			return nil
		})
		s.untilTaken(file)
		s.must("kill", s.continuesFrom(before, "held"))
		s.dropCheckpoints("held")
	})
	s.wantNoCheckpoints()
	s.untilWell()
	s.untilInOrder()
}

// takeWithReserve is take after the server has given up what it has in reserve, which else would come
// free in the middle of what follows, and might be enough for it.
func (s *server) takeWithReserve(leave int64) (giveBack func()) {
	s.t.Helper()
	most := take(s.t, s.dir, 16<<20)
	eventually.NoError(s.t, "the server accepts work again", func() error {
		_, err := os.Stat(filepath.Join(s.value("BARCHAN_DATA_DIR"), "reserve"))
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("it is there (%v)", err) //nolint:errorlint // there may be none
	})
	return both(most, take(s.t, s.dir, leave))
}

// noRoom is the error of an import on a disk that is too small.
const noRoom = "no disk space for the import"

// importHeldUp imports an artifact as held from a pipe, in which nothing comes after the middle of a large
// blob until meanwhile has returned.
func (s *server) importHeldUp(file, kind string, meanwhile func()) (string, error) {
	s.t.Helper()
	p := s.importUpTo(file, "held", middleOf(s.t, file, kind))
	meanwhile()
	_, _ = io.Copy(p.in, p.rest) // the other side may have gone
	return p.end()
}

// leavesNothing is refuses, and checks containerd's content too.
func (s *server) leavesNothing(what string, give func() (string, error), reasons ...string) {
	s.t.Helper()
	before := s.inContainerd()
	s.refuses(what, give, reasons...)
	s.untilInContainerd(before)
	s.untilInOrder()
}

// inContainerd is what the server's containerd has of images and snapshots.
func (s *server) inContainerd() []string {
	s.t.Helper()
	found, err := filepath.Glob(filepath.Join(s.value("BARCHAN_DATA_DIR"), "containerd", "root", "io.containerd.snapshotter.v1.overlayfs", "snapshots", "*"))
	if err != nil {
		s.t.Fatal(err)
	}
	return slices.Concat(found, s.content(), s.images())
}

// collect makes containerd collect unreferenced content now, as after the removal of an image. On its own
// it rests 49 times as long as it took before: minutes, where the disk is slow.
func (s *server) collect() {
	s.t.Helper()
	const ref = "local.test/nothing:1"
	tag, err := name.NewTag(ref)
	if err != nil {
		s.t.Fatal(err)
	}
	var saved bytes.Buffer
	if err := tarball.Write(tag, helloImage(s.t, nil, ""), &saved); err != nil {
		s.t.Fatal(err)
	}
	if out, err := s.tryIn(saved.String(), "image", "import", "-"); err != nil {
		s.t.Fatalf("image import: %v\n%s", err, out)
	}
	s.must("image", "rm", ref)
}

// withoutBaseImage removes the base image as the server does not, for one of its sandboxes runs.
func (s *server) withoutBaseImage() {
	s.t.Helper()
	c, err := ctrd.NewClient(ctrd.Config{Address: filepath.Join(s.value("BARCHAN_DATA_DIR"), "containerd", "containerd.sock"), Namespace: s.value("BARCHAN_CONTAINERD_NAMESPACE"), CallTimeout: eventually.Patience})
	if err != nil {
		s.t.Fatal(err)
	}
	if err := errors.Join(c.RemoveImage(s.t.Context(), baseImage), c.Close()); err != nil {
		s.t.Fatal(err)
	}
}

func (s *server) untilInContainerd(want []string) {
	s.t.Helper()
	eventually.NoError(s.t, "containerd has nothing else", func() error {
		for _, now := range s.inContainerd() {
			if !slices.Contains(want, now) { // what goes later of what was before is no matter
				return errors.New(now)
			}
		}
		return nil
	})
}

// untilTaken imports an artifact as held, once the server has seen that there is room again.
func (s *server) untilTaken(file string) {
	s.t.Helper()
	s.untilNothingWrong()
	s.importAs("held", file)
}

// untilNothingWrong waits until the server takes requests, and nothing holds up new work.
func (s *server) untilNothingWrong() {
	s.t.Helper()
	eventually.NoError(s.t, "nothing is wrong any more", func() error {
		if status, text := s.readiness(); status != http.StatusOK || strings.Contains(text, "degraded") {
			return fmt.Errorf("%d %s", status, text)
		}
		return nil
	})
}
