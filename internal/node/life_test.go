package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/recovery"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// patience is how long a probe may take, in seconds: a machine that stands still fails none.
const patience = int32(eventually.Patience / time.Second)

func pod(s *agents.Sandbox) *corev1.PodSpec { return &s.Spec.PodTemplate.Spec }

func container(s *agents.Sandbox) *corev1.Container { return &pod(s).Containers[0] }

func TestPauseAndResumeAcrossNodes(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	var all []*agents.Sandbox
	for _, c := range []string{"gvisor", "runc"} {
		s := object(class(c))
		all = append(all, s)
		before := ensure(t, n, s)
		run(t, n, s, "echo kept > /root/kept; (while true; do date +%s%N > /tmp/alive; sleep 0.02; done) > /dev/null 2>&1 &")
		paused, err := n.Suspend(t.Context(), refOf(s), agents.SuspendMemory)
		if err != nil || paused.State != sandbox.ContainerPaused || paused.Address != before.Address {
			t.Fatalf("suspend: %+v, %v", paused, err)
		}
		if again, err := n.Suspend(t.Context(), refOf(s), agents.SuspendMemory); err != nil || again != paused {
			t.Errorf("suspend again: %+v, %v", again, err)
		}
		if seen := ensure(t, n, s); seen.State != sandbox.ContainerPaused {
			t.Errorf("ensure woke it: %+v", seen)
		}
		if _, err := n.Agent(t.Context(), refOf(s)); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("agent of a sleeping sandbox: %v", err)
		}
	}
	stop()
	n, _ = m.node()
	for _, s := range all {
		wakesAndGoesOn(t, n, s)
	}
}

func wakesAndGoesOn(t *testing.T, n *Node, s *agents.Sandbox) {
	t.Helper()
	if seen, err := n.Observe(t.Context(), refOf(s)); err != nil || seen.State != sandbox.ContainerPaused {
		t.Errorf("after a restart of the node: %+v, %v", seen, err)
	}
	seen, err := n.Resume(t.Context(), refOf(s), false)
	if err != nil || seen.State != sandbox.ContainerRunning {
		t.Fatalf("resume: %+v, %v", seen, err)
	}
	if *pod(s).RuntimeClassName == "gvisor" { // runc keeps files only
		first, _ := run(t, n, s, "cat /tmp/alive")
		eventually.True(t, "its processes continue", func() bool {
			now, _ := run(t, n, s, "cat /tmp/alive")
			return now != first && now != ""
		})
	}
	if out, _ := run(t, n, s, "cat /root/kept"); out != "kept\n" {
		t.Errorf("its file has %q", out)
	}
	if _, err := n.Suspend(t.Context(), refOf(s), agents.SuspendMemory); err != nil {
		t.Fatal(err)
	}
	must(t, n.Remove(t.Context(), refOf(s)))
}

func TestAdoptionAfterARestart(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s, dies := object(), object(class("runc"))
	before := ensure(t, n, s)
	ensure(t, n, dies)
	run(t, n, s, "echo kept > /root/file")
	victim := n.handles.Lookup(dies.UID).Row().Process
	stop()
	must(t, victim.Signal(9))
	must(t, victim.Wait(t.Context()))
	n, stop = m.node()
	after := ensure(t, n, s)
	if after.State != sandbox.ContainerRunning || after.Address != before.Address || !after.StartedAt.Equal(before.StartedAt) || !after.Probed {
		t.Errorf("before %+v, after %+v", before, after)
	}
	if out, _ := run(t, n, s, "cat /root/file"); out != "kept\n" {
		t.Errorf("file has %q", out)
	}
	seen, err := n.Observe(t.Context(), refOf(dies))
	if err != nil || seen.State != sandbox.ContainerExited || seen.Message == "" {
		t.Errorf("what died meanwhile: %+v, %v", seen, err)
	}
	// Its end stays known.
	stop()
	n, _ = m.node()
	if seen, err := n.Observe(t.Context(), refOf(dies)); err != nil || seen.State != sandbox.ContainerExited {
		t.Errorf("what died before: %+v, %v", seen, err)
	}
	if seen := ensure(t, n, dies); seen.State != sandbox.ContainerExited {
		t.Errorf("ensure of what died: %+v", seen)
	}
	other := ensure(t, n, object())
	if other.Address == before.Address || other.Address == seen.Address {
		t.Errorf("address %s given twice", other.Address)
	}
}

