package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// stateChecks are queries whose answers show that state survives a restore.
var stateChecks = []struct{ question, before, after string }{
	{"add", "1", "2"}, // memory, and a listening socket
	{"pid", "1", "1"},
	{"timer", "fired", "fired"},
	{"ticker", "ticks", "ticks"},
	{"threads", "16", "16"},
	{"epoll", "ping <nil>", "ping <nil>"},
	{"unix", "hihi", "hihi"}, // an old connection, and a new one
	{"pair", "hi", "hi"},     // a connection over the sandbox's own loopback
	{"udp", "hi <nil>", "hi <nil>"},
	{"deleted", "here <nil>", "here <nil>"},
	{"shm", "here <nil>", "here <nil>"},
	{"mapped", "1 <nil>", "2 <nil>"},
	{"open a", "a", "a,a"},
	{"fifo", "hi <nil>", "hi <nil>"},
	{"inotify n", "true <nil>", "true <nil>"},
	{"lock", "resource temporarily unavailable", "resource temporarily unavailable"},
	{"write /memory/f kept", "ok", "ok"},
	{"read /memory/f", "kept", "kept"},
	{"env NAME", "first", "first"}, // the processes keep their environment
	{"held", "0 0", "0 0"},
}

// checkpoint takes a checkpoint that must succeed, and returns its directory.
func (b *testSandbox) checkpoint(t testing.TB, o CheckpointOptions) (dir string) {
	t.Helper()
	dir = filepath.Join(b.dir, fmt.Sprintf("image-%s-%d", b.id, time.Now().UnixNano()))
	img, err := b.Checkpoint(t.Context(), b.id, dir, o)
	must(t, err)
	if img.Size() < 100<<10 || img.Build.SHA256 == "" {
		t.Errorf("image %+v", img)
	}
	return dir
}

func (b *testSandbox) wantStatus(t testing.TB, want Status) {
	t.Helper()
	got, err := b.State(context.WithoutCancel(t.Context()), b.id)
	must(t, err)
	if got != want {
		t.Errorf("%s is %s, want %s", b.id, got, want)
	}
}

// A container is restored with another ID, address, network namespace, cgroup, bundle, root path
// and hostname.
func TestRestoreWithNewIdentity(t *testing.T) {
	l := newTestHost(t)
	tests := map[string]struct {
		save    CheckpointOptions
		restore RestoreOptions
	}{
		"paused":     {},
		"running":    {save: CheckpointOptions{LeaveRunning: true}},
		"compressed": {save: CheckpointOptions{LeaveRunning: true, Compression: memimage.Flate}},
		"background": {save: CheckpointOptions{ExcludeCommittedZeroPages: true}, restore: RestoreOptions{Background: true}},
		"direct":     {save: CheckpointOptions{Direct: true}, restore: RestoreOptions{Background: true, Direct: true}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			first := l.newSandbox(t, func(s *Sandbox) { s.Env = []string{"NAME=first"} }).run(t)
			for _, s := range stateChecks {
				first.expect(t, s.question, s.before)
			}
			child, clock := first.query(t, "child"), first.query(t, "clock")
			first.query(t, "write /flushed to disk")
			image := first.checkpoint(t, tt.save)
			if tt.save.LeaveRunning {
				first.wantStatus(t, Running)
			} else {
				first.wantStatus(t, Paused)
			}
			next := first.copyOf(t)
			next.restore(t, image, tt.restore)
			for _, s := range stateChecks {
				next.expect(t, s.question, s.after)
			}
			next.expect(t, "read /flushed", "to disk")
			next.expect(t, "child", child)
			next.expect(t, "address", next.addr)
			next.expect(t, "hostname", next.id)
			if now := next.query(t, "clock"); now < clock {
				t.Errorf("the clock went back from %s to %s", clock, now)
			}
			if !tt.save.LeaveRunning {
				must(t, l.Resume(t.Context(), first.id))
			}
			first.expect(t, "add", "2") // paused or not, it is independent of the copy
		})
	}
}

