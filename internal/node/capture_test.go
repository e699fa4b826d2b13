package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/inventory"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/programs"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// checkpointOf is a request for a checkpoint of a sandbox.
func checkpointOf(s *agents.Sandbox) sandbox.Capture {
	uid := uuid.NewString()
	return sandbox.Capture{
		Checkpoint: sandbox.CheckpointRef{Namespace: s.Namespace, Name: "c-" + uid[:8], UID: types.UID(uid)}, Source: refOf(s),
	}
}

func filesOnly(c sandbox.Capture) sandbox.Capture {
	c.FilesOnly = true
	return c
}

func capture1(t testing.TB, n *Node, ask sandbox.Capture) sandbox.Captured {
	t.Helper()
	got, err := n.Capture(t.Context(), ask)
	if err != nil {
		t.Fatalf("capture: %v", err)
	}
	return got
}

// forkOf is a sandbox that is made as another, from a checkpoint of it.
func forkOf(s *agents.Sandbox, ask sandbox.Capture, change ...func(*agents.Sandbox)) *agents.Sandbox {
	f := object(change...)
	spec := s.Spec.DeepCopy()
	if f.Spec.Barchan == nil {
		f.Spec.Barchan = &agents.BarchanSpec{}
	}
	spec.Barchan = f.Spec.Barchan
	f.Spec = *spec
	f.Spec.Barchan.Restore = &agents.RestoreSource{CheckpointName: ask.Checkpoint.Name, FilesOnly: ask.FilesOnly}
	return f
}

// as the state of a program at the last query, in another sandbox.
func (p *program) as(s *agents.Sandbox) *program {
	other := *p
	other.s = s
	return &other
}

// noCheckpoint fails if there is anything of a checkpoint.
func noCheckpoint(t testing.TB, n *Node) {
	t.Helper()
	orphans, incomplete, err := n.checkpoints.Orphans(t.Context())
	if err != nil || len(orphans)+len(incomplete) > 0 {
		t.Errorf("checkpoints: %v, %v, %v", orphans, incomplete, err)
	}
	if names, err := inventory.Entries(n.checkpoints.Root()); err != nil || len(names) > 0 {
		t.Errorf("directories of checkpoints: %v, %v", names, err)
	}
	if all, err := n.cfg.Containerd.Committed(t.Context()); err != nil || len(all) > 0 {
		t.Errorf("snapshots of checkpoints: %+v, %v", all, err)
	}
	for _, k := range n.checkpoints.All() {
		if c := k.Row(); c != nil {
			t.Errorf("row of a checkpoint: %+v", c)
		}
	}
}

func counts(s *agents.Sandbox) {
	s.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{{EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: "data"}}}
	pod(s).Volumes = []corev1.Volume{
		{Name: "disk", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "mem", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}},
	}
	container(s).VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data", SubPath: "a"}, {Name: "disk", MountPath: "/disk"}, {Name: "mem", MountPath: "/mem"}}
	container(s).Command = []string{"/bin/sh", "-c", "echo hello; exit 3"}
	container(s).Env = []corev1.EnvVar{{Name: "PATH", Value: "/bin"}, {Name: "NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}
}

// A sandbox is captured in any state and continues, and others are made of it.
func TestCaptureAndFork(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(atOnce)
	s := object(counts)
	ensure(t, n, s)
	p := startProgram(t, n, s)
	run(t, n, s, "for v in data disk mem; do echo in $v > /$v/f; done; echo kept > /root/kept")
	eventually.True(t, "its program has ended", func() bool { return n.handles.Lookup(s.UID).Observed().EntrypointExit != nil })
	for _, state := range []string{"live", "suspended"} {
		if state == "suspended" {
			suspendMemory(t, n, s)
			awaitStored(t, n, s)
		}
		ask := checkpointOf(s)
		t.Logf("%s: stood still for %v", state, isWhole(t, n, ask).Paused)
		if state == "suspended" {
			resume(t, n, s)
		}
		at := *p
		p.continues(n)
		stop()
		n, stop = m.node(atOnce) // what was captured survives
		for range 2 {
			forkIsLike(t, n, &at, ask)
			p.continues(n)
		}
		if out, _ := run(t, n, s, "cat /data/f /root/kept"); out != "in data\nkept\n" {
			t.Errorf("%s: the source has %q", state, out)
		}
		clean(t, n)
		must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
		must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
		if _, err := n.Captured(t.Context(), ask.Checkpoint); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("a checkpoint that was dropped: %v", err)
		}
	}
	noCheckpoint(t, n)
	p.continues(n)
}

