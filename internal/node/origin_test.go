package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// A sandbox that is not made as the one that was checkpointed is refused with the field's name.
func TestOriginFits(t *testing.T) {
	defaults := plan.Defaults{Class: oci.GVisor, Offers: func(oci.Class) bool { return true }}
	base := func() *agents.Sandbox { return object(counts) }
	was, err := plan.New(base(), defaults)
	must(t, err)
	yes, no, seven := true, false, int64(7)
	for name, c := range map[string]struct {
		change func(*agents.Sandbox)
		names  string // empty: it fits
		files  bool   // it matters without memory too
	}{
		"the same":      {func(*agents.Sandbox) {}, "", false},
		"another name":  {func(s *agents.Sandbox) { s.Name = "other" }, "", false},
		"other env":     {func(s *agents.Sandbox) { container(s).Env[0].Value = "x" }, "", false},
		"more CPU":      {limit(corev1.ResourceCPU, "3"), "", false},
		"class":         {class("runc"), "spec.podTemplate.spec.runtimeClassName", false},
		"command":       {func(s *agents.Sandbox) { container(s).Command[0] = "/bin/ash" }, "containers[0].command", false},
		"args":          {func(s *agents.Sandbox) { container(s).Args = []string{"x"} }, "containers[0].args", false},
		"user":          {secured(corev1.SecurityContext{RunAsUser: &seven}), "securityContext.runAsUser", false},
		"privileges":    {secured(corev1.SecurityContext{AllowPrivilegeEscalation: &no}), "securityContext.allowPrivilegeEscalation", false},
		"root":          {secured(corev1.SecurityContext{ReadOnlyRootFilesystem: &yes}), "securityContext.readOnlyRootFilesystem", false},
		"capabilities":  {secured(corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}), "securityContext.capabilities", false},
		"memory":        {limit(corev1.ResourceMemory, "2Gi"), "resources.limits.memory", false},
		"volume less":   {func(s *agents.Sandbox) { container(s).VolumeMounts = container(s).VolumeMounts[:2] }, "volumeMounts[2]", true},
		"volume more":   {mountMore, "volumeMounts[3]", true},
		"transient":     {func(s *agents.Sandbox) { mountMore(s); transient("more")(s) }, "volumeMounts[3]", false},
		"volume moved":  {func(s *agents.Sandbox) { container(s).VolumeMounts[1].MountPath = "/d" }, "volumeMounts[1]", true},
		"volume kind":   {func(s *agents.Sandbox) { container(s).VolumeMounts[1].Name = "mem" }, "volumeMounts[1]", true},
		"volume sealed": {func(s *agents.Sandbox) { container(s).VolumeMounts[0].ReadOnly = true }, "volumeMounts[0]", true},
		"volume's part": {func(s *agents.Sandbox) { container(s).VolumeMounts[0].SubPath = "b" }, "volumeMounts[0]", true},
	} {
		t.Run(name, func(t *testing.T) {
			s := base()
			c.change(s)
			p, err := plan.New(s, defaults)
			must(t, err)
			for _, memory := range []bool{true, false} {
				err := p.Fits(&was, memory)
				refused := c.names != "" && (memory || c.files)
				if refused != (err != nil) || (refused && (!errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), c.names))) {
					t.Errorf("with memory %t: %v, want one that names %q", memory, err, c.names)
				}
			}
		})
	}
}

