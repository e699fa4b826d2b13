package node

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// counter adds a container to one of [counts]. Its program counts in memory alone; one of its volumes is its own.
func counter(s *agents.Sandbox) {
	pod(s).Volumes = append(pod(s).Volumes, corev1.Volume{Name: "work", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}})
	pod(s).Containers = append(pod(s).Containers, corev1.Container{
		Name: "counter", Image: testImage, SecurityContext: &corev1.SecurityContext{RunAsUser: new(int64)}, Env: []corev1.EnvVar{{Name: "PATH", Value: "/bin"}},
		Command: []string{"/bin/sh", "-c", `n=0
			while true; do
				n=$((n+1))
				if [ -e /ask ]; then busybox rm /ask; echo $n > /new; busybox mv /new /answer; fi
				sleep 0.1
			done`},
		VolumeMounts: []corev1.VolumeMount{{Name: "work", MountPath: "/work"}, {Name: "disk", MountPath: "/shared"}, {Name: "mem", MountPath: "/mem"}},
	})
}

// counted is the count of the program of the other container.
func counted(t testing.TB, n *Node, s *agents.Sandbox) int {
	t.Helper()
	out := inSidecar(t, n, s, "counter", "touch /ask; until [ -e /answer ]; do sleep 0.01; done; cat /answer; busybox rm /answer")
	count, err := strconv.Atoi(strings.TrimSpace(out))
	must(t, err)
	return count
}

// A sandbox of two containers is captured in any state and continues, and others are made of it: files, memory and programs of
// both are those of the source, under an identity of their own.
func TestSeveralCaptureAndFork(t *testing.T) {
	t.Parallel()
	for name, states := range map[string][]string{"clear": {"live", "frozen"}, "encrypted": {"stored"}} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			t.Cleanup(func() { must(t, disk.DiscardBelow(m.cfg.DataDir)) })
			set := func(c *Config) { c.EncryptMemory = name == "encrypted" }
			n, stop := m.node(set)
			s := object(counts, counter)
			ensure(t, n, s)
			p := startProgram(t, n, s)
			run(t, n, s, "for v in data disk mem; do echo in $v > /$v/f; done; echo kept > /root/kept")
			inSidecar(t, n, s, "counter", "echo beside > /only; echo work > /work/f; echo 1 > /etc/machine-id")
			eventually.True(t, "its program has ended", func() bool { return n.handles.Lookup(s.UID).Observed().EntrypointExit != nil })
			for _, state := range states {
				if state != "live" {
					suspendMemory(t, n, s)
				}
				if state == "stored" {
					stop()
					n, stop = m.node(set, atOnce)
					awaitStored(t, n, s)
				}
				ask := checkpointOf(s)
				isWhole(t, n, ask)
				if state != "live" {
					resume(t, n, s)
				}
				at, count := *p, counted(t, n, s)
				p.continues(n)
				stop()
				n, stop = m.node(set) // what was captured survives
				fork := severalForkIsLike(t, n, &at, ask, count)
				if state == "live" {
					severalForkOfFork(t, n, fork)
				}
				must(t, n.Remove(t.Context(), refOf(fork.s)))
				p.continues(n)
				if counted(t, n, s) <= count {
					t.Errorf("%s: the source's count went back", state)
				}
				clean(t, n)
				must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
				noCheckpoint(t, n)
			}
			must(t, n.Remove(t.Context(), refOf(s)))
			clean(t, n)
		})
	}
}

