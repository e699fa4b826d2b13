package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/agent/settings"
	"github.com/barchan-dev/barchan/internal/guest/agent/spawn"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// Table are those that clients started: running, and lately ended.
type Table struct {
	log      *slog.Logger
	reaper   *spawn.Reaper
	settings *settings.Settings
	running  sync.WaitGroup

	mu    sync.Mutex
	seq   uint64              // +checklocks:mu
	byPID map[uint32]*process // +checklocks:mu
	over  bool                // +checklocks:mu
}

// NewTable returns an empty table.
func NewTable(log *slog.Logger, r *spawn.Reaper, s *settings.Settings) *Table {
	return &Table{log: log, reaper: r, settings: s, byPID: map[uint32]*process{}}
}

// start runs the requested program and subscribes before its first output. A
// timeout above zero kills the process, with or without subscribers.
func (t *Table) start(acc account.User, req *processpb.StartRequest, timeout time.Duration) (*process, *subscriber, error) {
	if !t.begin() {
		return nil, nil, connect.NewError(connect.CodeUnavailable, reply.ErrStopping)
	}
	begun := false
	defer func() {
		if !begun {
			t.running.Done()
		}
	}()
	cmd, files, err := t.prepare(acc, req)
	if err != nil {
		return nil, nil, err
	}
	pid, exit, err := t.reaper.Spawn(cmd)
	files.CloseChild()
	if err != nil {
		files.CloseAll()
		return nil, nil, spawnError(err)
	}
	p := &process{pid: pid, config: req.GetProcess(), tag: req.Tag, io: files}
	if timeout > 0 {
		p.killer = time.AfterFunc(timeout, func() { t.expire(p) })
	}
	sub := p.subscribe()
	t.add(p)
	begun = true
	go func() { // wait waits for it
		defer t.running.Done()
		p.follow(exit)
		t.forgetLater(p, exitSteps)
	}()
	return p, sub, nil
}

// begin counts a start before there is a process, which may end the agent at once. It reports
// false once the agent waits for no more processes.
func (t *Table) begin() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over {
		return false
	}
	t.running.Add(1)
	return true
}

// prepare checks a request and opens the files of the process.
func (t *Table) prepare(acc account.User, req *processpb.StartRequest) (spawn.Command, *spawn.Stdio, error) {
	cfg := req.GetProcess()
	for k, v := range cfg.GetEnvs() {
		if err := settings.CheckVariable(k, v); err != nil {
			return spawn.Command{}, nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("process.envs: %w", err))
		}
	}
	dir, err := t.workdir(acc, cfg)
	if err != nil {
		return spawn.Command{}, nil, err
	}
	cmd := spawn.Command{
		Argv: append([]string{cfg.GetCmd()}, cfg.GetArgs()...),
		Env:  t.settings.Environ(acc, cfg.GetEnvs()),
		Dir:  dir, User: acc, TTY: req.GetPty() != nil,
	}
	var files *spawn.Stdio
	if cmd.TTY {
		files, err = spawn.OpenTerminal(acc, winsize(req.GetPty()))
	} else {
		files, err = spawn.OpenPipes(acc, req.Stdin == nil || req.GetStdin())
	}
	if err != nil {
		return spawn.Command{}, nil, startError(err)
	}
	cmd.Files = files.Child
	return cmd, files, nil
}

// workdir is the request's directory, else the default, else the home. The default is made if
// it is missing, as container engines do.
func (t *Table) workdir(acc account.User, cfg *processpb.ProcessConfig) (string, error) {
	_, workdir := t.settings.Defaults()
	dir, err := account.ResolvePath(cfg.GetCwd(), acc, workdir)
	if err != nil {
		return "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	st, err := os.Stat(dir)
	switch {
	case err == nil && st.IsDir():
		return dir, nil
	case errors.Is(err, os.ErrNotExist) && cfg.GetCwd() == "" && workdir != "" && account.MakeDirs(dir, acc) == nil:
		return dir, nil
	case err == nil:
		return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd '%s' is not a directory", dir))
	case errors.Is(err, os.ErrNotExist):
		return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd '%s' does not exist", dir))
	}
	return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd: %w", err))
}

func winsize(p *processpb.PTY) *unix.Winsize {
	size := p.GetSize()
	if size.GetCols() == 0 || size.GetRows() == 0 {
		return nil
	}
	limit := func(n uint32) uint16 { return uint16(min(n, 0xffff)) }
	return &unix.Winsize{Col: limit(size.GetCols()), Row: limit(size.GetRows())}
}

// spawnError is a startError with the exit code that a shell gives to such a program.
func spawnError(err error) error {
	refusal := startError(err)
	if ce, ok := errors.AsType[*connect.Error](refusal); ok && ce.Code() == connect.CodeInvalidArgument {
		code := "126"
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, syscall.ENOENT) {
			code = "127"
		}
		ce.Meta().Set(envd.HeaderExitCode, code)
	}
	return refusal
}