// transient gives the last mount a volume that is no part of the sandbox's files.
func transient(name string) func(*agents.Sandbox) {
	return func(s *agents.Sandbox) {
		mounts := container(s).VolumeMounts
		mounts[len(mounts)-1].Name = name
		spec := &s.Spec.PodTemplate
		spec.Spec.Volumes = append(spec.Spec.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
		spec.ObjectMeta.Annotations = map[string]string{agents.AnnotationTransientVolumes: "other," + name}
	}
}

func limit(name corev1.ResourceName, value string) func(*agents.Sandbox) {
	return func(s *agents.Sandbox) {
		container(s).Resources.Limits = corev1.ResourceList{name: resource.MustParse(value)}
	}
}

func secured(c corev1.SecurityContext) func(*agents.Sandbox) {
	return func(s *agents.Sandbox) { container(s).SecurityContext = &c }
}

func mountMore(s *agents.Sandbox) {
	container(s).VolumeMounts = append(container(s).VolumeMounts, corev1.VolumeMount{Name: "disk", MountPath: "/more"})
}

// What cannot be made from a checkpoint is refused, and leaves nothing.
func TestRestoreRefusals(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	s := object(counts)
	ensure(t, n, s)
	ask := checkpointOf(s)
	capture1(t, n, ask)
	other := object(func(s *agents.Sandbox) { s.Namespace = "other" })
	other.Spec = forkOf(s, ask).Spec
	for name, c := range map[string]struct {
		s    *agents.Sandbox
		kind error
		want string
	}{
		"another namespace": {other, errs.ErrNotFound, "spec.barchan.restore.checkpointName"},
		"no checkpoint":     {forkOf(s, checkpointOf(s)), errs.ErrNotFound, "spec.barchan.restore.checkpointName"},
		"another command": {func() *agents.Sandbox {
			f := forkOf(s, ask)
			container(f).Command = []string{"/bin/true"}
			return f
		}(), errs.ErrInvalid, "containers[0].command"},
	} {
		if _, err := n.Ensure(t.Context(), c.s); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want kind %v naming %q", name, err, c.kind, c.want)
		}
	}
	// Without memory it may be made otherwise.
	f := forkOf(s, filesOnly(ask), class("runc"))
	container(f).Command = []string{"/bin/true"}
	ensure(t, n, f)
	must(t, n.Remove(t.Context(), refOf(f)))
	clean(t, n)

	// A name that has moved on to another image is the checkpoint's affair no more; another name is.
	var newer bytes.Buffer
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, Config: v1.Config{Cmd: []string{"other"}}})
	must(t, err)
	must(t, tarball.Write(name.MustParseReference(testImage), img, &newer))
	_, err = n.cfg.Containerd.Import(t.Context(), &newer, 0, "", nil)
	must(t, err)
	f = forkOf(s, ask)
	if seen := ensure(t, n, f); seen.Image != n.handles.Lookup(s.UID).Observed().Image {
		t.Errorf("it is of image %s", seen.Image)
	}
	must(t, n.Remove(t.Context(), refOf(f)))
	f = forkOf(s, ask)
	container(f).Image = strings.TrimSuffix(testImage, ":latest")
	if _, err := n.Ensure(t.Context(), f); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "containers[0].image") {
		t.Errorf("another image: %v", err)
	}

	// Memory that was written by another build of the runtime, which is not here.
	k := n.checkpoints.Of(ask.Checkpoint)
	c := *k.Row()
	c.Memory = &checkpoint.Memory{Build: c.Memory.Build, Size: c.Memory.Size}
	c.Memory.Build.SHA256 = strings.Repeat("ab", 32)
	k.SetRow(&c)
	if _, err := n.Ensure(t.Context(), forkOf(s, ask)); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "abababab") || !strings.Contains(err.Error(), "filesOnly: true") {
		t.Errorf("of another build: %v", err)
	}
	f = forkOf(s, filesOnly(ask))
	ensure(t, n, f)
	must(t, n.Remove(t.Context(), refOf(f)))
	clean(t, n)
}

// A memory that is damaged is not started from; its files are whole.
func TestDamagedCheckpoint(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object()
	ensure(t, n, s)
	run(t, n, s, "echo kept > /root/kept; dd if=/dev/urandom of=/dev/shm/x bs=1M count=4")
	damage := map[string]func(dir string) error{
		"a bit": func(dir string) error {
			return change(filepath.Join(dir, "pages.img"), func(b []byte) []byte { b[len(b)/2] ^= 1; return b })
		},
		"the end": func(dir string) error {
			return change(filepath.Join(dir, "pages.img"), func(b []byte) []byte { return b[:len(b)-4096] })
		},
		"a file":          func(dir string) error { return os.Remove(filepath.Join(dir, "checkpoint.img")) },
		"the description": func(dir string) error { return os.WriteFile(filepath.Join(dir, "image.json"), []byte("{}"), 0o600) },
		"all":             os.RemoveAll,
	}
	for name, spoil := range damage {
		t.Run(name, func(t *testing.T) {
			ask := checkpointOf(s)
			capture1(t, n, ask)
			whole := forkOf(s, ask)
			ensure(t, n, whole)
			must(t, n.Remove(t.Context(), refOf(whole)))
			must(t, spoil(n.checkpoints.MemoryDir(ask.Checkpoint.UID)))
			for range 2 { // what was found is not remembered as good
				_, err := n.Ensure(t.Context(), forkOf(s, ask))
				if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "damaged") || !strings.Contains(err.Error(), "filesOnly: true") {
					t.Errorf("error %v, want one that names what works", err)
				}
			}
			f := forkOf(s, filesOnly(ask))
			ensure(t, n, f)
			if out, _ := run(t, n, f, "cat /root/kept; ls /dev/shm"); out != "kept\n" {
				t.Errorf("its files have %q", out)
			}
			must(t, n.Remove(t.Context(), refOf(f)))
			clean(t, n)
			stop()
			n, stop = m.node()
			must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
			noCheckpoint(t, n)
		})
	}
}