// severalForkIsLike is forkIsLike for a sandbox with a [counter], whose count at the capture was below one.
func severalForkIsLike(t *testing.T, n *Node, at *program, ask sandbox.Capture, below int) *program {
	t.Helper()
	f := forkOf(at.s, ask)
	ensure(t, n, f)
	fork := at.as(f)
	fork.continues(n)
	want := n.handles.Lookup(at.s.UID).Row()
	if c := sidecarOf(n, f, "counter"); c.Image != want.Sidecars["counter"].Digest || c.RestartCount != 0 {
		t.Errorf("its container is %+v", c)
	}
	if got := counted(t, n, f); got < 2 || got > below+100 {
		t.Errorf("its count is %d, the source's was below %d", got, below)
	}
	out := inSidecar(t, n, f, "counter", "cat /only /work/f /shared/f /mem/f; hostname; cat /etc/hostname; grep -c $(hostname) /etc/hosts; ls /root/kept 2>&1 || true")
	if want := "beside\nwork\nin disk\nin mem\n" + f.Name + "\n" + f.Name + "\n1\nls: /root/kept: No such file or directory\n"; out != want {
		t.Errorf("it has %q, want %q", out, want)
	}
	if id := inSidecar(t, n, f, "counter", "cat /etc/machine-id"); id == "1\n" {
		t.Error("it has the machine ID of the source")
	}
	if out, _ := run(t, n, f, "cat /data/f /disk/f /mem/f /root/kept; hostname; ls /only 2>&1"); out != "in data\nin disk\nin mem\nkept\n"+f.Name+"\nls: /only: No such file or directory\n" {
		t.Errorf("the first container has %q", out)
	}
	inSidecar(t, n, f, "counter", "echo fork > /only; echo fork > /work/f; echo fork > /mem/f")
	if out := inSidecar(t, n, at.s, "counter", "cat /only /work/f /mem/f"); out != "beside\nwork\nin mem\n" {
		t.Errorf("the source has %q", out)
	}
	return fork
}

// severalForkOfFork makes a sandbox from a checkpoint of one that severalForkIsLike has made.
func severalForkOfFork(t *testing.T, n *Node, at *program) {
	t.Helper()
	again := checkpointOf(at.s)
	at.continues(n)
	capture1(t, n, again)
	g := forkOf(at.s, again)
	ensure(t, n, g)
	if out := inSidecar(t, n, g, "counter", "cat /only /work/f /mem/f"); out != "fork\nfork\nfork\n" {
		t.Errorf("a fork of it has %q", out)
	}
	at.as(g).continues(n)
	suspendMemory(t, n, g)
	resume(t, n, g)
	counted(t, n, g)
	must(t, n.Remove(t.Context(), refOf(g)))
	must(t, n.DropCheckpoint(t.Context(), again.Checkpoint))
}

// A container may have the name of another with the suffix of what is incomplete.
func alike(s *agents.Sandbox) {
	pod(s).Containers = append(pod(s).Containers, corev1.Container{Name: "counter-part", Image: testImage, Command: []string{"/bin/sh", "-c", "while true; do sleep 1000; done"}})
}

// Without memory, all containers start again from their files.
func TestSeveralCaptureFilesOnly(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	scratch := func(s *agents.Sandbox) { // is left out
		s.Spec.PodTemplate.ObjectMeta.Annotations = map[string]string{agents.AnnotationTransientVolumes: "work"}
	}
	s := object(counts, counter, alike, scratch)
	ensure(t, n, s)
	run(t, n, s, "echo 1 > /data/f; echo 2 > /disk/f; echo 3 > /mem/f; echo 4 > /root/f")
	inSidecar(t, n, s, "counter", "echo 5 > /only; echo 6 > /work/f; busybox rm /etc/group")
	for _, frozen := range []bool{false, true} {
		if frozen {
			suspendMemory(t, n, s)
		}
		ask := filesOnly(checkpointOf(s))
		capture1(t, n, ask)
		f := forkOf(s, ask)
		ensure(t, n, f)
		if out, _ := run(t, n, f, "cat /data/f /disk/f /root/f"); out != "1\n2\n4\n" {
			t.Errorf("the first container has %q", out)
		}
		out := inSidecar(t, n, f, "counter", "cat /only /shared/f; ls /mem /work /etc/group 2>&1 || true; cat /etc/hostname")
		if want := "5\n2\nls: /etc/group: No such file or directory\n/mem:\n\n/work:\n" + f.Name + "\n"; out != want {
			t.Errorf("the other has %q, want %q", out, want)
		}
		if got := counted(t, n, f); got > 1000 {
			t.Errorf("its count is %d", got)
		}
		must(t, n.Remove(t.Context(), refOf(f)))
		must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
	}
	noCheckpoint(t, n)
	must(t, n.Remove(t.Context(), refOf(s)))
	clean(t, n)
}