func TestSandboxesCannotReachEachOtherOrTheHost(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "0.0.0.0:0")
	must(t, err)
	defer func() { _ = l.Close() }()
	port := l.Addr().(*net.TCPAddr).Port
	for _, c := range []string{"gvisor", "runc"} {
		a, b := object(class(c)), object(class(c))
		ensure(t, n, a)
		other := ensure(t, n, b)
		run(t, n, b, "mkdir /www; echo hi > /www/x; httpd -p 8000 -h /www")
		if out, code := run(t, n, b, "wget -q -O - http://127.0.0.1:8000/x"); code != 0 || out != "hi\n" {
			t.Fatalf("%s: server does not serve: %d %q", c, code, out)
		}
		conn, err := (&net.Dialer{Timeout: eventually.Patience}).DialContext(t.Context(), "tcp", other.Address.String()+":8000")
		if err != nil {
			t.Fatalf("%s: the host cannot reach a sandbox: %v", c, err)
		}
		_ = conn.Close()
		for name, address := range map[string]string{
			"another sandbox": other.Address.String() + " 8000", "the gateway": fmt.Sprintf("%s %d", n.network.Gateway(), port),
			"the metadata address": "169.254.169.254 80",
		} {
			if out, code := run(t, n, a, "nc -w 1 "+address+" < /dev/null"); code == 0 {
				t.Errorf("%s: a sandbox reaches %s: %q", c, name, out)
			}
		}
	}
}

func TestLimitsUsersAndEnvironment(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	for _, c := range []string{"gvisor", "runc"} {
		s := object(class(c), func(s *agents.Sandbox) {
			pod(s).Hostname = "desk"
			uid := int64(1000)
			container(s).SecurityContext = &corev1.SecurityContext{RunAsUser: &uid}
			container(s).Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("1500m"), "memory": resource.MustParse("300Mi")}
			container(s).Env = []corev1.EnvVar{
				{Name: "A", Value: "one"},
				{Name: "B", Value: "$(A)-$(NONE)-$$(A)"},
				{Name: "IP", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.podIP"}}},
			}
			container(s).WorkingDir = "/home/user/made"
			container(s).Command = []string{"/bin/sh", "-c", "id -u > out; pwd >> out; env >> out; sleep 1000"}
		})
		seen := ensure(t, n, s)
		var out string
		eventually.True(t, "the entrypoint writes", func() bool {
			out, _ = run(t, n, s, "cat /home/user/made/out")
			return strings.Contains(out, "IP=")
		})
		for _, want := range []string{"1000\n", "/home/user/made\n", "A=one\n", "B=one-$(NONE)-$(A)\n", "IP=" + seen.Address.String() + "\n", "FROM_IMAGE=yes\n"} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: entrypoint's output lacks %q: %q", c, want, out)
			}
		}
		if host, _ := run(t, n, s, "hostname"); host != "desk\n" {
			t.Errorf("%s: hostname %q", c, host)
		}
		if c == "gvisor" {
			if mem, _ := run(t, n, s, "head -1 /proc/meminfo"); !strings.Contains(mem, "307200 kB") {
				t.Errorf("memory seen inside: %q", mem)
			}
		}
		accounted(t, n, s)
		if mode, _ := run(t, n, s, "stat -c %a /dev/shm /tmp"); mode != "1777\n1777\n" {
			t.Errorf("%s: shared memory and /tmp have modes %q", c, mode)
		}
		if out, code := run(t, n, s, "touch /.barchan/x"); code == 0 {
			t.Errorf("%s: the agent's directory can be written: %q", c, out)
		}
	}
}

// accounted checks the stats of a sandbox of 1.5 processors and 300 MiB.
func accounted(t *testing.T, n *Node, s *agents.Sandbox) {
	t.Helper()
	if used := usageOf(t, n, s); used.CPU == 0 || used.Memory == 0 || used.Pids == 0 {
		t.Errorf("usage %+v", used)
	}
	if l := n.handles.Lookup(s.UID).Row().Plan.Limits; l.Memory != 300<<20 || l.MilliCPU != 1500 {
		t.Errorf("limits %+v", l)
	}
	diskUsed(t, n, s)
	if stats, err := n.Stats(t.Context(), refOf(s)); err != nil || stats.MemTotal == 0 {
		t.Errorf("stats %+v, %v", stats, err)
	}
	if _, err := n.Logs(t.Context(), refOf(s), time.Time{}); err != nil {
		t.Errorf("logs: %v", err)
	}
}