// Both clocks advance while a sandbox is stored.
func TestClocksContinue(t *testing.T) {
	const stored = 2000 // milliseconds
	l := newTestHost(t)
	first := l.newSandbox(t).run(t)
	read := func(b *testSandbox) (wall, monotonic int64, before, after time.Time) {
		before = time.Now()
		_, err := fmt.Sscan(b.query(t, "clocks"), &wall, &monotonic)
		must(t, err)
		return wall, monotonic, before, time.Now()
	}
	wall, monotonic, early, late := read(first)
	image := first.checkpoint(t, CheckpointOptions{})
	<-time.After(time.Until(time.UnixMilli(wall + stored)))
	wallNow, monotonicNow, earlyNow, lateNow := read(first.copyOf(t).restore(t, image, RestoreOptions{}))
	passed, felt := wallNow-wall, monotonicNow-monotonic
	least, most := earlyNow.Sub(late).Milliseconds(), lateNow.Sub(early).Milliseconds()
	if passed < stored || min(passed, felt) < least-stored/2 || max(passed, felt) > most+stored/2 {
		t.Errorf("the wall clock advanced by %d ms, the monotonic one by %d, ours by %d to %d", passed, felt, least, most)
	}
}

// Connections to the outside after a restore.
func TestOpenConnections(t *testing.T) {
	l := newTestHost(t)
	first := l.newSandbox(t).run(t)
	used, idle := first.dial(t), first.dial(t)
	defer used.close()
	defer idle.close()
	ask := func(c *probeConn, want string) {
		t.Helper()
		if got, err := c.request("add"); err != nil || got != want {
			t.Errorf("got %q, %v, want %s", got, err, want)
		}
	}
	ask(used, "1")
	ask(idle, "2")
	image := first.checkpoint(t, CheckpointOptions{LeaveRunning: true})
	ask(used, "3") // it keeps running

	// At another address they are closed, and the processes see it.
	next := first.copyOf(t).restore(t, image, RestoreOptions{})
	next.awaitOnlyConn(t)

	// At the old address too; their peers get a reset when they next send.
	must(t, l.Remove(t.Context(), first.id, first.spec.CgroupsPath))
	first.readdress(t)
	first.restore(t, image, RestoreOptions{})
	for _, c := range []*probeConn{used, idle} {
		// The others are the same after the sandbox's kernel had time to close its end.
		if got, err := c.request("add"); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) && !errors.Is(err, io.EOF) {
			t.Errorf("a connection from before answers %q, %v, want its end", got, err)
		}
	}
	first.awaitOnlyConn(t)
}

// awaitOnlyConn waits until the caller's connection is the only one.
func (b *testSandbox) awaitOnlyConn(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	must(t, retry(ctx, func() (bool, error) { return b.query(t, "conns") == "1", nil }))
}

// Concurrent restores from one image, each with its own files.
func TestForks(t *testing.T) {
	const count = 4
	l := newTestHost(t)
	first := l.newSandbox(t).run(t)
	first.query(t, "hold 16")
	first.query(t, "add")
	identity := first.query(t, "identity")
	image := first.checkpoint(t, CheckpointOptions{})
	before, err := memimage.Digest(t.Context(), image)
	must(t, err)
	forks := make([]*testSandbox, count)
	for i := range forks {
		forks[i] = first.copyOf(t)
	}
	must(t, l.Resume(t.Context(), first.id))
	failures := make([]error, count)
	var wg sync.WaitGroup
	for i, f := range forks {
		wg.Go(func() {
			_, failures[i] = l.Restore(t.Context(), f.id, f.bundle, image, f.console, RestoreOptions{Background: true})
		})
	}
	wg.Wait()
	must(t, errors.Join(failures...))
	randoms := map[string]bool{first.query(t, "random"): true}
	for _, f := range forks {
		f.expect(t, "identity", identity)
		f.expect(t, "add", "2")
		f.expect(t, "held", "1 0")
		f.expect(t, "address", f.addr)
		f.query(t, "write /mine "+f.id)
		randoms[f.query(t, "random")] = true
	}
	for _, f := range forks {
		f.expect(t, "read /mine", f.id)
	}
	if len(randoms) != count+1 {
		t.Errorf("the kernel gave forks the same random numbers: %v", randoms)
	}
	if after, err := memimage.Digest(t.Context(), image); err != nil || after != before {
		t.Errorf("the image changed: %s, %s, %v", before, after, err)
	}
}