// isWhole captures a sandbox, and fails unless each method returns the whole checkpoint.
func isWhole(t *testing.T, n *Node, ask sandbox.Capture) sandbox.Captured {
	t.Helper()
	got := capture1(t, n, ask)
	if !got.Memory || got.MemorySize == 0 || got.FilesSize == 0 || !strings.HasPrefix(got.Digest, "sha256:") || got.RuntimeBuild == "" {
		t.Errorf("%+v", got)
	}
	if seen := n.handles.Lookup(ask.Source.UID).Observed(); got.Image != seen.Image || got.Node != seen.Node {
		t.Errorf("%+v of %+v", got, seen)
	}
	again := capture1(t, n, ask)
	seen, err := n.Captured(t.Context(), ask.Checkpoint)
	if err != nil || again.Created != got.Created || again.Digest != got.Digest || seen.Digest != got.Digest {
		t.Errorf("a second call returned %+v, the first %+v; it is seen as %+v, %v", again, got, seen, err)
	}
	return got
}

// forkIsLike makes a sandbox of a checkpoint of one of [counts], and fails unless it continues where its
// source was, as itself, and lives like any other.
func forkIsLike(t *testing.T, n *Node, at *program, ask sandbox.Capture) {
	t.Helper()
	f := forkOf(at.s, ask)
	seen := ensure(t, n, f)
	if seen.Address == n.handles.Lookup(at.s.UID).Observed().Address || seen.EntrypointExit == nil || *seen.EntrypointExit != 3 {
		t.Errorf("it is %+v", seen)
	}
	q := at.as(f)
	q.continues(n)
	out, _ := run(t, n, f, "cat /data/f /disk/f /mem/f /root/kept; hostname; cat /etc/hostname; grep -c $(hostname) /etc/hosts; echo $NAME")
	if want := "in data\nin disk\nin mem\nkept\n" + f.Name + "\n" + f.Name + "\n1\n" + f.Name + "\n"; out != want {
		t.Errorf("it has %q, want %q", out, want)
	}
	run(t, n, f, "echo fork > /data/f; echo fork > /root/kept")
	suspendMemory(t, n, f)
	resume(t, n, f)
	q.continues(n)
	must(t, n.Remove(t.Context(), refOf(f)))
}

// Files alone are kept on request and of class runc, in any state.
func TestCaptureFilesOnly(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	for _, c := range []string{"gvisor", "runc"} {
		for _, state := range []string{"live", "frozen", "files"} {
			if c == "runc" && state == "frozen" {
				continue // it has no memory to sleep with
			}
			t.Run(c+"/"+state, func(t *testing.T) { keepsFiles(t, n, c, state) })
		}
	}
}

func keepsFiles(t *testing.T, n *Node, c, state string) {
	s := object(class(c), counts)
	ensure(t, n, s)
	run(t, n, s, "echo 1 > /data/f; echo 2 > /disk/f; echo 3 > /mem/f; echo 4 > /root/f; busybox rm /etc/group")
	switch state {
	case "frozen":
		suspendMemory(t, n, s)
	case "files":
		if _, err := n.Suspend(t.Context(), refOf(s), agents.SuspendFiles); err != nil {
			t.Fatal(err)
		}
	}
	before := stageOf(n, s)
	ask := checkpointOf(s)
	ask.FilesOnly = c == "gvisor" && state != "files"
	got := capture1(t, n, ask)
	if got.Memory || got.MemorySize != 0 || got.Digest != "" || got.FilesSize == 0 || got.Runtime != c {
		t.Errorf("%+v", got)
	}
	if stageOf(n, s) != before {
		t.Errorf("it was %s and is %s", before, stageOf(n, s))
	}
	f := forkOf(s, ask)
	ensure(t, n, f)
	out, _ := run(t, n, f, "cat /data/f /disk/f /root/f; [ -e /mem/f ] || echo no memory; [ -e /etc/group ] || echo gone; cat /etc/hostname")
	if want := "1\n2\n4\nno memory\ngone\n" + f.Name + "\n"; out != want {
		t.Errorf("fork prints %q, want %q", out, want)
	}
	if state != "live" {
		resume(t, n, s)
	}
	if out, _ := run(t, n, s, "cat /root/f"); out != "4\n" {
		t.Errorf("the source has %q", out)
	}
	must(t, n.Remove(t.Context(), refOf(s)))
	must(t, n.Remove(t.Context(), refOf(f)))
	must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
	noCheckpoint(t, n)
	clean(t, n)
}