// Where the node cannot take the limit over, the kernel ends the whole sandbox.
func TestMemoryHogDiesAlone(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	s := object(class("gvisor"), func(s *agents.Sandbox) {
		container(s).Resources.Limits = corev1.ResourceList{"memory": resource.MustParse("128Mi")}
	})
	ensure(t, n, s)
	if _, err := os.Stat("/sys/fs/cgroup/memory/memory.oom_control"); err != nil {
		_, _, _ = tryRun(t.Context(), n, s, "head -c 2000000000 /dev/zero | tail -n 1")
		eventually.True(t, "it is killed", func() bool {
			seen, err := n.Observe(t.Context(), refOf(s))
			return err == nil && seen.State == sandbox.ContainerExited && strings.Contains(seen.Message, "out of memory")
		})
		return
	}
	for i := range 3 {
		if out, code, err := tryRun(t.Context(), n, s, "head -c 2000000000 /dev/zero | tail -n 1"); err != nil || code == 0 {
			t.Errorf("hog: code %d, %q, %v", code, out, err)
		}
		if out, code, err := tryRun(t.Context(), n, s, "echo alive"); err != nil || code != 0 || out != "alive\n" {
			t.Fatalf("after %d of them: code %d, %q, %v", i+1, code, out, err)
		}
	}
	if killed := testutil.ToFloat64(n.oomKills); killed < 3 {
		t.Errorf("%g kills were counted", killed)
	}
	bombs(t, n, s)
}

// bombs has a shell start children with 8 MiB each, faster than one after another is killed. They are what ends, with the shell.
func bombs(t *testing.T, n *Node, s *agents.Sandbox) {
	t.Helper()
	const bomb = `x=$(head -c 4000000 /dev/zero | tr '\0' x); while :; do (x=$x$x; sleep 100) & done`
	for i := range 2 {
		if out, code, err := tryRun(t.Context(), n, s, bomb); err == nil && code == 0 {
			t.Errorf("bomb: code %d, %q", code, out)
		}
		if out, code, err := tryRun(t.Context(), n, s, "echo alive"); err != nil || code != 0 || out != "alive\n" {
			t.Fatalf("after %d bombs: code %d, %q, %v", i+1, code, out, err)
		}
	}
}

// changed waits for word of a sandbox.
func changed(t *testing.T, n *Node, ref sandbox.Ref) {
	t.Helper()
	deadline := time.After(eventually.Patience)
	for {
		select {
		case got := <-n.Changes():
			if got == ref {
				return
			}
		case <-deadline:
			t.Fatal("no word of a change")
		}
	}
}

func TestEndIsReported(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	for _, c := range []string{"gvisor", "runc"} {
		s := object(class(c))
		ensure(t, n, s)
		must(t, n.handles.Lookup(s.UID).Row().Process.Signal(9))
		for seen := (sandbox.Observed{}); seen.State != sandbox.ContainerExited; { // other changes may come before
			changed(t, n, refOf(s))
			var err error
			seen, err = n.Observe(t.Context(), refOf(s))
			must(t, err)
		}
		if _, err := n.Resume(t.Context(), refOf(s), false); !errors.Is(err, errs.ErrConflict) {
			t.Errorf("%s: resume of the dead: %v", c, err)
		}
	}
}

func TestRestartPolicies(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	program := func(command string, policy corev1.RestartPolicy) *agents.Sandbox {
		return object(func(s *agents.Sandbox) {
			container(s).Command = []string{"/bin/sh", "-c", command}
			pod(s).RestartPolicy = policy
		})
	}
	t.Run("unset lives on", func(t *testing.T) {
		s := program("exit 3", "")
		ensure(t, n, s)
		eventually.True(t, "its exit is seen", func() bool {
			seen, _ := n.Observe(t.Context(), refOf(s))
			return seen.EntrypointExit != nil && *seen.EntrypointExit == 3 && seen.State == sandbox.ContainerRunning
		})
	})
	t.Run("Never ends", func(t *testing.T) {
		s := program("exit 4", corev1.RestartPolicyNever)
		ensure(t, n, s)
		eventually.True(t, "its end is seen", func() bool {
			seen, _ := n.Observe(t.Context(), refOf(s))
			return seen.State == sandbox.ContainerExited && seen.EntrypointExit != nil && *seen.EntrypointExit == 4
		})
	})
	t.Run("OnFailure restarts until success", func(t *testing.T) {
		s := program("echo x >> /root/runs; [ $(cat /root/runs | grep -c x) = 2 ]", corev1.RestartPolicyOnFailure)
		first := ensure(t, n, s)
		eventually.True(t, "its success is seen", func() bool {
			seen, _ := n.Observe(t.Context(), refOf(s))
			return seen.State == sandbox.ContainerExited && seen.EntrypointExit != nil && *seen.EntrypointExit == 0 && seen.Address == first.Address
		})
	})
	t.Run("Always keeps files and address", func(t *testing.T) {
		s := program("echo x >> /root/runs; [ $(cat /root/runs | grep -c x) = 1 ] || sleep 1000", corev1.RestartPolicyAlways)
		first := ensure(t, n, s)
		eventually.True(t, "it runs again", func() bool {
			out, _, err := tryRun(t.Context(), n, s, "cat /root/runs")
			seen, _ := n.Observe(t.Context(), refOf(s))
			return err == nil && out == "x\nx\n" && seen.Address == first.Address && seen.StartedAt.After(first.StartedAt)
		})
	})
}