// Which differences of a spec make a restore fail.
func TestRestoreComparesSpecs(t *testing.T) {
	l := newTestHost(t)
	volume := t.TempDir()
	with := func(s *Sandbox) {
		s.Mounts = append(s.Mounts, Mount{Source: volume, Target: "/volume"})
		s.Annotations = map[string]string{"dev.gvisor.x": "1", "barchan.dev/x": "1"}
	}
	first := l.newSandbox(t, with).run(t)
	image := first.checkpoint(t, CheckpointOptions{})
	tests := map[string]struct {
		change func(*Sandbox)
		fits   bool
	}{
		"the same":               {func(*Sandbox) {}, true},
		"environment":            {func(s *Sandbox) { s.Env = []string{"NAME=other", "MORE=1"} }, true},
		"limits":                 {func(s *Sandbox) { s.Limits.MilliCPU, s.Limits.Pids = 500, 77 }, true},
		"our annotation":         {func(s *Sandbox) { s.Annotations["barchan.dev/x"] = "2" }, true},
		"another source":         {func(s *Sandbox) { s.Mounts[1].Source = t.TempDir() }, true},
		"memory limit":           {func(s *Sandbox) { s.Limits.Memory /= 2 }, false}, // of /dev/shm
		"volume's size":          {func(s *Sandbox) { s.Mounts[0].SizeLimit *= 2 }, false},
		"volume more":            {func(s *Sandbox) { s.Mounts = append(s.Mounts, Mount{Target: "/more"}) }, false},
		"volume less":            {func(s *Sandbox) { s.Mounts = s.Mounts[:1] }, false},
		"volume read-only":       {func(s *Sandbox) { s.Mounts[1].ReadOnly = true }, false},
		"gVisor's annotation":    {func(s *Sandbox) { s.Annotations["dev.gvisor.x"] = "2" }, false},
		"capabilities":           {func(s *Sandbox) { s.Security.Capabilities = []string{"CAP_KILL"} }, false},
		"read-only root":         {func(s *Sandbox) { s.Security.ReadOnlyRoot = true }, false},
		"no new privileges":      {func(s *Sandbox) { s.Security.NoNewPrivileges = true }, false},
		"network of the sandbox": {func(s *Sandbox) { s.NetnsPath = "" }, true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			b := first.copyOf(t, with, tt.change)
			_, err := l.Restore(t.Context(), b.id, b.bundle, image, b.console, RestoreOptions{})
			if tt.fits != (err == nil) {
				t.Errorf("fits: %t, got %v", tt.fits, err)
			}
			if !tt.fits {
				b.wantRemoved(t)
			}
		})
	}
}

// wantRemoved checks that nothing of a container remains.
func (b *testSandbox) wantRemoved(t testing.TB) {
	t.Helper()
	ids, err := b.List()
	must(t, err)
	pids, err := cgroups.Processes(b.spec.CgroupsPath)
	must(t, err)
	cgroups, err := cgroups.List(b.cgroup)
	must(t, err)
	if slices.Contains(ids, b.id) || len(pids) > 0 || slices.Contains(cgroups, b.id) {
		t.Errorf("%s remains: known %v, processes %v, cgroups %v", b.id, ids, pids, cgroups)
	}
}

// noImages checks that a directory has no image, complete or partial.
func noImages(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	if len(entries) > 0 {
		t.Errorf("%s has %v", dir, entries)
	}
}

