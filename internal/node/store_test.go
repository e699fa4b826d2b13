package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/inventory"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/programs"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// What is done on the way to disk and back. After "keep" and "running" the journal was written.
var (
	storeSteps = []string{"checkpoint", "flush", "keep", "stop", "unmount", "detach", "discard", "stored"}
	wakeSteps  = []string{"verify", "network", "mount", "tell", "restore", "agent", "limit", "running"}
)

// atOnce has frozen sandboxes moved to disk without delay.
func atOnce(c *Config) { c.StoreAfter = time.Nanosecond }

// fault breaks one step, once, when it is armed.
type fault struct {
	mu      sync.Mutex
	step    string
	err     error
	hit     chan struct{} // closed when the step is broken
	release chan struct{} // if not nil, waited for then
}

func (f *fault) arm(step string, err error) (hit <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.step, f.err, f.hit, f.release = step, err, make(chan struct{}), nil
	return f.hit
}

// hold has a step wait until release is called, or the test ends.
func (f *fault) hold(t testing.TB, step string) (hit <-chan struct{}, release func()) {
	t.Helper()
	goOn := make(chan struct{})
	release = sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.step, f.err, f.hit, f.release = step, nil, make(chan struct{}), goOn
	return f.hit, release
}

// awaitHit waits until a step is broken or held.
func awaitHit(t testing.TB, hit <-chan struct{}) {
	t.Helper()
	select {
	case <-hit:
	case <-time.After(eventually.Patience):
		t.Fatal("the step is not reached")
	}
}

func (f *fault) into(c *Config) {
	c.AfterStep = func(step string) error {
		f.mu.Lock()
		if step != f.step {
			f.mu.Unlock()
			return nil
		}
		f.step = ""
		close(f.hit)
		err, release := f.err, f.release
		f.mu.Unlock()
		if release != nil {
			<-release
		}
		return err
	}
}

// program runs in a sandbox and must continue: a loop that counts in memory and has a
// deleted file open, and a server.
type program struct {
	t       testing.TB
	s       *agents.Sandbox
	pid     string
	started string
	counted int
	lines   int
}

func startProgram(t testing.TB, n *Node, s *agents.Sandbox) *program {
	t.Helper()
	out, code := run(t, n, s, `
		mkdir /www; echo hi > /www/x; httpd -p 8000 -h /www
		echo in memory > /dev/shm/x
		i=0; while [ $i -lt 99 ]; do i=$((i+1)); echo line$i; done > /root/gone
		(exec 6< /root/gone; busybox rm /root/gone; i=0
		 while true; do
			i=$((i+1))
			if [ -e /root/ask ]; then
				read line <&6; busybox rm /root/ask; echo $i $line > /root/new; busybox mv /root/new /root/answer
			fi
			sleep 0.01
		 done) > /dev/null 2>&1 &
		echo $!`)
	if code != 0 {
		t.Fatalf("start of the program: %d %q", code, out)
	}
	p := &program{t: t, s: s, pid: strings.TrimSpace(out)}
	p.started = p.startOf(n)
	p.continues(n)
	return p
}

// startOf is the start of the process by the sandbox's kernel.
func (p *program) startOf(n *Node) string {
	p.t.Helper()
	out, _ := run(p.t, n, p.s, "cat /proc/"+p.pid+"/stat")
	fields := strings.Fields(out[strings.LastIndexByte(out, ')')+1:])
	if len(fields) < 20 {
		p.t.Fatalf("process %s: %q", p.pid, out)
	}
	return fields[19]
}