func TestProbes(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	fast := func(h corev1.ProbeHandler) *corev1.Probe {
		return &corev1.Probe{ProbeHandler: h, PeriodSeconds: 1, FailureThreshold: 1, TimeoutSeconds: patience}
	}
	s := object(func(s *agents.Sandbox) {
		container(s).Ports = []corev1.ContainerPort{{Name: "web", ContainerPort: 8000}}
		container(s).StartupProbe = fast(corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/true"}}})
		container(s).ReadinessProbe = fast(corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/x", Port: intstr.FromString("web")}})
	})
	if seen := ensure(t, n, s); seen.Probed {
		t.Error("ready before it was probed")
	}
	probed := func(want bool) func() bool {
		return func() bool {
			seen, err := n.Observe(t.Context(), refOf(s))
			return err == nil && seen.Probed == want && (want == (seen.Message == ""))
		}
	}
	eventually.True(t, "it is seen not ready", probed(false))
	run(t, n, s, "mkdir /www; echo hi > /www/x; httpd -p 8000 -h /www")
	changed(t, n, refOf(s))
	eventually.True(t, "it is ready", probed(true))
	run(t, n, s, "kill $(cat /proc/[0-9]*/stat | grep '(httpd)' | head -1 | while read pid rest; do echo $pid; done)")
	eventually.True(t, "it is not ready any more", probed(false))

	sick := object(func(s *agents.Sandbox) {
		container(s).LivenessProbe = fast(corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/sh", "-c", "[ ! -e /tmp/sick ] || { rm /tmp/sick; false; }"}}})
		container(s).Env = []corev1.EnvVar{{Name: "PATH", Value: "/bin"}}
	})
	first := ensure(t, n, sick)
	provoke(t, n, sick, "touch /tmp/sick")
	eventually.True(t, "it was restarted", func() bool {
		seen, _ := n.Observe(t.Context(), refOf(sick))
		return seen.State == sandbox.ContainerRunning && seen.StartedAt.After(first.StartedAt)
	})
	if seen, err := n.Observe(t.Context(), refOf(sick)); err != nil || seen.Address != first.Address {
		t.Errorf("after the restart: %+v, %v", seen, err)
	}

	hopeless := object(func(s *agents.Sandbox) {
		container(s).StartupProbe = fast(corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(9)}})
		pod(s).RestartPolicy = corev1.RestartPolicyNever
	})
	ensure(t, n, hopeless)
	eventually.True(t, "a failed startup ends it", func() bool {
		seen, _ := n.Observe(t.Context(), refOf(hopeless))
		return seen.State == sandbox.ContainerExited && strings.Contains(seen.Message, "startup")
	})
}

func TestVolumes(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	for _, c := range []string{"gvisor", "runc"} {
		size := resource.MustParse("8Mi")
		s := object(class(c), func(s *agents.Sandbox) {
			s.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{{EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: "data"}}}
			pod(s).Volumes = []corev1.Volume{
				{Name: "disk", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
				{Name: "mem", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: &size}}},
			}
			container(s).VolumeMounts = []corev1.VolumeMount{
				{Name: "data", MountPath: "/data"},
				{Name: "data", MountPath: "/part", SubPath: "a/b"},
				{Name: "disk", MountPath: "/disk"},
				{Name: "disk", MountPath: "/disk-ro", ReadOnly: true},
				{Name: "mem", MountPath: "/mem"},
			}
			pod(s).RestartPolicy = corev1.RestartPolicyAlways
			container(s).Command = []string{"/bin/sh", "-c", "while [ ! -e /data/go ]; do sleep 0.05; done; rm /data/go"}
			container(s).Env = []corev1.EnvVar{{Name: "PATH", Value: "/bin"}}
		})
		first := ensure(t, n, s)
		if out, code := run(t, n, s, "echo one > /part/f && cat /data/a/b/f && echo two > /disk/f && cat /disk-ro/f"); code != 0 || out != "one\ntwo\n" {
			t.Errorf("%s: %d %q", c, code, out)
		}
		if out, code := run(t, n, s, "echo x > /disk-ro/g"); code == 0 {
			t.Errorf("%s: a read-only volume was written: %q", c, out)
		}
		if out, code := run(t, n, s, "dd if=/dev/zero of=/mem/x bs=1M count=20"); code == 0 {
			t.Errorf("%s: a volume of 8 MiB took 20: %q", c, out)
		}
		provoke(t, n, s, "rm /bin/rm 2>/dev/null; busybox rm -f /data/go; echo > /data/go")
		eventually.True(t, "it was restarted", func() bool {
			seen, _ := n.Observe(t.Context(), refOf(s))
			return seen.State == sandbox.ContainerRunning && seen.StartedAt.After(first.StartedAt)
		})
		if out, _ := run(t, n, s, "cat /data/a/b/f"); out != "one\n" {
			t.Errorf("%s: after a restart the claim has %q", c, out)
		}
		must(t, n.Remove(t.Context(), refOf(s)))
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(func(c *Config) { c.Runtimes = c.Runtimes[:1] })
	for name, give := range map[string]struct {
		change func(*agents.Sandbox)
		kind   error
		want   string
	}{
		"second container":  {func(s *agents.Sandbox) { pod(s).Containers = append(pod(s).Containers, corev1.Container{Name: "b"}) }, errs.ErrInvalid, "containers[1]"},
		"class not offered": {class("runc"), errs.ErrInvalid, "runtimeClassName"},
		"unknown volume": {func(s *agents.Sandbox) {
			container(s).VolumeMounts = []corev1.VolumeMount{{Name: "none", MountPath: "/x"}}
		}, errs.ErrInvalid, "volumeMounts[0].name"},
		"bad reference": {func(s *agents.Sandbox) { container(s).Image = "UPPER case" }, errs.ErrInvalid, "UPPER case"},
		"image not here, never pull": {func(s *agents.Sandbox) {
			container(s).Image, container(s).ImagePullPolicy = "none.invalid/x:y", corev1.PullNever
		}, errs.ErrNotFound, "none.invalid/x:y"},
		"root for non-root": {func(s *agents.Sandbox) {
			yes := true
			pod(s).SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: &yes}
		}, errs.ErrInvalid, "runAsNonRoot"},
	} {
		t.Run(name, func(t *testing.T) {
			s := object(give.change)
			_, err := n.Ensure(t.Context(), s)
			if !errors.Is(err, give.kind) || !strings.Contains(err.Error(), give.want) {
				t.Errorf("error %v, want kind %v naming %q", err, give.kind, give.want)
			}
			left, err := n.Audit(t.Context())
			if err != nil || len(left) > 0 {
				t.Errorf("left: %v, %v", left, err)
			}
		})
	}
}