// A failed checkpoint has no effect.
func TestFailedCheckpointLeavesRunning(t *testing.T) {
	l := newTestHost(t)
	b := l.newSandbox(t).run(t)
	b.query(t, "hold 256")
	full := filepath.Join(l.dir, "full")
	must(t, os.Mkdir(full, 0o700))
	must(t, unix.Mount("tmpfs", full, "tmpfs", 0, "size=4m"))
	t.Cleanup(func() { must(t, unix.Unmount(full, unix.MNT_DETACH)) })
	for _, leave := range []bool{true, false} {
		images := filepath.Join(l.dir, fmt.Sprintf("images-%t", leave))
		must(t, os.Mkdir(images, 0o700))
		for name, try := range map[string]func() error{
			"disk full": func() error {
				_, err := l.Checkpoint(t.Context(), b.id, filepath.Join(full, "i"), CheckpointOptions{LeaveRunning: leave})
				return err
			},
			"cancelled": func() error {
				return l.cancelCheckpoint(t, b, filepath.Join(images, "i"), CheckpointOptions{LeaveRunning: leave})
			},
		} {
			if err := try(); err == nil {
				t.Errorf("%s: no error", name)
			} else {
				t.Logf("%s: %.200s", name, err)
			}
			b.wantStatus(t, Running)
			b.expect(t, "held", "1 0")
		}
		noImages(t, full)
		noImages(t, images)
		image := filepath.Join(images, "i")
		_, err := l.Checkpoint(t.Context(), b.id, image, CheckpointOptions{LeaveRunning: leave})
		must(t, err)
		if _, err := l.Checkpoint(t.Context(), b.id, image, CheckpointOptions{}); !errors.Is(err, errs.ErrConflict) {
			t.Errorf("checkpoint to the same directory: %v", err)
		}
		if !leave {
			must(t, l.Resume(t.Context(), b.id))
		}
		must(t, memimage.Remove(image))
		must(t, memimage.Remove(image))
		noImages(t, images)
	}
	b.expect(t, "unsavable", "hi <nil>")
	_, err := l.Checkpoint(t.Context(), b.id, filepath.Join(l.dir, "none"), CheckpointOptions{})
	t.Logf("what gVisor cannot write: %v", err)
	if err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("an error that is not one line: %v", err)
	}
	b.wantStatus(t, Running)
	b.expect(t, "held", "1 0")
	if _, err := l.Checkpoint(t.Context(), "none", filepath.Join(l.dir, "none"), CheckpointOptions{}); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("an unknown container: %v", err)
	}
}

// cancelCheckpoint cancels a checkpoint, runsc with it, while it writes pages. If it completed
// before, it is repeated.
func (l *testHost) cancelCheckpoint(t *testing.T, b *testSandbox, dir string, o CheckpointOptions) (err error) {
	t.Helper()
	eventually.True(t, "a checkpoint is cancelled before its end", func() bool {
		if err = l.cancelCheckpointOnce(t, b, dir, o); err != nil {
			return true
		}
		must(t, memimage.Remove(dir))
		if !o.LeaveRunning {
			must(t, l.Resume(t.Context(), b.id))
		}
		return false
	})
	return err
}

func (l *testHost) cancelCheckpointOnce(t *testing.T, b *testSandbox, dir string, o CheckpointOptions) error {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		_ = retry(ctx, func() (bool, error) {
			info, err := os.Stat(filepath.Join(dir+".part", "pages.img"))
			return err == nil && info.Size() > 0, nil
		})
		cancel()
	})
	_, err := l.Checkpoint(ctx, b.id, dir, o)
	return err
}

// A failed restore leaves only the image, from which the next one succeeds.
func TestFailedRestoreLeavesNothing(t *testing.T) {
	l := newTestHost(t)
	first := l.newSandbox(t).run(t)
	first.query(t, "hold 64")
	image := first.checkpoint(t, CheckpointOptions{})
	digest, err := memimage.Digest(t.Context(), image)
	must(t, err)
	next := first.copyOf(t)
	restore := func(ctx context.Context, image string) error {
		_, err := l.Restore(ctx, next.id, next.bundle, image, next.console, RestoreOptions{})
		return err
	}
	for _, name := range []string{"checkpoint.img", "pages.img", "pages_meta.img", "image.json"} {
		broken := image + "-" + name
		must(t, os.CopyFS(broken, os.DirFS(image)))
		must(t, os.Truncate(filepath.Join(broken, name), 50))
		if err := restore(t.Context(), broken); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s cut short: %v", name, err)
		}
		must(t, os.Remove(filepath.Join(broken, name)))
		if err := restore(t.Context(), broken); !errors.Is(err, errs.ErrInvalid) && !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("%s missing: %v", name, err)
		}
	}
	corrupt := image + "-corrupt"
	must(t, os.CopyFS(corrupt, os.DirFS(image)))
	state := filepath.Join(corrupt, "checkpoint.img")
	b, err := os.ReadFile(state)
	must(t, err)
	invertMiddle(b)
	must(t, os.WriteFile(state, b, 0o600))
	if d, err := memimage.Digest(t.Context(), corrupt); err != nil || d == digest {
		t.Errorf("the digest does not detect the corruption: %v", err)
	}
	if err := restore(t.Context(), corrupt); err == nil {
		t.Error("restored from a corrupt state")
	}
	next.wantRemoved(t)
	l.cancelRestore(t, next, restore, image)
	next.wantRemoved(t)
	if err := func() error {
		_, err := l.Restore(t.Context(), first.id, first.bundle, image, first.console, RestoreOptions{})
		return err
	}(); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("over a running container: %v", err)
	}
	first.wantStatus(t, Paused)
	if d, err := memimage.Digest(t.Context(), image); err != nil || d != digest {
		t.Errorf("the image has digest %s, %v, want %s", d, err, digest)
	}
	next.readdress(t)
	must(t, restore(t.Context(), image))
	next.expect(t, "held", "1 0")
}