// One that is frozen in RAM stays so, and forks continue from its state.
func TestCaptureFrozen(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	suspendMemory(t, n, s)
	process := n.handles.Lookup(s.UID).Row().Process
	ask := checkpointOf(s)
	capture1(t, n, ask)
	if status, err := runtimeOf(t, n, oci.GVisor).State(t.Context(), string(n.handles.Lookup(s.UID).ID)); err != nil || status != oci.Paused {
		t.Errorf("its container is %s, %v", status, err)
	}
	f := forkOf(s, ask)
	ensure(t, n, f)
	p.as(f).continues(n)
	stop()
	n, _ = m.node()
	if got := stageOf(n, s); got != journal.Paused || n.handles.Lookup(s.UID).Row().Process != process {
		t.Errorf("it is %s", got)
	}
	resume(t, n, s)
	p.continues(n)
	p.as(f).continues(n)
}

// captureSteps are what is done for a checkpoint of one that runs, with memory.
var captureSteps = []string{"capture_row", "capture_ahead", "capture_held", "capture_copied", "capture_memory", "capture_files"}

// If any step fails, the source continues and nothing is left; the next attempt succeeds.
func TestFailureOfACaptureStep(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	s := object(counts, counter)
	ensure(t, n, s)
	p := startProgram(t, n, s)
	for _, kind := range []string{"memory", "files", "disk"} {
		if kind == "disk" {
			suspendMemory(t, n, s)
			awaitStored(t, n, s)
		}
		for _, name := range captureSteps {
			if (kind == "disk" && name == "capture_held") || (kind == "files" && name == "capture_memory") {
				continue
			}
			t.Run(kind+"/"+name, func(t *testing.T) {
				sampled(t)
				p.t = t
				ask := checkpointOf(s)
				ask.FilesOnly = kind == "files"
				f.arm(name, errBroken)
				if _, err := n.Capture(t.Context(), ask); !errors.Is(err, errBroken) || !errors.Is(err, errs.ErrUnavailable) {
					t.Errorf("error %v, want the broken step's, which may be tried again", err)
				}
				noCheckpoint(t, n)
				if kind != "disk" {
					p.continues(n)
				}
				capture1(t, n, ask)
				must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
				noCheckpoint(t, n)
			})
		}
	}
	p.t = t
	resume(t, n, s)
	p.continues(n)
	clean(t, n)
}

// Wherever the process dies, the next one has the source run and nothing left of the checkpoint, or all
// of it where the journal has it.
func TestDeathAfterEachCaptureStep(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object(counts, counter)
	ensure(t, n, s)
	p := startProgram(t, n, s)
	stop()
	for _, name := range append(slices.Clone(captureSteps), "capture_ready") {
		for _, kind := range []string{"memory", "files"} {
			if kind == "files" && name == "capture_memory" {
				continue
			}
			t.Run(kind+"/"+name, func(t *testing.T) {
				sampled(t)
				p.t = t
				var f fault
				n, stop := m.node(f.into)
				ask := checkpointOf(s)
				ask.FilesOnly = kind == "files"
				f.arm(name, operation.ErrCrash)
				at := *p
				if _, err := n.Capture(t.Context(), ask); !errors.Is(err, operation.ErrCrash) {
					t.Fatalf("capture: %v", err)
				}
				if name != "capture_ready" && name != "capture_row" && name != "capture_ahead" && name != "capture_files" {
					heldStill(t, n, s) // as a death would have left it
				}
				stop()
				n, stop = m.node()
				defer stop()
				if got := stageOf(n, s); got != journal.Live {
					t.Errorf("it is %s", got)
				}
				if r, err := n.journal.Get(s.UID); err != nil || r.Stage != journal.Live {
					t.Errorf("the journal has %+v, %v", r, err)
				}
				p.continues(n)
				clean(t, n)
				if name != "capture_ready" {
					noCheckpoint(t, n)
					capture1(t, n, ask)
					at = *p
				}
				fork := forkOf(s, ask)
				ensure(t, n, fork)
				if kind == "memory" {
					at.as(fork).continues(n)
				}
				must(t, n.Remove(t.Context(), refOf(fork)))
				must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
				noCheckpoint(t, n)
			})
		}
	}
}

