package oom

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// machine is a /proc that shows only what a test started. What is sent to all is counted, and not sent.
type machine struct {
	*Killer
	stopped, continued int
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{}
	m.Killer = &Killer{Proc: t.TempDir(), Signal: func(pid int, s syscall.Signal) error {
		switch {
		case pid != -1:
			return syscall.Kill(pid, s)
		case s == syscall.SIGSTOP:
			m.stopped++
		default:
			m.continued++
		}
		return nil
	}}
	return m
}

func (m *machine) show(t *testing.T, pid int) {
	t.Helper()
	if err := os.Symlink(filepath.Join("/proc", strconv.Itoa(pid)), filepath.Join(m.Proc, strconv.Itoa(pid))); err != nil {
		t.Fatal(err)
	}
}

// large shows the processes of a session, and counts those with 16 MiB.
func (m *machine) large(t *testing.T, session int) (n int) {
	t.Helper()
	for _, p := range sessionMembers(t, session) {
		if _, err := os.Lstat(filepath.Join(m.Proc, strconv.Itoa(p))); err != nil {
			m.show(t, p)
		}
		if m.residentSet(p) > 16<<20 {
			n++
		}
	}
	return n
}

// TestKill has a process with 64 MiB and one with less.
func TestKill(t *testing.T) {
	m := newMachine(t)
	m.show(t, os.Getpid())
	m.show(t, 1)
	if killed, ok := m.Kill(); ok {
		t.Fatalf("%+v was killed: nothing else is there", killed)
	}
	small, large := start(t, "tail", "-n", "1"), start(t, "tail", "-n", "1")
	small.feed(t, 4<<20)
	large.feed(t, 64<<20)
	m.show(t, small.Process.Pid)
	m.show(t, large.Process.Pid)
	killed, ok := m.Kill()
	if !ok || killed.PID != large.Process.Pid || killed.Name != "tail" || killed.Bytes < 60<<20 || m.stopped > 0 {
		t.Errorf("%+v, %v was killed; the large one is %d", killed, ok, large.Process.Pid)
	}
	_ = large.Wait()
	if status, ok := large.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		t.Errorf("the large one: %v", large.ProcessState)
	}
	if err := small.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the small one: %v", err)
	}
}

// A command with many processes ends as a whole, if killing one after another does not help, or all are stopped.
func TestKillSession(t *testing.T) {
	for _, stopped := range []bool{false, true} {
		t.Run(fmt.Sprintf("stopped %v", stopped), func(t *testing.T) { testKillSession(t, stopped) })
	}
}

func testKillSession(t *testing.T, stopped bool) {
	m := newMachine(t)
	other := start(t, "tail", "-n", "1")
	other.feed(t, 24<<20)
	m.show(t, other.Process.Pid)
	many := start(t, "sh", "-c", "for i in 1 2 3 4 5; do (head -c 16777216 /dev/zero; sleep 60) | tail -n 1 & done; wait")
	eventually.True(t, "all have their memory", func() bool { return m.large(t, many.Process.Pid) == 5 })
	if killed, ok := m.Kill(); !ok || killed.PID != other.Process.Pid {
		t.Fatalf("the first: %+v, %v", killed, ok)
	}
	if stopped {
		_ = syscall.Kill(-many.Process.Pid, syscall.SIGSTOP)
		eventually.True(t, "all are stopped", func() bool { return allStopped(t, many.Process.Pid) })
	} else if killed, ok := m.Kill(); !ok || killed.Others != 0 || killed.Name != "tail" {
		t.Fatalf("the second: %+v, %v", killed, ok)
	}
	killed, ok := m.Kill()
	if !ok || killed.PID != many.Process.Pid || killed.Name != "sh" || killed.Others < 4 || killed.Bytes < 64<<20 {
		_ = syscall.Kill(-many.Process.Pid, syscall.SIGKILL) // what is stopped would never end
		t.Errorf("the last: %+v, %v; the session is %d", killed, ok, many.Process.Pid)
	}
	if m.stopped < 1 || m.continued != 1 {
		t.Errorf("all were stopped %d times, and continued %d times", m.stopped, m.continued)
	}
	_ = many.Wait()
	if left := sessionMembers(t, many.Process.Pid); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// sessionMembers lists the processes of a session that have not ended.
func sessionMembers(t *testing.T, session int) (pids []int) {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(dir))
		var p process
		if p.readStat(dir); p.session == session && (&Killer{Proc: "/proc"}).residentSet(pid) > 0 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// allStopped reports whether each process of a session is stopped: a signal takes effect when its process next runs.
func allStopped(t *testing.T, session int) bool {
	return !slices.ContainsFunc(sessionMembers(t, session), func(pid int) bool {
		var p process
		p.readStat(filepath.Join("/proc", strconv.Itoa(pid)))
		return !p.stopped
	})
}

// start runs a program in a session of its own. Its processes end with the test.
func start(t *testing.T, name string, args ...string) *program {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
	})
	return &program{cmd, in}
}

// program keeps what it is fed, for it has no newline. A little of that may still be in its pipe.
type program struct {
	*exec.Cmd
	in io.WriteCloser
}

func (p *program) feed(t *testing.T, size int) {
	t.Helper()
	if _, err := p.in.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
}
