// Package program finds the programs that tests need beside ours, and runs servers among them.
package program

import (
	"cmp"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// Find returns a program that make has built, or skips the test.
func Find(t testing.TB, name, target string) string {
	t.Helper()
	path := filepath.Join(cmp.Or(os.Getenv("BARCHAN_CACHE"), "/var/cache/barchan"), "bin", name)
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s is missing: %s builds it", path, target)
		}
		t.Skipf("%s is missing: %s builds it", path, target)
	}
	return path
}

// VolumeFS returns the path of barchan-volumefs. It skips the test without it, or without root.
func VolumeFS(t testing.TB) func() (string, error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, for mounts")
	}
	path := Find(t, "barchan-volumefs", "make runtimes")
	return func() (string, error) { return path, nil }
}

// Server is the process of a server. The zero value does not run.
type Server struct{ cmd *exec.Cmd }

// Start runs a command, and returns when answers returns no error.
func (s *Server) Start(t testing.TB, cmd *exec.Cmd, answers func() error) {
	t.Helper()
	s.cmd = cmd
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually.NoError(t, filepath.Base(cmd.Path)+" answers", answers)
}

// Stop ends the server; its files stay.
func (s *Server) Stop(t testing.TB) {
	t.Helper()
	if s.cmd == nil {
		return
	}
	if err := s.cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = s.cmd.Wait()
	s.cmd = nil
}

// Signal sends the server a signal. With SIGSTOP it returns when all its threads have stopped: then the server accepts
// connections and answers nothing.
func (s *Server) Signal(t testing.TB, signal unix.Signal) {
	t.Helper()
	err := s.cmd.Process.Signal(signal)
	if err == nil && signal == unix.SIGSTOP {
		err = unix.Waitid(unix.P_PID, s.cmd.Process.Pid, nil, unix.WSTOPPED, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
}
