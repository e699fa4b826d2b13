package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// threads is a program that makes threads until the kernel refuses one; Go then prints why, and exits.
const threads = `package main

import (
	"os"
	"runtime"
	"strconv"
)

func main() {
	n, _ := strconv.Atoi(os.Args[1])
	started := make(chan bool)
	for range n {
		go func() {
			runtime.LockOSThread()
			started <- true
			select {}
		}()
		<-started
	}
	println("made all")
}
`

func threadsProgram(t *testing.T) []byte {
	t.Helper()
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "main.go"), []byte(threads), 0o600))
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", "threads", "main.go")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	program, err := os.ReadFile(filepath.Join(dir, "threads"))
	must(t, err)
	return program
}

// Issue 11: where a sandbox had too many processes, gVisor got no thread from the machine any more,
// and ended. Many threads of one process passed the limit.
func TestProcessLimit(t *testing.T) {
	t.Parallel()
	const limit = 100
	m := newMachine(t)
	n, _ := m.node(atOnce, func(c *Config) { c.DefaultLimits.Pids = limit })
	// bomb starts processes until one is refused, which is the end of its shell.
	const bomb = `sh -c 'i=0; while [ $i -lt 300 ]; do i=$((i+1)); sleep 1000 & done; echo all'`
	program := threadsProgram(t)
	for _, class := range []func(*agents.Sandbox){class("gvisor"), class("runc")} {
		s := object(class)
		name := *s.Spec.PodTemplate.Spec.RuntimeClassName
		t.Run(name, func(t *testing.T) {
			ensure(t, n, s)
			must(t, os.WriteFile(filepath.Join(n.host.Dir(string(n.handles.Lookup(s.UID).ID)), "rootfs", "bin", "threads"), program, 0o755))
			refused := func(t *testing.T, what, by string) {
				t.Helper()
				out, _ := run(t, n, s, by)
				if !strings.Contains(out, "Resource temporarily unavailable") && !strings.Contains(out, "errno=11") {
					t.Errorf("%s: %q", what, out)
				}
				if got := n.handles.Lookup(s.UID).Observed(); got.State != sandbox.ContainerRunning {
					t.Fatalf("after %s it is %s: %s", what, got.State, got.Message)
				}
			}
			refused(t, "processes", bomb+"; busybox killall sleep")
			refused(t, "threads", "threads 300 2>&1")
			refused(t, "processes of a user", `busybox su user `+strings.TrimPrefix(bomb, "sh ")+`; busybox killall sleep`)
			if out, code := run(t, n, s, "threads 40 2>&1"); code != 0 {
				t.Errorf("fewer than the limit: %q", out)
			}
			if name == "runc" {
				return
			}
			// What fills it is still there: the agent has threads left, and the limit outlives a checkpoint.
			for _, when := range []string{"full", "restored"} {
				if when == "restored" {
					suspendMemory(t, n, s)
					awaitStored(t, n, s)
					resume(t, n, s)
				}
				refused(t, "processes of a sandbox that is "+when, bomb)
				if out, code := run(t, n, s, "echo here"); out != "here\n" || code != 0 {
					t.Errorf("%s: %q, %d", when, out, code)
				}
			}
		})
	}
}

// By default so many processes are allowed that they would take all memory of a small sandbox.
func TestProcessLimitOfLittleMemory(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(func(c *Config) { c.DefaultLimits.Memory = 128 << 20 })
	s := object(class("gvisor"))
	ensure(t, n, s)
	out, _ := run(t, n, s, `sh -c 'i=0; while [ $i -lt 1000 ]; do i=$((i+1)); sleep 1000 & done; echo all'; echo here`)
	if !strings.Contains(out, "Resource temporarily unavailable") || !strings.HasSuffix(out, "here\n") {
		t.Errorf("got %q", out)
	}
}

// A sandbox that gets around the limit within is refused processes by the host, or ends: gVisor ends where it cannot do without
// the thread. Issue 11: then it was reported to have ended as any other.
func TestTooManyProcessesOfAllUsers(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node(func(c *Config) { c.DefaultLimits.Pids = 64 })
	s := object(class("gvisor"))
	ensure(t, n, s)
	out, _, err := tryRun(t.Context(), n, s, `for u in 1 2 3 4 5 6 7 8 9 10 11 12; do
		echo u$u:x:200$u:200$u:u:/:/bin/sh >> /etc/passwd
		busybox su u$u -s /bin/sh -c 'i=0; while [ $i -lt 60 ]; do i=$((i+1)); sleep 1000 >/dev/null 2>&1 & done'
	done 2>&1`)
	t.Logf("it printed %q, %v", out, err)
	refused := strings.Contains(out, "Cannot allocate memory")
	eventually.True(t, "it has ended, or was refused processes", func() bool {
		return refused || n.handles.Lookup(s.UID).Observed().State == sandbox.ContainerExited
	})
	if got := n.handles.Lookup(s.UID).Observed(); got.State == sandbox.ContainerExited && !strings.Contains(got.Message, "too many processes") {
		t.Errorf("got %q", got.Message)
	}
}
