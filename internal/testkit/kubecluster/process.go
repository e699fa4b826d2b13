package kubecluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// startTime bounds the start of a program; it is no measure of speed.
	startTime = 3 * time.Minute
	// stopTime is how long a program may take to exit before it is killed.
	stopTime = 2 * time.Minute
)

// program is a started process.
type program struct {
	name   string
	in     *namespaces // nil outside
	cmd    *exec.Cmd
	output tail
	exited chan struct{}
	err    error // of the exit; set before exited is closed
}

// startProgram starts a program that the kernel kills if the tests are killed: by its namespaces, or
// else with the thread that started it, which stays until the program ends.
func startProgram(cmd *exec.Cmd, in *namespaces) (*program, error) {
	p := &program{name: filepath.Base(cmd.Path), in: in, cmd: cmd, exited: make(chan struct{})}
	if cmd.Stdout == nil {
		cmd.Stdout, cmd.Stderr = &p.output, &p.output
	}
	started := make(chan error)
	onOwnThread(func() {
		var err error
		if in != nil {
			err = in.enter()
		} else {
			cmd.SysProcAttr = withParent(cmd.SysProcAttr)
		}
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.exited)
		}
	})
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	return p, nil
}

// Process is a program that [Serve] has started.
type Process struct{ program *program }

// Serve starts a program that [Cluster.Command] has prepared. The thread that starts it stays until it exits, since
// the kernel would kill it with the thread.
func Serve(cmd *exec.Cmd) (*Process, error) {
	p, err := startProgram(cmd, nil)
	if err != nil {
		return nil, err
	}
	return &Process{p}, nil
}

// Exited is closed when the program has exited.
func (p *Process) Exited() <-chan struct{} { return p.program.exited }

// PID is the program's.
func (p *Process) PID() int { return p.program.cmd.Process.Pid }

// Signal sends a signal, unless the program has exited.
func (p *Process) Signal(s os.Signal) error {
	if err := p.program.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal %s: %w", p.program.name, err)
	}
	return nil
}

// Stop sends SIGTERM, unless the program has exited, and returns the error of the exit, which is nil for code 0.
func (p *Process) Stop() error { return errors.Join(p.program.stop(), p.program.err) }

// Run runs a program in the cluster's network namespace until the test ends. It may exit with an error after SIGTERM.
func (c *Cluster) Run(t testing.TB, program string, args ...string) {
	t.Helper()
	p, err := startProgram(c.Command(context.WithoutCancel(t.Context()), program, args...), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("end of the output of %s:\n%s", program, p.output.String())
		}
	})
}

// withParent has the kernel kill a process with its parent.
func withParent(attr *syscall.SysProcAttr) *syscall.SysProcAttr {
	if attr == nil {
		attr = &syscall.SysProcAttr{}
	}
	attr.Pdeathsig = syscall.SIGKILL
	return attr
}

// onOwnThread runs f on a thread that ends with it, so that f may change the thread's namespaces. It
// is never the main thread: that one is what /proc/self shows.
func onOwnThread(f func()) {
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != unix.Getpid() {
			f()
			return
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // another thread, for this one is taken
			f()
		}()
		<-done
		runtime.UnlockOSThread()
	}()
}

// stop ends a program as a service manager does.
func (p *program) stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.exited:
		return nil
	case <-time.After(stopTime):
		return errors.Join(fmt.Errorf("%s did not exit within %v of SIGTERM", p.name, stopTime), p.kill())
	}
}

// kill kills a program and waits until it has exited.
func (p *program) kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill %s: %w", p.name, err)
	}
	<-p.exited
	return nil
}

// failure describes a program that exited although it should run.
func (p *program) failure() error {
	return fmt.Errorf("%s exited: %w\n%s", p.name, p.err, p.output.String())
}

// FindProgram is the path of a program that scripts/tool.sh builds. It skips the test without the
// program, and fails it in CI.
func FindProgram(t testing.TB, name string) string {
	t.Helper()
	p := filepath.Join(binDir(), name)
	if _, err := os.Stat(p); err == nil {
		return p
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is missing: scripts/tool.sh %s builds it", p, name)
	}
	t.Skipf("SKIPPED: %s is missing: scripts/tool.sh %s builds it", p, name)
	return ""
}

// binDir has the programs that scripts/tool.sh builds.
func binDir() string {
	cache := os.Getenv("BARCHAN_CACHE")
	if cache == "" {
		cache = "/var/cache/barchan"
	}
	return filepath.Join(cache, "bin")
}
