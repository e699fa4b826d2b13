package oci

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

func TestReadQueue(t *testing.T) {
	const size = 4 * pagesAhead
	p := readQueue{size: size, limit: 1}
	var fd int32
	arrive := func(off uint64) (allowed []int32) {
		if p.urgent(off, pageUnit) {
			t.Fatalf("%d is urgent, with the farthest at %d", off, p.front)
		}
		p.push(fd, off+pageUnit)
		fd++
		return p.next()
	}
	off := uint64(0)
	for range pageReads - 1 { // as many as wait for one
		if allowed := arrive(off); len(allowed) > 0 {
			t.Fatalf("%v allowed while more are expected", allowed)
		}
		off += pageUnit
	}
	want := int32(0)
	for ; off < size-pageUnit; off += pageUnit {
		if allowed := arrive(off); !slices.Equal(allowed, []int32{want}) {
			t.Fatalf("at %d %v allowed, want %d", off, allowed, want)
		}
		want++
		for _, r := range []struct {
			off, count uint64
			urgent     bool
		}{{off, pageUnit, false}, {off, pageUnit - 4096, true}, {off + 2*pagesAhead, pageUnit, true}, {0, 4096, true}} {
			if got := p.urgent(r.off, r.count); got != r.urgent {
				t.Errorf("%+v: %v, with the farthest at %d", r, got, p.front)
			}
		}
	}
	if allowed := p.step(); !slices.Equal(allowed, []int32{want}) {
		t.Errorf("after a pause %v allowed, want %d", allowed, want)
	}
	if allowed := arrive(off); len(allowed) != pageReads-1 || len(p.waiting) != 0 {
		t.Errorf("after the last %d allowed, %d wait", len(allowed), len(p.waiting))
	}
	if allowed := p.step(); len(allowed) > 0 {
		t.Errorf("empty queue, but %v are allowed", allowed)
	}
}

// A large image is read piece by piece after the restore, and nothing of the pacing remains. The
// restored sandbox has all of its memory, whether pacing completes, is cancelled, or never starts.
func TestPacedRestore(t *testing.T) {
	defer func(was int64) { minPacedSize = was }(minPacedSize)
	minPacedSize = 2 * pagesAhead // smaller images make the test faster
	l := newTestHost(t)
	first := l.newSandbox(t).run(t)
	first.query(t, "hold 160")
	image := first.checkpoint(t, CheckpointOptions{LeaveRunning: true})
	if p := newReadPacer(filepath.Join(l.dir, "try"), image); p == nil {
		t.Skip("SKIPPED: no pre-access events for reads of pages in this kernel")
	} else {
		p.close()
	}
	for name, ends := range map[string]bool{"to the end": false, "ended": true} {
		t.Run(name, func(t *testing.T) {
			next := first.copyOf(t)
			var later sync.WaitGroup
			defer later.Wait()
			calls := 0
			next.restore(t, image, RestoreOptions{Background: true, Later: func(f func(context.Context)) {
				calls++
				ctx, cancel := context.WithCancel(t.Context())
				if ends {
					cancel()
				}
				later.Go(func() { defer cancel(); f(ctx) })
			}})
			next.expect(t, "held", "1 0")
			later.Wait()
			if calls > 1 {
				t.Errorf("%d calls of Later", calls)
			}
			if len(pacing) != 0 {
				t.Errorf("%d images are being paced", len(pacing))
			}
			if _, err := os.Lstat(filepath.Join(next.bundle, "image")); !os.IsNotExist(err) {
				t.Errorf("the directory of the image: %v", err)
			}
			noEvents(t)
		})
	}
	for name, do := range map[string]func(*testing.T, *testSandbox){
		"saved": func(t *testing.T, b *testSandbox) { // waits for all pages
			copied := b.checkpoint(t, CheckpointOptions{LeaveRunning: true})
			again := b.copyOf(t).restore(t, copied, RestoreOptions{})
			again.expect(t, "held", "1 0")
		},
		"paused": func(t *testing.T, b *testSandbox) {
			must(t, l.Pause(t.Context(), b.id))
			must(t, l.Resume(t.Context(), b.id))
			b.expect(t, "held", "1 0")
		},
		"removed": func(t *testing.T, b *testSandbox) {
			must(t, l.Remove(t.Context(), b.id, b.spec.CgroupsPath))
			b.wantRemoved(t)
		},
	} {
		t.Run(name+" meanwhile", func(t *testing.T) {
			next := first.copyOf(t)
			var later sync.WaitGroup
			defer later.Wait()
			next.restore(t, image, RestoreOptions{Background: true, Later: func(f func(context.Context)) {
				later.Go(func() { f(t.Context()) })
			}})
			do(t, next)
			later.Wait()
			noEvents(t)
		})
	}
	t.Run("few files", func(t *testing.T) {
		var most unix.Rlimit
		must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &most))
		if !hasSpareDescriptors() {
			t.Fatalf("no spare descriptors with a limit of %d", most.Cur)
		}
		few := most
		few.Cur = spareFiles
		must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &few))
		defer func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &most)) }()
		if hasSpareDescriptors() {
			t.Errorf("spare descriptors with a limit of %d", few.Cur)
		}
		next := first.copyOf(t)
		next.restore(t, image, RestoreOptions{Background: true, Later: func(func(context.Context)) {
			t.Error("Later called")
		}})
		next.expect(t, "held", "1 0")
	})
	t.Run("never continued", func(t *testing.T) {
		next := first.copyOf(t)
		next.restore(t, image, RestoreOptions{Background: true, Later: func(func(context.Context)) {}})
		next.expect(t, "held", "1 0")
		for range maxPaced { // its slot is free again
			pacing <- struct{}{}
		}
		for range maxPaced {
			<-pacing
		}
		noEvents(t)
	})
	t.Run("fails", func(t *testing.T) {
		broken := image + "-broken"
		must(t, os.CopyFS(broken, os.DirFS(image)))
		state := filepath.Join(broken, "checkpoint.img")
		b, err := os.ReadFile(state)
		must(t, err)
		invertMiddle(b)
		must(t, os.WriteFile(state, b, 0o600))
		next := first.copyOf(t)
		_, err = l.Restore(t.Context(), next.id, next.bundle, broken, next.console, RestoreOptions{Background: true, Later: func(func(context.Context)) {
			t.Error("Later called after a failure")
		}})
		if err == nil {
			t.Error("restored from a corrupt state")
		}
		if len(pacing) != 0 {
			t.Errorf("%d images are being paced", len(pacing))
		}
		noEvents(t)
	})
}

// noEvents fails if the process still has descriptors for file events.
func noEvents(t *testing.T) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, fd := range fds {
		to, err := os.Readlink("/proc/self/fd/" + fd.Name())
		if err == nil && (to == "/" || strings.Contains(to, "fanotify") || strings.Contains(to, pagesName)) { // the mount's root is the pages
			t.Errorf("descriptor %s, %s, remains", fd.Name(), to)
		}
	}
}