// Damaged data and another Pod are refused by name, and leave nothing.
func TestSeveralRestoreRefusals(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object(counts, counter)
	ensure(t, n, s)
	ask := checkpointOf(s)
	capture1(t, n, ask)
	refused := func(f *agents.Sandbox, want string) {
		t.Helper()
		if _, err := n.Ensure(t.Context(), f); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want one with %q", err, want)
		}
		clean(t, n)
	}
	fewer := forkOf(s, ask)
	pod(fewer).Containers = pod(fewer).Containers[:1]
	refused(fewer, "containers: 1, the checkpoint has 2")
	tagged := forkOf(s, ask)
	pod(tagged).Containers[1].Image = "barchan.local/none:latest"
	refused(tagged, "container counter: ")

	uid := ask.Checkpoint.UID
	pages := filepath.Join(n.checkpoints.MemoryDir(uid), "pages.img")
	flip := func(b []byte) []byte { b[len(b)/2] ^= 1; return b }
	must(t, change(pages, flip))
	refused(forkOf(s, ask), "the memory of the checkpoint is damaged")
	must(t, change(pages, flip))
	ensure(t, n, forkOf(s, ask))

	other := checkpoint.Snapshot(uid, "counter")
	must(t, n.cfg.Containerd.RemoveCommitted(t.Context(), other))
	if _, incomplete, err := n.checkpoints.Orphans(t.Context()); err != nil || len(incomplete) != 1 {
		t.Errorf("incomplete: %v, %v", incomplete, err)
	}
	if _, err := n.Ensure(t.Context(), forkOf(s, ask)); !errors.Is(err, errs.ErrNotFound) || !strings.Contains(err.Error(), "container counter: spec.barchan.restore: files of the checkpoint are missing") {
		t.Errorf("without the files of one container: %v", err)
	}
	must(t, n.DropCheckpoint(t.Context(), ask.Checkpoint))
	noCheckpoint(t, n)

	// Files of a container whose row is lost are removed at the start.
	lost := checkpoint.Snapshot("lost", "counter")
	id := string(sandbox.IDOf(s.UID))
	files, err := n.cfg.Containerd.BeginCopy(t.Context(), ctrd.PartKey(id, ctrd.ContainerPart("counter")), "", lost)
	must(t, err)
	_, err = files.Commit(t.Context())
	must(t, errors.Join(err, files.Close(t.Context())))
	if orphans, _, err := n.checkpoints.Orphans(t.Context()); err != nil || len(orphans["lost"]) != 1 {
		t.Errorf("orphans: %v, %v", orphans, err)
	}
	stop()
	n, _ = m.node()
	noCheckpoint(t, n)
}

// A Pod of several containers that is not made as the checkpointed one is refused with the field's name.
func TestSeveralOriginFits(t *testing.T) {
	defaults := plan.Defaults{Class: oci.GVisor, Offers: func(oci.Class) bool { return true }}
	base := func() *agents.Sandbox { return object(counts, counter) }
	was, err := plan.New(base(), defaults)
	must(t, err)
	second := func(s *agents.Sandbox) *corev1.Container { return &pod(s).Containers[1] }
	for name, c := range map[string]struct {
		change func(*agents.Sandbox)
		names  string // empty: it fits
		files  bool   // it matters without memory too
	}{
		"the same":   {func(*agents.Sandbox) {}, "", false},
		"other env":  {func(s *agents.Sandbox) { second(s).Env[0].Value = "x" }, "", false},
		"name":       {func(s *agents.Sandbox) { second(s).Name = "web" }, "containers[1].name", true},
		"first name": {func(s *agents.Sandbox) { container(s).Name = "web" }, "containers[0].name", true},
		"one more": {func(s *agents.Sandbox) {
			pod(s).Containers = append(pod(s).Containers, corev1.Container{Name: "x", Image: "x"})
		}, "spec.containers: 3", true},
		"command":     {func(s *agents.Sandbox) { second(s).Command[0] = "/bin/ash" }, "containers[1].command", false},
		"volume less": {func(s *agents.Sandbox) { second(s).VolumeMounts = second(s).VolumeMounts[1:] }, "containers[1].volumeMounts[0]", true},
		"memory": {func(s *agents.Sandbox) {
			second(s).Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")}
		}, "resources.limits.memory", false},
		"restarts": {func(s *agents.Sandbox) { pod(s).RestartPolicy = corev1.RestartPolicyNever }, "spec.restartPolicy", false},
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
	if got := fmt.Sprint(was.DataPaths()); got != "[claims/data scratch/disk scratch/work]" {
		t.Errorf("data: %s", got)
	}
}
