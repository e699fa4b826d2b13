// Package spawn starts, signals and reaps processes. It alone in the agent forks and waits. It reads
// none of their output.
//
// Lock order: Reaper.forking, then Reaper.mu.
package spawn

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
)

// ErrGone means that the process to signal has exited.
var ErrGone = errors.New("process has ended")

// Reaper alone forks and waits: PID 1 must wait for any child, and a second waiter (os/exec) would
// lose exit codes to it.
type Reaper struct {
	// forking is held for reading from a fork until the child is in waiters, and for writing while
	// children are reaped: no child is reaped before it is in waiters or signalled after its PID is
	// free.
	forking sync.RWMutex
	mu      sync.Mutex
	waiters map[int]chan syscall.WaitStatus // +checklocks:mu
	sigs    chan os.Signal
	// reserve is the difference between the process limits of the agent and of root's programs; zero
	// keeps the inherited limit. Set before the first start.
	reserve uint64
	// over refuses further starts
	over bool // +checklocks:forking
}

// NewReaper subscribes to SIGCHLD; Run must follow.
func NewReaper() *Reaper {
	r := &Reaper{waiters: map[int]chan syscall.WaitStatus{}, sigs: make(chan os.Signal, 1)}
	signal.Notify(r.sigs, syscall.SIGCHLD)
	return r
}

// Run reaps until ctx ends.
func (r *Reaper) Run(ctx context.Context) error {
	defer signal.Stop(r.sigs)
	for {
		r.reap()
		select {
		case <-r.sigs:
		case <-ctx.Done():
			return nil
		}
	}
}

// reap waits for every exited child, adopted ones too.
func (r *Reaper) reap() {
	r.forking.Lock()
	defer r.forking.Unlock()
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		r.mu.Lock()
		if ch, ok := r.waiters[pid]; ok {
			delete(r.waiters, pid)
			ch <- ws
		}
		r.mu.Unlock()
	}
}

// start runs a program; the channel receives its exit status.
func (r *Reaper) start(argv0 string, argv []string, attr *syscall.ProcAttr) (int, <-chan syscall.WaitStatus, error) {
	r.forking.RLock()
	defer r.forking.RUnlock()
	if r.over {
		return 0, nil, reply.ErrStopping
	}
	pid, err := syscall.ForkExec(argv0, argv, attr)
	if err != nil {
		return 0, nil, &os.PathError{Op: "fork/exec", Path: argv0, Err: err}
	}
	ch := make(chan syscall.WaitStatus, 1)
	r.mu.Lock()
	r.waiters[pid] = ch
	r.mu.Unlock()
	return pid, ch, nil
}

// Close refuses further starts, so that the list of children is final.
func (r *Reaper) Close() {
	r.forking.Lock()
	defer r.forking.Unlock()
	r.over = true
}

// Signal sends sig to the process group that pid leads, or returns errGone.
func (r *Reaper) Signal(pid int, sig syscall.Signal) error {
	r.forking.RLock()
	defer r.forking.RUnlock()
	r.mu.Lock()
	_, alive := r.waiters[pid]
	r.mu.Unlock()
	if !alive {
		return ErrGone
	}
	err := syscall.Kill(-pid, sig)
	if errors.Is(err, syscall.ESRCH) {
		// The child has no session yet, or has left the group.
		err = syscall.Kill(pid, sig)
	}
	if err != nil {
		return fmt.Errorf("signal process %d: %w", pid, err)
	}
	return nil
}

// Children lists the processes that start made and that still run.
func (r *Reaper) Children() []int {
	r.mu.Lock()
	defer r.mu.Unlock()
	pids := make([]int, 0, len(r.waiters))
	for pid := range r.waiters {
		pids = append(pids, pid)
	}
	return pids
}

// StatusText formats a status as os.ProcessState does.
func StatusText(ws syscall.WaitStatus) string {
	switch {
	case ws.Exited():
		return fmt.Sprintf("exit status %d", ws.ExitStatus())
	case ws.Signaled() && ws.CoreDump():
		return "signal: " + ws.Signal().String() + " (core dumped)"
	case ws.Signaled():
		return "signal: " + ws.Signal().String()
	}
	return fmt.Sprintf("status %#x", uint32(ws))
}