// startError distinguishes temporary errors from permanent ones.
func startError(err error) error {
	if errors.Is(err, reply.ErrStopping) {
		return connect.NewError(connect.CodeUnavailable, reply.ErrStopping)
	}
	code := connect.CodeInvalidArgument
	for _, busy := range []error{syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.ENOSPC} {
		if errors.Is(err, busy) {
			code = connect.CodeResourceExhausted
		}
	}
	return connect.NewError(code, err)
}

func (t *Table) add(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.seq++
	p.seq = t.seq
	t.byPID[uint32(p.pid)] = p
}

// forgetLater drops a process after a while of running time. The clock jumps at a restore, after which
// clients may still need the exit of a process; of several timer steps, the jump skips only one.
func (t *Table) forgetLater(p *process, steps int) {
	time.AfterFunc(exitKept/exitSteps, func() {
		if steps > 1 {
			t.forgetLater(p, steps-1)
			return
		}
		t.forget(p)
	})
}

// forget drops a process, unless its PID is another's by now.
func (t *Table) forget(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byPID[uint32(p.pid)] == p {
		delete(t.byPID, uint32(p.pid))
	}
}

// expire kills a process whose time is over.
func (t *Table) expire(p *process) {
	p.timedOut.Store(true)
	if err := t.reaper.Signal(p.pid, syscall.SIGKILL); err != nil && !errors.Is(err, spawn.ErrGone) {
		t.log.Error("kill after timeout", "pid", p.pid, "error", err)
	}
}

// list has the running ones in the order of their starts.
func (t *Table) list() []*process {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*process, 0, len(t.byPID))
	for _, p := range t.byPID {
		if !p.ended.Load() {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b *process) int { return int(int64(a.seq) - int64(b.seq)) })
	return list
}

// find selects a process; of several with one tag the running, then the latest.
func (t *Table) find(sel *processpb.ProcessSelector, alsoEnded bool) (*process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var found *process
	switch s := sel.GetSelector().(type) {
	case *processpb.ProcessSelector_Pid:
		found = t.byPID[s.Pid]
	case *processpb.ProcessSelector_Tag:
		for _, p := range t.byPID {
			if p.tag != nil && *p.tag == s.Tag && (found == nil || p.betterThan(found)) {
				found = p
			}
		}
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("process: a pid or a tag is needed"))
	}
	if found == nil || (found.ended.Load() && !alsoEnded) {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with %s not found", selectorText(sel)))
	}
	return found, nil
}

func (p *process) betterThan(o *process) bool {
	if p.ended.Load() != o.ended.Load() {
		return o.ended.Load()
	}
	return p.seq > o.seq
}

func selectorText(sel *processpb.ProcessSelector) string {
	if sel.GetTag() != "" {
		return fmt.Sprintf("tag %q", sel.GetTag())
	}
	return fmt.Sprintf("pid %d", sel.GetPid())
}

// Wait returns when all processes have exited and their pipes are closed, or ctx ends; then it closes
// the remaining pipes.
func (t *Table) Wait(ctx context.Context) {
	t.mu.Lock()
	t.over = true
	t.mu.Unlock()
	done := make(chan struct{})
	go func() {
		t.running.Wait()
		close(done)
	}()
	select {
	case <-done:
		return
	case <-ctx.Done():
	}
	t.mu.Lock()
	for _, p := range t.byPID {
		for _, f := range []*os.File{p.io.Stdout, p.io.Stderr, p.io.TTY} {
			if f != nil {
				_ = f.Close()
			}
		}
	}
	t.mu.Unlock()
}