// heldStill pauses the container of a sandbox, unless it is.
func heldStill(t *testing.T, n *Node, s *agents.Sandbox) {
	t.Helper()
	id, runtime := string(n.handles.Lookup(s.UID).ID), runtimeOf(t, n, oci.GVisor)
	status, err := runtime.State(t.Context(), id)
	must(t, err)
	if status == oci.Running {
		must(t, runtime.Pause(t.Context(), id))
	}
}

// A full disk is a clear error, and the source does not suffer.
func TestCaptureWithoutRoom(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	run(t, n, s, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=20")
	must(t, os.MkdirAll(n.checkpoints.Root(), 0o700))
	must(t, mountTmpfs(n.checkpoints.Root()))
	defer func() { must(t, unmountTmpfs(n.checkpoints.Root())) }()
	ask := checkpointOf(s)
	if _, err := n.Capture(t.Context(), ask); !errors.Is(err, errs.ErrExhausted) || !strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("error %v, want one for a full disk", err)
	}
	noCheckpoint(t, n)
	p.continues(n)
	run(t, n, s, "busybox rm /dev/shm/big")
	capture1(t, n, filesOnly(ask))
	must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
}

// A checkpoint checks once for the space of its memory and files together; without, nothing is
// written.
func TestCaptureAsksForAllItsRoom(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var mu sync.Mutex
	var requested []int64
	var full bool
	var wrote atomic.Bool
	n, _ := m.node(func(c *Config) {
		c.CheckSpace = func(_ string, bytes int64) error {
			mu.Lock()
			defer mu.Unlock()
			requested = append(requested, bytes)
			if full {
				return errs.ErrExhausted
			}
			return nil
		}
		c.AfterStep = func(step string) error {
			if step == "capture_row" {
				wrote.Store(true)
			}
			return nil
		}
	})
	s := object()
	ensure(t, n, s)
	run(t, n, s, "dd if=/dev/urandom of=/root/big bs=1M count=64; dd if=/dev/urandom of=/dev/shm/big bs=1M count=32; busybox sync")
	files, err := n.DiskUsed(t.Context(), refOf(s))
	must(t, err)
	if files < 64<<20 {
		t.Fatalf("its files have %d bytes", files)
	}
	for _, tt := range []struct {
		filesOnly, full bool
		least           int64
	}{{false, true, files + 32<<20}, {false, false, files + 32<<20}, {true, true, files}, {true, false, files}} {
		mu.Lock()
		requested, full = nil, tt.full
		mu.Unlock()
		wrote.Store(false)
		ask := checkpointOf(s)
		ask.FilesOnly = tt.filesOnly
		if _, err := n.Capture(t.Context(), ask); errors.Is(err, errs.ErrExhausted) != tt.full || (err == nil) == tt.full {
			t.Errorf("%+v: %v", tt, err)
		}
		mu.Lock()
		if len(requested) != 1 || requested[0] < tt.least {
			t.Errorf("%+v: space for %d bytes was requested", tt, requested)
		}
		mu.Unlock()
		if wrote.Load() == tt.full {
			t.Errorf("%+v: something was written: %t", tt, wrote.Load())
		}
		must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
		noCheckpoint(t, n)
	}
}