// continues fails unless everything continues from the state of the last query.
func (p *program) continues(n *Node) {
	p.t.Helper()
	out, code := run(p.t, n, p.s, "touch /root/ask; until [ -e /root/answer ]; do sleep 0.01; done; cat /root/answer /dev/shm/x; busybox rm /root/answer")
	count, lines := p.counted, p.lines+1
	var line string
	if _, err := fmt.Sscan(out, &count, &line); code != 0 || err != nil || count <= p.counted || line != fmt.Sprint("line", lines) || !strings.HasSuffix(out, "\nin memory\n") {
		p.t.Errorf("after count %d and line %d it answers %q, code %d, %v", p.counted, p.lines, out, code, err)
	}
	p.counted, p.lines = count, lines
	if started := p.startOf(n); started != p.started {
		p.t.Errorf("process %s began at %s, before at %s", p.pid, started, p.started)
	}
	req, err := http.NewRequestWithContext(p.t.Context(), http.MethodGet, "http://"+n.handles.Lookup(p.s.UID).Observed().Address.String()+":8000/x", nil)
	must(p.t, err)
	res, err := (&http.Client{Timeout: eventually.Patience, Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		p.t.Errorf("its server: %v", err)
		return
	}
	defer func() { _ = res.Body.Close() }()
	if body, err := io.ReadAll(res.Body); err != nil || string(body) != "hi\n" {
		p.t.Errorf("its server returns %q, %v", body, err)
	}
}

func suspendMemory(t testing.TB, n *Node, s *agents.Sandbox) {
	t.Helper()
	if seen, err := n.Suspend(t.Context(), refOf(s), agents.SuspendMemory); err != nil || seen.State != sandbox.ContainerPaused {
		t.Fatalf("suspend: %+v, %v", seen, err)
	}
}

func resume(t testing.TB, n *Node, s *agents.Sandbox) {
	t.Helper()
	if seen, err := n.Resume(t.Context(), refOf(s), false); err != nil || seen.State != sandbox.ContainerRunning {
		t.Fatalf("resume: %+v, %v", seen, err)
	}
}

func stageOf(n *Node, s *agents.Sandbox) journal.Stage {
	return n.handles.Lookup(s.UID).Row().Stage
}

func awaitStored(t testing.TB, n *Node, s *agents.Sandbox) {
	t.Helper()
	eventually.True(t, "its memory is on disk", func() bool { return stageOf(n, s) == journal.Stored })
}

// atRest fails unless a sandbox is on disk and nothing of it is anywhere else.
func atRest(t testing.TB, n *Node, s *agents.Sandbox, was *journal.Row) {
	t.Helper()
	u := n.handles.Lookup(s.UID)
	seenAtRest(t, n, s, was)
	if r := u.Row(); r.Stage != journal.Stored || r.Memory == nil || r.Memory.Size == 0 || r.Memory.Build.SHA256 == "" {
		t.Errorf("journal has %+v", r)
	}
	if was.Process.Alive() {
		t.Errorf("process %d lives", was.Process.PID)
	}
	if _, err := memimage.Read(n.host.MemoryDir(string(u.ID))); err != nil {
		t.Error(err)
	}
	nothingRuns(t, n, string(u.ID))
	clean(t, n)
}

// seenAtRest fails unless a sandbox is observed as stored.
func seenAtRest(t testing.TB, n *Node, s *agents.Sandbox, was *journal.Row) {
	t.Helper()
	seen, err := n.Observe(t.Context(), refOf(s))
	if err != nil || seen.State != sandbox.ContainerPaused || !strings.Contains(seen.Message, "on disk") || seen.Address != was.Address {
		t.Errorf("%+v, %v", seen, err)
	}
	if lease, ok := n.allocator.Of(string(s.UID)); !ok || lease.State != ipam.Held || lease.Address != was.Address {
		t.Errorf("lease %+v, %v", lease, ok)
	}
	diskUsed(t, n, s)
}

// nothingRuns fails if there is a container, or anything that only one needs.
func nothingRuns(t testing.TB, n *Node, id string) {
	t.Helper()
	absent := func(what string, names []string, err error) {
		t.Helper()
		if err != nil || slices.Contains(names, id) {
			t.Errorf("%s: %v, %v", what, names, err)
		}
	}
	names, err := n.network.List(t.Context())
	absent("network namespaces", names, err)
	names, err = runtimeOf(t, n, oci.GVisor).List()
	absent("containers", names, err)
	names, err = cgroups.List(n.cfg.CgroupParent)
	absent("cgroups", names, err)
	names, err = n.inventory.Mounts()
	absent("mounts", names, err)
	names, err = n.inventory.Processes(map[string]bool{})
	if err != nil || strings.Contains(strings.Join(names, " "), id) {
		t.Errorf("processes: %v, %v", names, err)
	}
}

func clean(t testing.TB, n *Node) {
	t.Helper()
	if left, err := n.Audit(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// noMemory waits until there is no image.
func noMemory(t testing.TB, n *Node) {
	t.Helper()
	eventually.True(t, "no memory is left on disk", func() bool {
		names, err := inventory.Entries(n.cfg.MemoryDir)
		return err == nil && len(names) == 0
	})
}

func TestMemoryMovesToDiskAndBack(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(atOnce)
	s := object(func(s *agents.Sandbox) {
		s.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{{EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: "data"}}}
		pod(s).Volumes = []corev1.Volume{
			{Name: "disk", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{Name: "mem", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}},
		}
		container(s).VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data", SubPath: "a"}, {Name: "disk", MountPath: "/disk"}, {Name: "mem", MountPath: "/mem"}}
		container(s).Command = []string{"/bin/sh", "-c", "echo hello; exit 3"}
		container(s).Env = []corev1.EnvVar{{Name: "PATH", Value: "/bin"}}
		container(s).ReadinessProbe = &corev1.Probe{PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/x", Port: intstr.FromInt32(8000)}}}
	})
	ensure(t, n, s)
	p := startProgram(t, n, s)
	run(t, n, s, "for v in data disk mem; do echo in $v > /$v/f; done")
	ready := func() bool {
		seen := n.handles.Lookup(s.UID).Observed()
		return seen.Probed && seen.Message == "" && seen.EntrypointExit != nil && *seen.EntrypointExit == 3
	}
	eventually.True(t, "it is ready", ready)
	for range 3 {
		was := *n.handles.Lookup(s.UID).Row()
		suspendMemory(t, n, s)
		awaitStored(t, n, s)
		atRest(t, n, s, &was)
		suspendMemory(t, n, s)
		if seen := ensure(t, n, s); seen.State != sandbox.ContainerPaused || seen.EntrypointExit == nil {
			t.Errorf("ensure of a suspended sandbox: %+v", seen)
		}
		must(t, n.Bind(t.Context(), s))
		if _, err := n.Agent(t.Context(), refOf(s)); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("agent of a suspended sandbox: %v", err)
		}
		stop()
		n, stop = m.node(atOnce)
		atRest(t, n, s, &was) // no other node has touched it
		if seen := n.handles.Lookup(s.UID).Observed(); seen.EntrypointExit == nil || *seen.EntrypointExit != 3 {
			t.Errorf("after a restart of the node: %+v", seen)
		}
		resume(t, n, s)
		resume(t, n, s)
		p.continues(n)
		noMemory(t, n)
		eventually.True(t, "it is ready again", ready)
		if out, _ := run(t, n, s, "cat /data/f /disk/f /mem/f"); out != "in data\nin disk\nin mem\n" {
			t.Errorf("volumes have %q", out)
		}
		if lines, err := n.Logs(t.Context(), refOf(s), time.Time{}); err != nil || !strings.Contains(fmt.Sprint(lines), "hello") {
			t.Errorf("logs %v, %v", lines, err)
		}
		clean(t, n)
	}
	// It is watched as if it had never slept.
	must(t, n.handles.Lookup(s.UID).Row().Process.Signal(9))
	eventually.True(t, "its end is seen", func() bool { return n.handles.Lookup(s.UID).Observed().State == sandbox.ContainerExited })
}

// Without the order to move it, memory stays where it is.
func TestMemoryThatStays(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	s := object()
	ensure(t, n, s)
	suspendMemory(t, n, s)
	u := n.handles.Lookup(s.UID)
	u.Mu.Lock()
	planned := u.Unstore != nil
	u.Mu.Unlock()
	if seen := u.Observed(); !strings.Contains(seen.Message, "RAM") || planned {
		t.Errorf("%+v, planned to be stored: %t", seen, planned)
	}
	resume(t, n, s)
	if seen := n.handles.Lookup(s.UID).Observed(); seen.Message != "" {
		t.Errorf("%+v", seen)
	}
	must(t, n.Remove(t.Context(), refOf(s)))
}

// If any step fails once, the sandbox stays suspended and can be resumed, and so it does on disk
// when storing it was tried again.
func TestFailureOfASleepOrWakeStep(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	for _, name := range storeSteps {
		t.Run("store/"+name, func(t *testing.T) {
			sampled(t)
			p.t = t
			hit := f.arm(name, errBroken)
			suspendMemory(t, n, s)
			awaitHit(t, hit)
			resume(t, n, s)
			p.continues(n)
			noMemory(t, n)

			was := *n.handles.Lookup(s.UID).Row()
			f.arm(name, errBroken)
			suspendMemory(t, n, s)
			awaitStored(t, n, s)
			atRest(t, n, s, &was)
			resume(t, n, s)
			p.continues(n)
			clean(t, n)
		})
	}
	for _, name := range wakeSteps {
		t.Run("wake/"+name, func(t *testing.T) {
			sampled(t)
			p.t = t
			was := *n.handles.Lookup(s.UID).Row()
			suspendMemory(t, n, s)
			awaitStored(t, n, s)
			f.arm(name, errBroken)
			if _, err := n.Resume(t.Context(), refOf(s), false); !errors.Is(err, errBroken) || !errors.Is(err, errs.ErrUnavailable) {
				t.Errorf("resume: %v", err)
			}
			atRest(t, n, s, &was)
			resume(t, n, s)
			p.continues(n)
			noMemory(t, n)
			clean(t, n)
		})
	}
}

// Wherever the process dies, the next one finds the sandbox suspended, or running where the journal
// has that, and nothing lost.
func TestDeathAfterEachSleepOrWakeStep(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	s := object()
	n, stop := m.node()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	stop()
	for i, name := range slices.Concat(storeSteps, wakeSteps) {
		t.Run(name, func(t *testing.T) {
			sampled(t)
			p.t = t
			var f fault
			n, stop := m.node(atOnce, f.into)
			was := *n.handles.Lookup(s.UID).Row()
			if i < len(storeSteps) {
				hit := f.arm(name, operation.ErrCrash)
				suspendMemory(t, n, s)
				awaitHit(t, hit)
			} else {
				suspendMemory(t, n, s)
				awaitStored(t, n, s)
				f.arm(name, operation.ErrCrash)
				if _, err := n.Resume(t.Context(), refOf(s), false); !errors.Is(err, operation.ErrCrash) {
					t.Fatalf("resume: %v", err)
				}
			}
			stop()
			n, stop = m.node()
			defer stop()
			clean(t, n)
			switch name {
			case "checkpoint", "flush":
				if got := stageOf(n, s); got != journal.Paused || !was.Process.Alive() {
					t.Errorf("it is %s", got)
				}
				noMemory(t, n)
			case "running":
				if got := stageOf(n, s); got != journal.Live {
					t.Errorf("it is %s", got)
				}
			default:
				atRest(t, n, s, &was)
			}
			resume(t, n, s)
			p.continues(n)
			noMemory(t, n)
		})
	}
}

// A server that ends while memory is being written leaves a frozen sandbox, and the next writes it.
func TestRestartWhileStoring(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(atOnce)
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	run(t, n, s, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=200")
	for range 3 {
		suspendMemory(t, n, s)
		eventually.True(t, "memory is being written", func() bool {
			_, err := os.Stat(n.host.MemoryDir(string(n.handles.Lookup(s.UID).ID)) + ".part")
			return err == nil || stageOf(n, s) == journal.Stored
		})
		stop()
		n, stop = m.node(atOnce)
		awaitStored(t, n, s)
		resume(t, n, s)
		p.continues(n)
		noMemory(t, n)
		clean(t, n)
	}
}

func TestRemoveWhileFallingAsleepOrWaking(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	removed := func(t *testing.T, s *agents.Sandbox, release func()) {
		t.Helper()
		ended := make(chan error, 1)
		go func() { ended <- n.Remove(t.Context(), refOf(s)) }()
		eventually.True(t, "it is interrupted", func() bool { return interrupted(n, s.UID) })
		release()
		if err := <-ended; err != nil {
			t.Errorf("remove: %v", err)
		}
		if n.handles.Lookup(s.UID) != nil {
			t.Error("it is still there")
		}
		noMemory(t, n)
		clean(t, n)
	}
	for _, name := range storeSteps {
		t.Run("store/"+name, func(t *testing.T) {
			s := object()
			ensure(t, n, s)
			hit, release := f.hold(t, name)
			suspendMemory(t, n, s)
			awaitHit(t, hit)
			removed(t, s, release)
		})
	}
	for _, name := range wakeSteps {
		t.Run("wake/"+name, func(t *testing.T) {
			s := object()
			ensure(t, n, s)
			suspendMemory(t, n, s)
			awaitStored(t, n, s)
			hit, release := f.hold(t, name)
			ended := make(chan error, 1)
			go func() {
				_, err := n.Resume(t.Context(), refOf(s), false)
				ended <- err
			}()
			awaitHit(t, hit)
			removed(t, s, release)
			if err := <-ended; err != nil && !errors.Is(err, errs.ErrUnavailable) {
				t.Errorf("resume: %v", err)
			}
		})
	}
	t.Run("stored", func(t *testing.T) {
		s := object()
		ensure(t, n, s)
		suspendMemory(t, n, s)
		awaitStored(t, n, s)
		must(t, n.Remove(t.Context(), refOf(s)))
		must(t, n.Remove(t.Context(), refOf(s)))
		noMemory(t, n)
		clean(t, n)
	})
}

// Who resumes while memory is being written waits, and several that resume wake it once.
func TestResumeWhileStoring(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	for _, name := range storeSteps {
		t.Run(name, func(t *testing.T) {
			p.t = t
			hit, release := f.hold(t, name)
			suspendMemory(t, n, s)
			awaitHit(t, hit)
			// A caller that gives up does no harm.
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := n.Resume(ctx, refOf(s), false); !errors.Is(err, errs.ErrUnavailable) {
				t.Errorf("resume with an ended context: %v", err)
			}
			var all [2]error
			var resuming sync.WaitGroup
			for i := range all {
				resuming.Go(func() { _, all[i] = n.Resume(t.Context(), refOf(s), false) })
			}
			release()
			resuming.Wait()
			must(t, errors.Join(all[:]...))
			p.continues(n)
			noMemory(t, n)
		})
	}
}

// Where the disk is full, memory stays in RAM, with that reason.
func TestFullDiskWhileStoring(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	small := t.TempDir()
	must(t, unix.Mount("tmpfs", small, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { must(t, unix.Unmount(small, unix.MNT_DETACH)) })
	n, _ := m.node(atOnce, func(c *Config) { c.MemoryDir = small })
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	for range 2 {
		suspendMemory(t, n, s)
		eventually.True(t, "the failure is seen", func() bool {
			return strings.Contains(n.handles.Lookup(s.UID).Observed().Message, "could not be written")
		})
		resume(t, n, s)
		p.continues(n)
		noMemory(t, n)
	}
	if seen := n.handles.Lookup(s.UID).Observed(); seen.Message != "" {
		t.Errorf("%+v", seen)
	}
	must(t, n.Remove(t.Context(), refOf(s)))
	clean(t, n)
}

// Memory is not written where it would take what is kept for the others: it stays in RAM, and goes to
// disk once there is room. Nor are checkpoints made there.
func TestNoRoomToStore(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var requested atomic.Int64
	var full atomic.Bool
	full.Store(true)
	n, _ := m.node(atOnce, func(c *Config) {
		c.CheckSpace = func(_ string, bytes int64) error {
			requested.Store(max(bytes, requested.Load()))
			if full.Load() {
				return errs.Public(errs.ErrExhausted, "too little room")
			}
			return nil
		}
	})
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	run(t, n, s, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=40")
	if _, err := n.Capture(t.Context(), checkpointOf(s)); !errors.Is(err, errs.ErrExhausted) || requested.Load() < 40<<20 {
		t.Errorf("Capture = %v after room for %d bytes was requested", err, requested.Load())
	}
	noCheckpoint(t, n)
	requested.Store(0)
	suspendMemory(t, n, s)
	eventually.True(t, "the failure is seen", func() bool {
		seen := n.handles.Lookup(s.UID).Observed()
		return seen.Memory == agents.MemoryInRAM && strings.HasSuffix(seen.Message, "could not be written to disk: too little room")
	})
	noMemory(t, n)
	if requested.Load() < 40<<20 {
		t.Errorf("room for %d bytes was requested", requested.Load())
	}
	full.Store(false)
	awaitStored(t, n, s)
	if seen := n.handles.Lookup(s.UID).Observed(); seen.Memory != agents.MemoryOnDisk || seen.MemorySize < 40<<20 {
		t.Errorf("on disk it is %+v", seen)
	}
	resume(t, n, s)
	p.continues(n)
	if seen := n.handles.Lookup(s.UID).Observed(); seen.Memory != "" || seen.MemorySize != 0 {
		t.Errorf("awake it is %+v", seen)
	}
	must(t, n.Remove(t.Context(), refOf(s)))
	clean(t, n)
}

// Memory that is damaged is not used, and is kept for repair: nothing is started of it.
func TestDamagedMemory(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var started atomic.Int32
	n, _ := m.node(atOnce, func(c *Config) {
		c.AfterStep = func(step string) error {
			if step == "restore" {
				started.Add(1)
			}
			return nil
		}
	})
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	was := *n.handles.Lookup(s.UID).Row()
	suspendMemory(t, n, s)
	awaitStored(t, n, s)
	image := n.host.MemoryDir(string(n.handles.Lookup(s.UID).ID))
	img, err := memimage.Read(image)
	must(t, err)
	largest := slices.MaxFunc(img.Files, func(a, b memimage.File) int { return cmp.Compare(a.Size, b.Size) })
	for name, tt := range map[string]struct {
		harm func(dir string)
		want string
	}{
		"missing":   {func(dir string) { must(t, os.RemoveAll(dir)) }, "damaged"},
		"truncated": {func(dir string) { must(t, os.Truncate(filepath.Join(dir, largest.Name), largest.Size-1)) }, largest.Name},
		"one bit": {func(dir string) {
			f, err := os.OpenFile(filepath.Join(dir, largest.Name), os.O_RDWR, 0)
			must(t, err)
			var b [1]byte
			_, err = f.ReadAt(b[:], largest.Size/2)
			must(t, err)
			b[0] ^= 1
			_, err = f.WriteAt(b[:], largest.Size/2)
			must(t, errors.Join(err, f.Close()))
		}, largest.Name},
		"no description": {func(dir string) { must(t, os.Truncate(filepath.Join(dir, programs.ImageDescription), 3)) }, "damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			must(t, os.Rename(image, image+"-away"))
			must(t, os.CopyFS(image, os.DirFS(image+"-away")))
			tt.harm(image)
			_, err := n.Resume(t.Context(), refOf(s), false)
			if errs.Kind(err) != errs.ErrConflict { //nolint:errorlint // this kind, and no other before it
				t.Errorf("resume: %v", err)
			}
			for _, text := range []string{"damaged", tt.want, "spec.barchan.resume: Files", "memory=false"} {
				if !strings.Contains(errs.Text(err), text) {
					t.Errorf("error %v does not contain %q", err, text)
				}
			}
			must(t, os.RemoveAll(image))
			must(t, os.Rename(image+"-away", image))
			atRest(t, n, s, &was)
		})
	}
	if started.Load() != 0 {
		t.Errorf("%d times something was started of damaged memory", started.Load())
	}
	resume(t, n, s)
	p.continues(n)
	suspendMemory(t, n, s)
	awaitStored(t, n, s)
	must(t, os.Truncate(filepath.Join(image, largest.Name), 1))
	resumeFiles(t, n, s)
	if out, code := run(t, n, s, "cat /www/x"); code != 0 || out != "hi\n" {
		t.Errorf("its file: %d %q", code, out)
	}
	noMemory(t, n)
}

func TestFiveStoredAtOnce(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(atOnce)
	all := make([]*program, 5)
	var busy sync.WaitGroup
	each := func(do func(p *program)) {
		for _, p := range all {
			busy.Go(func() { do(p) })
		}
		busy.Wait()
	}
	for i := range all {
		s := object()
		ensure(t, n, s)
		all[i] = startProgram(t, n, s)
	}
	for range 2 {
		rows := map[*program]journal.Row{}
		for _, p := range all {
			rows[p] = *n.handles.Lookup(p.s.UID).Row()
		}
		each(func(p *program) {
			if _, err := n.Suspend(t.Context(), refOf(p.s), agents.SuspendMemory); err != nil {
				t.Error(err)
			}
		})
		for _, p := range all {
			awaitStored(t, n, p.s)
			was := rows[p]
			atRest(t, n, p.s, &was)
		}
		each(func(p *program) {
			if _, err := n.Resume(t.Context(), refOf(p.s), false); err != nil {
				t.Error(err)
			}
		})
		for _, p := range all {
			p.continues(n)
		}
		noMemory(t, n)
	}
}

// What a sandbox was bound to stays so through its sleep; what its object gets meanwhile waits.
func TestBindAroundSleep(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(atOnce)
	s := object()
	ensure(t, n, s)
	has := func(want string) {
		t.Helper()
		if out, _ := run(t, n, s, "echo $A"); out != want+"\n" {
			t.Errorf("the environment has %q, want %s", out, want)
		}
	}
	bind := func(value string) {
		t.Helper()
		container(s).Env = []corev1.EnvVar{{Name: "A", Value: value}}
		must(t, n.Bind(t.Context(), s))
	}
	bind("one")
	suspendMemory(t, n, s)
	awaitStored(t, n, s)
	bind("two")
	if got := stageOf(n, s); got != journal.Stored {
		t.Errorf("it is %s", got)
	}
	resume(t, n, s)
	has("one")
	bind("two")
	has("two")
}

// A sandbox resumes although no caller waits any more, for its processes may have begun.
func TestWakeOutlivesWhoAskedForIt(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	for _, name := range wakeSteps {
		t.Run(name, func(t *testing.T) {
			p.t = t
			suspendMemory(t, n, s)
			awaitStored(t, n, s)
			hit, release := f.hold(t, name)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				_, err := n.Resume(ctx, refOf(s), false)
				ended <- err
			}()
			awaitHit(t, hit)
			cancel()
			release()
			must(t, <-ended)
			p.continues(n)
		})
	}
}

// Frozen processes that die cost the sandbox nothing once its memory is written.
func TestFrozenSandboxDies(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(atOnce, f.into)
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	hit, release := f.hold(t, "checkpoint")
	suspendMemory(t, n, s)
	awaitHit(t, hit)
	was := *n.handles.Lookup(s.UID).Row()
	must(t, was.Process.Signal(9))
	must(t, was.Process.Wait(t.Context()))
	release()
	awaitStored(t, n, s)
	atRest(t, n, s, &was)
	resume(t, n, s)
	p.continues(n)

	n.cfg.StoreAfter = time.Hour // read by the next Suspend alone
	suspendMemory(t, n, s)
	must(t, n.handles.Lookup(s.UID).Row().Process.Signal(9))
	eventually.True(t, "its end is seen", func() bool { return n.handles.Lookup(s.UID).Observed().State == sandbox.ContainerExited })
	if _, err := n.Resume(t.Context(), refOf(s), false); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("resume of the dead: %v", err)
	}
}

// A paused sandbox stays in RAM for its time, and once memory is low it does not.
func TestMemoryLowStores(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var low atomic.Bool
	n, _ := m.node(func(c *Config) { c.StoreAfter, c.MemoryLow = time.Hour, low.Load })
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	suspendMemory(t, n, s)
	if stage := stageOf(n, s); stage != journal.Paused {
		t.Fatalf("it is %s", stage)
	}
	low.Store(true)
	awaitStored(t, n, s)
	resume(t, n, s)
	p.continues(n)
}
