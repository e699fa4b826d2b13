package lifecycle

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Process identifies a process of the machine, safe against reuse of its ID. It is plain data that can
// be stored and used after a restart.
type Process struct {
	PID int `json:"pid"`
	// Started is the start time by the kernel's clock; Boot is the boot ID.
	Started uint64 `json:"started"`
	Boot    string `json:"boot"`
}

// BootID changes with each start of the machine; it is empty where the kernel does not tell.
var BootID = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return string(bytes.TrimSpace(b))
})

// ProcessOf describes a running process; the error is an os.ErrProcessDone or
// fs.ErrNotExist where it has ended.
func ProcessOf(pid int) (Process, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, fmt.Errorf("read process %d: %w", pid, err)
	}
	// The name in the second field may contain spaces and parentheses.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return Process{}, fmt.Errorf("read process %d: %w", pid, os.ErrProcessDone)
	}
	started, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return Process{}, fmt.Errorf("read start of process %d: %w", pid, err)
	}
	return Process{PID: pid, Started: started, Boot: BootID()}, nil
}

// Alive reports whether this process, not a later one of the same ID, runs.
func (p Process) Alive() bool {
	now, err := ProcessOf(p.PID)
	return err == nil && now == p
}

// Signal sends a signal to this process only; one that has ended is success.
func (p Process) Signal(s syscall.Signal) error {
	fd, err := p.open()
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	} else if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.PidfdSendSignal(fd, s, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// open opens a pidfd, and verifies that it is this process.
func (p Process) open() (int, error) {
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return -1, os.ErrProcessDone
	} else if err != nil {
		return -1, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	if !p.Alive() {
		return -1, errors.Join(os.ErrProcessDone, unix.Close(fd))
	}
	return fd, nil
}

// Wait returns nil when the process has ended. It need not be a child.
func (p Process) Wait(ctx context.Context) error {
	fd, err := p.open()
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	} else if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer func() { _ = f.Close() }()
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", p.PID, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = f.Close() })
	defer stop()
	err = raw.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n > 0
	})
	if ctx.Err() != nil {
		return fmt.Errorf("wait for process %d: %w", p.PID, context.Cause(ctx))
	}
	if err != nil {
		return fmt.Errorf("wait for process %d: %w", p.PID, err)
	}
	return nil
}

// Child is a child process that outlives this one; until then it must be reaped.
type Child struct {
	Process
	cmd  *exec.Cmd
	once sync.Once
}

// StartChild starts a command; Process describes it.
func StartChild(cmd *exec.Cmd) (*Child, error) {
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	p, err := ProcessOf(cmd.Process.Pid)
	if err != nil { // it exited at once
		return nil, errors.Join(fmt.Errorf("start %s: %w", cmd.Path, err), cmd.Wait())
	}
	return &Child{Process: p, cmd: cmd}, nil
}

// Reap waits for the child and reaps it.
func (c *Child) Reap() {
	c.once.Do(func() { _ = c.cmd.Wait() }) // its own log has the exit reason
}