// Memory on disk that is damaged becomes no checkpoint, which no retry would change; the files do, and the
// memory does once it is whole again.
func TestCaptureOfDamagedMemory(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(atOnce)
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	was := *n.handles.Lookup(s.UID).Row()
	suspendMemory(t, n, s)
	awaitStored(t, n, s)
	image := n.host.MemoryDir(string(n.handles.Lookup(s.UID).ID))
	for name, harm := range map[string]func(dir string) error{
		"a bit": func(dir string) error {
			return change(filepath.Join(dir, "pages.img"), func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
		},
		"truncated":       func(dir string) error { return os.Truncate(filepath.Join(dir, "pages.img"), 1) },
		"a file":          func(dir string) error { return os.Remove(filepath.Join(dir, "checkpoint.img")) },
		"the description": func(dir string) error { return os.Truncate(filepath.Join(dir, programs.ImageDescription), 3) },
		"all":             os.RemoveAll,
	} {
		t.Run(name, func(t *testing.T) {
			must(t, os.Rename(image, image+"-away"))
			must(t, os.CopyFS(image, os.DirFS(image+"-away")))
			must(t, harm(image))
			_, err := n.Capture(t.Context(), checkpointOf(s))
			if errs.Kind(err) != errs.ErrInvalid || !strings.Contains(err.Error(), "damaged") || !strings.Contains(err.Error(), "spec.content: Files") { //nolint:errorlint // this kind, and no other before it
				t.Errorf("capture: %v", err)
			}
			noCheckpoint(t, n)
			ask := filesOnly(checkpointOf(s))
			if got := capture1(t, n, ask); got.Memory {
				t.Error("a checkpoint of files has memory")
			}
			must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
			must(t, os.RemoveAll(image))
			must(t, os.Rename(image+"-away", image))
			atRest(t, n, s, &was)
		})
	}
	ask := checkpointOf(s)
	capture1(t, n, ask)
	f := forkOf(s, ask)
	ensure(t, n, f)
	p.as(f).continues(n)
	must(t, n.Remove(t.Context(), refOf(f)))
	must(t, n.Remove(t.Context(), refOf(s)))
	must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
	clean(t, n)
}

// What has no state to keep, or is being changed, is refused.
func TestCaptureRefusals(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	s := object()
	for name, ask := range map[string]sandbox.Capture{
		"not here":    checkpointOf(s),
		"not a name":  {Checkpoint: sandbox.CheckpointRef{UID: "../x"}, Source: refOf(s)},
		"no name":     {Source: refOf(s)},
		"a long name": {Checkpoint: sandbox.CheckpointRef{UID: types.UID(strings.Repeat("x", 200))}, Source: refOf(s)},
	} {
		want := errs.ErrInvalid
		if name == "not here" {
			want = errs.ErrConflict
		}
		if _, err := n.Capture(t.Context(), ask); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	ensure(t, n, s)
	must(t, n.handles.Lookup(s.UID).Row().Process.Signal(9))
	eventually.True(t, "its end is seen", func() bool { return n.handles.Lookup(s.UID).Observed().State == sandbox.ContainerExited })
	if _, err := n.Capture(t.Context(), checkpointOf(s)); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("of one that has ended: %v", err)
	}
	noCheckpoint(t, n)
}

// A removal of the source or the checkpoint does not wait until the checkpoint is made.
func TestCaptureIsInterrupted(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(f.into)
	for _, name := range captureSteps {
		for _, by := range []string{"source removed", "checkpoint dropped"} {
			t.Run(by+"/"+name, func(t *testing.T) {
				s := object()
				ensure(t, n, s)
				ask := checkpointOf(s)
				hit, release := f.hold(t, name)
				ended := make(chan error, 1)
				go func() {
					_, err := n.Capture(t.Context(), ask)
					ended <- err
				}()
				awaitHit(t, hit)
				removed := make(chan error, 1)
				if by == "source removed" {
					go func() { removed <- n.Remove(t.Context(), refOf(s)) }()
					eventually.True(t, "it is interrupted", func() bool { return interrupted(n, s.UID) })
				} else {
					go func() { removed <- n.DropCheckpoint(t.Context(), ask.Checkpoint) }()
					eventually.True(t, "it is interrupted", func() bool { _, interrupted := n.checkpoints.Holder(ask.Checkpoint.UID); return interrupted })
				}
				release()
				// The last steps may still succeed.
				if err := <-ended; err != nil && !errors.Is(err, errs.ErrUnavailable) && !errors.Is(err, errs.ErrConflict) {
					t.Errorf("capture: %v", err)
				}
				must(t, <-removed)
				if by == "checkpoint dropped" {
					if got := stageOf(n, s); got != journal.Live {
						t.Errorf("the source is %s", got)
					}
					run(t, n, s, "true")
					must(t, n.Remove(t.Context(), refOf(s)))
				}
				must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
				noCheckpoint(t, n)
				clean(t, n)
			})
		}
	}
}