func change(path string, how func([]byte) []byte) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return os.WriteFile(path, how(b), 0o600)
}

// A checkpoint is not removed while a sandbox is being made from it, and no other begins meanwhile.
func TestDropWhileRestoring(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	var f fault
	n, _ := m.node(f.into)
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	for _, name := range []string{"snapshot", "verify", "start", "agent"} {
		t.Run(name, func(t *testing.T) {
			p.t = t
			ask := checkpointOf(s)
			capture1(t, n, ask)
			at := *p
			hit, release := f.hold(t, name)
			fork := forkOf(s, ask)
			made := make(chan error, 1)
			go func() {
				_, err := n.Ensure(t.Context(), fork)
				made <- err
			}()
			awaitHit(t, hit)
			impatient, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			waited := make(chan error, 1)
			go func() { waited <- n.DropCheckpoint(impatient, ask.Checkpoint) }()
			eventually.True(t, "it is being dropped", func() bool { return n.checkpoints.RowOf(ask.Checkpoint.UID).Stage == checkpoint.Dropping })
			giveUp()
			if err := <-waited; !errors.Is(err, errs.ErrUnavailable) {
				t.Errorf("drop: %v", err)
			}
			if _, err := n.Ensure(t.Context(), forkOf(s, ask)); !errors.Is(err, errs.ErrUnavailable) {
				t.Errorf("another sandbox: %v", err)
			}
			if _, err := n.Captured(t.Context(), ask.Checkpoint); !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("what is being dropped: %v", err)
			}
			dropped := make(chan error, 1)
			go func() { dropped <- n.DropCheckpoint(t.Context(), ask.Checkpoint) }()
			release()
			must(t, <-made)
			must(t, <-dropped)
			noCheckpointOf(t, n, ask.Checkpoint)
			at.as(fork).continues(n)
			must(t, n.Remove(t.Context(), refOf(fork)))
			noCheckpoint(t, n)
			clean(t, n)
		})
	}
}

// noCheckpointOf fails if there is anything of a checkpoint but files that a sandbox still lies on.
func noCheckpointOf(t testing.TB, n *Node, ref sandbox.CheckpointRef) {
	t.Helper()
	if n.checkpoints.RowOf(ref.UID) != nil {
		t.Error("its row is there")
	}
	if _, err := os.Stat(n.checkpoints.Dir(ref.UID)); !os.IsNotExist(err) {
		t.Errorf("its directory: %v", err)
	}
}

// Wherever the process dies while a sandbox is made from a checkpoint, the next one makes it as if
// nothing had been begun; and a failure of any step leaves nothing.
func TestDeathAndFailureAfterEachRestoreStep(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object(counts)
	ensure(t, n, s)
	p := startProgram(t, n, s)
	ask := checkpointOf(s)
	capture1(t, n, ask)
	stop()
	at := *p
	for _, name := range operation.StepNames() {
		t.Run(name, func(t *testing.T) {
			sampled(t)
			p.t = t
			n, stop := m.node(breakAfter(name, operation.ErrCrash))
			f := forkOf(s, ask)
			if _, err := n.Ensure(t.Context(), f); !errors.Is(err, operation.ErrCrash) {
				t.Fatalf("error %v, want the crash", err)
			}
			stop()
			n, stop = m.node(breakAfter(name, errBroken))
			clean(t, n)
			if _, err := n.Ensure(t.Context(), f); !errors.Is(err, errBroken) {
				t.Errorf("error %v, want the broken step's", err)
			}
			clean(t, n)
			stop()
			n, stop = m.node()
			defer stop()
			ensure(t, n, f)
			q := at.as(f)
			q.t = t
			q.continues(n)
			must(t, n.Remove(t.Context(), refOf(f)))
		})
	}
}

