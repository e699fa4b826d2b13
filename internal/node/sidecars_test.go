package node

import (
	"context"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// withSidecars adds a web server and a program that fails, and volumes that they share with the first container.
func withSidecars(s *agents.Sandbox) {
	mounts := []corev1.VolumeMount{{Name: "disk", MountPath: "/disk"}, {Name: "mem", MountPath: "/mem"}}
	pod(s).Volumes = []corev1.Volume{
		{Name: "disk", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "mem", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: resource.NewQuantity(1<<20, resource.BinarySI)}}},
	}
	container(s).VolumeMounts = mounts
	pod(s).Containers = append(pod(s).Containers, corev1.Container{
		Name: "web", Image: testImage, Command: []string{"/bin/sh", "-c", "echo web starts; cd /disk; n=0; while true; do echo $n > /mem/beat; n=$((n+1)); sleep 0.1; done & exec httpd -f -p 8080 -h /disk"},
		Env: []corev1.EnvVar{{Name: "PATH", Value: "/bin"}, {Name: "ROLE", Value: "web"}}, VolumeMounts: mounts,
		ReadinessProbe: &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 30, ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/index.html", Port: intstr.FromInt32(8080)}}},
		LivenessProbe:  &corev1.Probe{PeriodSeconds: 1, TimeoutSeconds: 30, FailureThreshold: 1, ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/bin/sh", "-c", "! cat /disk/sick"}}}},
	}, corev1.Container{Name: "fails", Image: testImage, Command: []string{"/bin/sh", "-c", "echo no; exit 7"}})
}

func sidecarOf(n *Node, s *agents.Sandbox, name string) agents.ContainerStatus {
	if all := n.handles.Lookup(s.UID).Observed().Sidecars; all != nil {
		for _, c := range *all {
			if c.Name == name {
				return c
			}
		}
	}
	return agents.ContainerStatus{}
}

func sidecarAgent(t testing.TB, n *Node, s *agents.Sandbox, name string) *envd.Client {
	t.Helper()
	c, err := n.host.SidecarOf(sandbox.IDOf(s.UID), n.handles.Lookup(s.UID).Row().Address, name)
	must(t, err)
	return c
}

// inSidecar runs a shell command in a sidecar.
func inSidecar(t testing.TB, n *Node, s *agents.Sandbox, name, command string) string {
	t.Helper()
	var out strings.Builder
	code, err := sidecarAgent(t, n, s, name).Exec(t.Context(), []string{"/bin/sh", "-c", command}, envd.ExecOptions{Stdout: &out, Stderr: &out})
	if err != nil || code != 0 {
		t.Fatalf("run %q in %s: code %d, %v, output %q", command, name, code, err, out.String())
	}
	return out.String()
}