// cancelRestore cancels a restore, runsc with it, as soon as it has created something. If it
// completed before, it is repeated.
func (l *testHost) cancelRestore(t *testing.T, b *testSandbox, restore func(context.Context, string) error, image string) {
	t.Helper()
	eventually.True(t, "a restore is cancelled before its end", func() bool {
		if err := l.cancelRestoreOnce(t, b, restore, image); err != nil {
			return true
		}
		must(t, l.Remove(t.Context(), b.id, b.spec.CgroupsPath))
		b.readdress(t)
		return false
	})
}

func (l *testHost) cancelRestoreOnce(t *testing.T, b *testSandbox, restore func(context.Context, string) error, image string) error {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = retry(ctx, func() (bool, error) {
			pids, err := cgroups.Processes(b.spec.CgroupsPath)
			return len(pids) > 1, err
		})
		cancel()
	})
	err := restore(ctx, image)
	cancel()
	wg.Wait()
	return err
}

func TestRuncRefusesCheckpoint(t *testing.T) {
	r, err := New(Config{Class: Runc, Binary: "true", Root: filepath.Join(t.TempDir(), "r")})
	must(t, err)
	dir := filepath.Join(t.TempDir(), "image")
	if _, err := r.Checkpoint(t.Context(), "a", dir, CheckpointOptions{}); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "cannot be kept") {
		t.Errorf("checkpoint: %v", err)
	}
	if _, err := r.Restore(t.Context(), "a", t.TempDir(), dir, nil, RestoreOptions{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("restore: %v", err)
	}
	noImages(t, filepath.Dir(dir))
}

func TestCheckpointRefuses(t *testing.T) {
	r, err := New(Config{Class: GVisor, Binary: "true", Root: filepath.Join(t.TempDir(), "r")})
	must(t, err)
	for name, o := range map[string]CheckpointOptions{
		"unknown compression":    {Compression: "zip"},
		"direct and compression": {Compression: memimage.Flate, Direct: true},
	} {
		if _, err := r.Checkpoint(t.Context(), "a", filepath.Join(t.TempDir(), "i"), o); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBuildFollowsBinary(t *testing.T) {
	program := filepath.Join(t.TempDir(), "runsc")
	write := func(version string) {
		script := "#!/bin/sh\ncase $1 in --version) echo " + version + ";; cpu-features) echo fpu,sse;; esac\n"
		must(t, os.WriteFile(program+".new", []byte(script), 0o755))
		must(t, os.Rename(program+".new", program))
	}
	write("one")
	r, err := New(Config{Class: GVisor, Binary: program, Root: "/none"})
	must(t, err)
	one, err := r.Build(t.Context())
	must(t, err)
	write("twice")
	two, err := r.Build(t.Context())
	must(t, err)
	if one.Version != "one" || two.Version != "twice" || one.SHA256 == two.SHA256 || !slices.Equal(one.CPUFeatures, []string{"fpu", "sse"}) {
		t.Errorf("builds %+v and %+v", one, two)
	}
	if err := two.Restores(one); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("another binary: %v", err)
	}
	more := two
	more.CPUFeatures = append(slices.Clone(two.CPUFeatures), "avx")
	if err := more.Restores(two); err != nil {
		t.Errorf("a better processor: %v", err)
	}
	if err := two.Restores(more); !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), "avx") {
		t.Errorf("a lesser processor: %v", err)
	}
}

// invertMiddle corrupts a file's content, also where it has zeros.
func invertMiddle(b []byte) {
	for i := len(b) / 2; i < min(len(b)/2+4096, len(b)); i++ {
		b[i] ^= 0xff
	}
}