// What is made of memory has the agent that is in it, not the server's.
func TestRestoreWithTheAgentOfThen(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object()
	ensure(t, n, s)
	p := startProgram(t, n, s)
	ask := checkpointOf(s)
	capture1(t, n, ask)
	at := *p
	stop()
	newer := filepath.Join(t.TempDir(), "agent")
	program, err := os.ReadFile(m.cfg.AgentBinary)
	must(t, err)
	must(t, os.WriteFile(newer, append(program, "newer"...), 0o755))
	n, _ = m.node(func(c *Config) { c.AgentBinary = newer })
	for _, c := range []struct {
		ask  sandbox.Capture
		same bool
	}{{ask, true}, {filesOnly(ask), false}} {
		f := forkOf(s, c.ask)
		ensure(t, n, f)
		if c.same {
			at.as(f).continues(n)
		}
		agentOf := func(s *agents.Sandbox) os.FileInfo {
			info, err := os.Stat(filepath.Join(n.host.Dir(string(n.handles.Lookup(s.UID).ID)), "agent", "agent"))
			must(t, err)
			return info
		}
		if os.SameFile(agentOf(f), agentOf(s)) != c.same {
			t.Errorf("files only %t: it has the source's agent: %t", c.ask.FilesOnly, !c.same)
		}
	}
}

func TestTwentyForksAtOnce(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(func(c *Config) { c.StartTimeout = 5 * time.Minute }) // all wait for each other
	s := object()
	ensure(t, n, s)
	// It does little, for there will be many of it.
	pid, _ := run(t, n, s, `(exec > /dev/null; i=0; while true; do i=$((i+1)); [ -e /root/ask ] && busybox mv /root/ask /root/was && echo $i > /root/new && busybox mv /root/new /root/answer; sleep 0.5; done) & echo $!`)
	p := &program{t: t, s: s, pid: strings.TrimSpace(pid)}
	p.started = p.startOf(n)
	counted := func(s *agents.Sandbox) (count int) {
		out, _ := run(t, n, s, "busybox rm -f /root/answer; touch /root/ask; until [ -e /root/answer ]; do sleep 0.1; done; cat /root/answer")
		if _, err := fmt.Sscan(out, &count); err != nil {
			t.Errorf("it answers %q", out)
		}
		return count
	}
	before := counted(s)
	ask := checkpointOf(s)
	capture1(t, n, ask)
	var forks [20]*agents.Sandbox
	var making sync.WaitGroup
	for i := range forks {
		forks[i] = forkOf(s, ask)
		making.Go(func() {
			if _, err := n.Ensure(t.Context(), forks[i]); err != nil {
				t.Errorf("fork %d: %v", i, err)
			}
		})
	}
	making.Wait()
	seen := map[string]bool{}
	for _, f := range forks {
		if now, started := counted(f), p.as(f).startOf(n); now < before || started != p.started {
			t.Errorf("it has counted to %d and began at %s; the source was at %d and began at %s", now, started, before, p.started)
		}
		boot, _ := run(t, n, f, "cat /proc/sys/kernel/random/boot_id")
		for _, own := range []string{boot, n.handles.Lookup(f.UID).Observed().Address.String()} {
			if seen[own] {
				t.Errorf("%q is of two", own)
			}
			seen[own] = true
		}
	}
	counted(s)
	must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
	for _, f := range forks {
		must(t, n.Remove(t.Context(), refOf(f)))
	}
	noCheckpoint(t, n)
	clean(t, n)
}