// TestSidecars: containers of one sandbox share network, volumes and life, and nothing else.
func TestSidecars(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node(atOnce)
	s := object(withSidecars)
	ensure(t, n, s)
	eventually.True(t, "web runs", func() bool { return sidecarOf(n, s, "web").State.Running != nil })
	if web := sidecarOf(n, s, "web"); web.Ready {
		t.Errorf("ready before its probe: %+v", web)
	}
	run(t, n, s, "echo served > /disk/index.html; echo mine > /only")
	eventually.True(t, "web is ready", func() bool { return sidecarOf(n, s, "web").Ready })
	checkSidecars(t, n, s)

	eventually.True(t, "the other one waits for its next start", func() bool {
		c := sidecarOf(n, s, "fails")
		return c.RestartCount >= 2 && c.State.Waiting != nil && c.State.Waiting.Reason == sandbox.ReasonCrashLoop &&
			c.LastState.Terminated != nil && c.LastState.Terminated.ExitCode == 7
	})
	if why, failed := n.handles.Lookup(s.UID).Observed().Sidecars.Unready(); !failed || !strings.Contains(why, "container fails: ") {
		t.Errorf("unready: %v %q", failed, why)
	}
	run(t, n, s, "touch /disk/sick")
	eventually.True(t, "an ill program is started again", func() bool { return sidecarOf(n, s, "web").RestartCount > 0 })
	run(t, n, s, "busybox rm /disk/sick")
	eventually.True(t, "web is ready again", func() bool { return sidecarOf(n, s, "web").Ready })

	was := n.handles.Lookup(s.UID).Row().Process
	stop()
	n, stop = m.node(atOnce)
	eventually.True(t, "it is adopted", func() bool { return sidecarOf(n, s, "web").Ready && sidecarOf(n, s, "fails").RestartCount > 0 })
	if now := n.handles.Lookup(s.UID).Row().Process; now != was {
		t.Errorf("process %v, was %v", now, was)
	}

	for range 2 { // the memory of all containers
		beat := inSidecar(t, n, s, "web", "echo $$")
		count := sidecarOf(n, s, "web").RestartCount
		suspendMemory(t, n, s)
		awaitStored(t, n, s)
		stop()
		n, stop = m.node(atOnce)
		resume(t, n, s)
		eventually.True(t, "web is ready after the resume", func() bool { return sidecarOf(n, s, "web").Ready })
		if now := sidecarOf(n, s, "web").RestartCount; now != count || beat == "" {
			t.Errorf("web has %d starts, had %d", now, count)
		}
		checkSidecars(t, n, s)
	}
	_, err := n.Suspend(t.Context(), refOf(s), agents.SuspendFiles)
	must(t, err)
	resume(t, n, s)
	eventually.True(t, "web is ready after a start from files", func() bool { return sidecarOf(n, s, "web").Ready })
	must(t, n.Remove(t.Context(), refOf(s)))
	if left, err := n.Audit(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func checkSidecars(t *testing.T, n *Node, s *agents.Sandbox) {
	t.Helper()
	if out, code := run(t, n, s, "wget -qO- http://127.0.0.1:8080/index.html"); out != "served\n" {
		t.Errorf("over loopback: %q, code %d", out, code)
	}
	if out, code := run(t, n, s, "cat /mem/beat"); code != 0 {
		t.Errorf("the containers do not share their memory volume: %q", out)
	}
	if out, code := run(t, n, s, "dd if=/dev/zero of=/mem/big bs=64k count=32"); code == 0 || !strings.Contains(out, "No space left") {
		t.Errorf("memory beyond its limit: code %d, %q", code, out)
	}
	run(t, n, s, "busybox rm /mem/big; stat -c %a /mem | busybox grep -q 1777")
	if out, _ := run(t, n, s, "cat /proc/[0-9]*/comm"); !strings.Contains(out, "httpd") { // so that it can end any of them for its memory
		t.Errorf("the first container sees %q", out)
	}
	out := inSidecar(t, n, s, "web", "hostname; echo $ROLE; ls /only 2>&1; id -u; cat /proc/1/cmdline | head -c 40")
	if !strings.HasPrefix(out, s.Name+"\nweb\n") || !strings.Contains(out, "No such file") {
		t.Errorf("in the sidecar: %q", out)
	}
	if log := sidecarAgent(t, n, s, "web").LastOutput(t.Context(), 100); !strings.Contains(log, "web starts") {
		t.Errorf("log: %q", log)
	}
}

// TestSidecarRefusals: what cannot run changes nothing.
func TestSidecarRefusals(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	for name, c := range map[string]struct {
		change func(*agents.Sandbox)
		want   string
	}{
		"class runc": {class("runc"), "containers[1]"},
		"image":      {func(s *agents.Sandbox) { pod(s).Containers[1].Image = "barchan.local/none:latest" }, "container web"},
		"no program": {func(s *agents.Sandbox) { pod(s).Containers[1].Command = nil }, "container web: it has no command"},
		"name":       {func(s *agents.Sandbox) { pod(s).Containers[1].Name = "main" }, "containers[1].name"},
	} {
		s := object(withSidecars, c.change)
		if _, err := n.Ensure(t.Context(), s); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if left, err := n.Audit(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestDeathWhileSidecarsStart: wherever the process ends, the next one removes what was made.
func TestDeathWhileSidecarsStart(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	for _, step := range []string{"sidecar_files", "sidecars"} {
		var f fault
		n, stop := m.node(f.into)
		s := object(withSidecars)
		f.arm(step, operation.ErrCrash)
		if _, err := n.Ensure(t.Context(), s); !errors.Is(err, operation.ErrCrash) {
			t.Fatalf("%s: %v", step, err)
		}
		stop()
		n, stop = m.node()
		eventually.True(t, "nothing is left after "+step, func() bool {
			left, err := n.Audit(context.WithoutCancel(t.Context()))
			return err == nil && len(left) == 0
		})
		stop()
	}
}