func TestTwentyAtOnce(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	var all [20]*agents.Sandbox
	var making sync.WaitGroup
	for i := range all {
		all[i] = object()
		making.Go(func() {
			for range 2 { // a second caller alternates with the first
				if _, err := n.Ensure(t.Context(), all[i]); err != nil {
					t.Errorf("sandbox %d: %v", i, err)
				}
			}
		})
	}
	making.Wait()
	seen := map[string]bool{}
	list, err := n.List(t.Context())
	must(t, err)
	for _, s := range list {
		seen[s.Observed.Address.String()] = true
	}
	if len(list) != len(all) || len(seen) != len(all) {
		t.Errorf("%d sandboxes with %d addresses, want %d", len(list), len(seen), len(all))
	}
	for _, s := range all {
		making.Go(func() {
			if err := n.Remove(t.Context(), refOf(s)); err != nil {
				t.Errorf("remove: %v", err)
			}
		})
	}
	making.Wait()
	if left, err := n.Audit(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestSweepAsksBeforeItRemoves(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	wanted, unwanted, unsure := object(), object(), object()
	for _, s := range []*agents.Sandbox{wanted, unwanted, unsure} {
		ensure(t, n, s)
	}
	stop()
	n, _ = m.node(func(c *Config) {
		c.Exists = func(_ context.Context, ref sandbox.Ref) (bool, error) {
			if ref == refOf(unsure) {
				return false, errors.New("no answer")
			}
			return ref == refOf(wanted), nil
		}
	})
	for range recovery.ScansBeforeRemoval {
		n.Sweep(t.Context())
	}
	for s, want := range map[*agents.Sandbox]sandbox.ContainerState{
		wanted: sandbox.ContainerRunning, unsure: sandbox.ContainerRunning, unwanted: sandbox.ContainerAbsent,
	} {
		if seen, err := n.Observe(t.Context(), refOf(s)); err != nil || seen.State != want {
			t.Errorf("%+v, %v, want %s", seen, err, want)
		}
	}
}