// A sandbox that was restored is restarted by its policy from its own files, without the checkpoint, and
// slept and woken like any other.
func TestRestoredIsRestarted(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(atOnce)
	s := object(func(s *agents.Sandbox) {
		pod(s).RestartPolicy = corev1.RestartPolicyAlways
		container(s).Command = []string{"/bin/sh", "-c", "echo started >> /root/starts; while [ ! -e /root/end ]; do sleep 0.02; done; busybox rm /root/end; exit 1"}
		container(s).Env = []corev1.EnvVar{{Name: "PATH", Value: "/bin"}}
	})
	ensure(t, n, s)
	eventually.True(t, "its program has begun", func() bool {
		out, _ := run(t, n, s, "cat /root/starts")
		return out == "started\n"
	})
	ask := checkpointOf(s)
	capture1(t, n, ask)
	f := forkOf(s, ask)
	first := ensure(t, n, f)
	must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
	stop()
	n, _ = m.node(atOnce)
	provoke(t, n, f, "echo mine > /root/mine; touch /root/end")
	eventually.True(t, "it was restarted", func() bool {
		seen, _ := n.Observe(t.Context(), refOf(f))
		return seen.State == sandbox.ContainerRunning && seen.StartedAt.After(first.StartedAt) && seen.Message == ""
	})
	eventually.True(t, "its program has begun again", func() bool {
		out, _ := run(t, n, f, "cat /root/starts /root/mine; hostname; grep -c $(hostname) /etc/hosts")
		return out == "started\nstarted\nmine\n"+f.Name+"\n1\n"
	})
	suspendMemory(t, n, f)
	awaitStored(t, n, f)
	resume(t, n, f)
	if out, _ := run(t, n, f, "cat /root/mine"); out != "mine\n" {
		t.Errorf("it has %q", out)
	}
	if out, _ := run(t, n, s, "cat /root/starts; ls /root/mine"); !strings.HasPrefix(out, "started\nls:") {
		t.Errorf("the source has %q", out)
	}
}

func TestWarmUp(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(atOnce)
	warm := func(seconds int32, command ...string) func(*agents.Sandbox) {
		return func(s *agents.Sandbox) {
			s.Spec.Barchan = &agents.BarchanSpec{WarmUp: &agents.WarmUp{Command: command, TimeoutSeconds: seconds}}
			pod(s).RestartPolicy = corev1.RestartPolicyAlways
		}
	}
	const once = `id -un; id -un > /tmp/who; echo x >> /tmp/runs; (exec > /dev/null 2>&1; sleep 1000 &); until busybox pidof sleep > /dev/null; do :; done`
	s := object(warm(0, "/bin/sh", "-c", once))
	ensure(t, n, s)
	look := func(n *Node, s *agents.Sandbox) string {
		out, _ := run(t, n, s, "cat /tmp/who /tmp/runs; busybox pidof sleep > /dev/null && echo runs")
		return out
	}
	if out := look(n, s); out != "user\nx\nruns\n" || !n.handles.Lookup(s.UID).Row().Warmed {
		t.Errorf("after the start: %q", out)
	}
	ask := checkpointOf(s)
	capture1(t, n, ask)
	for _, c := range []struct {
		ask  sandbox.Capture
		want string
	}{{ask, "user\nx\nruns\n"}, {filesOnly(ask), "user\nx\nx\nruns\n"}} {
		f := forkOf(s, c.ask, warm(0, "/bin/sh", "-c", once))
		ensure(t, n, f)
		if out := look(n, f); out != c.want {
			t.Errorf("files only %t: %q, want %q", c.ask.FilesOnly, out, c.want)
		}
	}
	// A container that is replaced is not the sandbox's first.
	first := n.handles.Lookup(s.UID).Observed()
	must(t, n.handles.Lookup(s.UID).Row().Process.Signal(9))
	eventually.True(t, "it was restarted", func() bool {
		seen, _ := n.Observe(t.Context(), refOf(s))
		return seen.State == sandbox.ContainerRunning && seen.StartedAt.After(first.StartedAt) && seen.Message == ""
	})
	if out := look(n, s); out != "user\nx\n" {
		t.Errorf("after a restart: %q", out)
	}
	for name, c := range map[string]struct {
		change func(*agents.Sandbox)
		want   string
	}{
		"fails":        {warm(0, "/bin/sh", "-c", "echo because; exit 7"), "code 7: \"because\\n\""},
		"is not there": {warm(0, "/bin/nothing"), "spec.barchan.warmUp.command"},
		"hangs":        {warm(1, "/bin/sh", "-c", "echo still here; sleep 1000"), "did not end within 1s"},
	} {
		s := object(c.change)
		_, err := n.Ensure(t.Context(), s)
		if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("one that %s: %v, want one with %q", name, err, c.want)
		}
		if n.handles.Lookup(s.UID) != nil {
			t.Errorf("one that %s is there", name)
		}
	}
	clean(t, n)
	stop()
}
