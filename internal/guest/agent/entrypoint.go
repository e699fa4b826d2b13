package agent

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/logs"
	"github.com/barchan-dev/barchan/internal/guest/agent/settings"
	"github.com/barchan-dev/barchan/internal/guest/agent/spawn"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// entrypoint is the template's program. Its exit is recorded; the sandbox continues.
type entrypoint struct {
	log      *slog.Logger
	cfg      *envd.Config
	settings *settings.Settings
	reaper   *spawn.Reaper
	buffer   *logs.Buffer

	mu    sync.Mutex
	state envd.Entrypoint // +checklocks:mu
}

func (e *entrypoint) status() envd.Entrypoint {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.state
}

const (
	// The first restart of a program is immediate. Pauses then double from minRestartPause to maxRestartPause, as those of
	// kubelet do, until the program has run for stableAfter.
	minRestartPause = time.Second
	maxRestartPause = 5 * time.Minute
	stableAfter     = 10 * time.Minute
	// outputGrace is how long the output of processes that have left the program's group is waited for before a restart.
	outputGrace = time.Second
)

// run starts the program, and starts it again as configured. It returns when the program has ended for good and its output
// is copied, or ctx ends.
func (e *entrypoint) run(ctx context.Context) {
	var pause time.Duration
	for len(e.cfg.Entrypoint) > 0 {
		began := time.Now()
		e.runOnce(ctx)
		state := e.status()
		again := e.cfg.Restart == envd.RestartAlways || e.cfg.Restart == envd.RestartOnFailure && state.Failed()
		if !again || ctx.Err() != nil {
			return
		}
		if time.Since(began) > stableAfter {
			pause = 0
		}
		if at := time.Now().Add(pause); pause > 0 {
			e.record(func(s *envd.Entrypoint) { s.Again = &at })
			e.log.InfoContext(ctx, "entrypoint to be restarted", "pause", pause)
		}
		if !lifecycle.Sleep(ctx, pause) {
			return
		}
		pause = min(max(2*pause, minRestartPause), maxRestartPause)
		e.record(func(s *envd.Entrypoint) {
			last := *s
			last.Last, last.Again = nil, nil
			*s = envd.Entrypoint{Configured: true, Restarts: s.Restarts + 1, Last: &last}
		})
	}
}

// runOnce starts the program and returns when it has exited and its output is copied, or ctx ends.
func (e *entrypoint) runOnce(ctx context.Context) {
	files, pid, exit, err := e.start()
	if err != nil {
		now := time.Now()
		e.record(func(s *envd.Entrypoint) { s.Configured, s.Error, s.FinishedAt = true, err.Error(), &now })
		e.log.WarnContext(ctx, "entrypoint not started", "error", err)
		return
	}
	started := time.Now()
	e.record(func(s *envd.Entrypoint) { s.Configured, s.Running, s.PID, s.StartedAt = true, true, pid, &started })
	e.log.InfoContext(ctx, "entrypoint started", "pid", pid)
	// Its children may keep the pipes open: those of the next run, and the agent's exit, do not wait for them.
	stop := context.AfterFunc(ctx, func() { _, _ = files.Stdout.Close(), files.Stderr.Close() })
	defer stop()
	var copies sync.WaitGroup
	copies.Go(func() { e.copy(ctx, files.Stdout, envd.StreamStdout, e.cfg.StdoutPath) })
	copies.Go(func() { e.copy(ctx, files.Stderr, envd.StreamStderr, e.cfg.StderrPath) })
	ws := <-exit
	finished, code := time.Now(), exitCode(ws)
	e.record(func(s *envd.Entrypoint) {
		s.Running, s.ExitCode, s.FinishedAt = false, &code, &finished
		if ws.Signaled() {
			s.Error = spawn.StatusText(ws)
		}
	})
	e.log.InfoContext(ctx, "entrypoint exited", "pid", pid, "status", spawn.StatusText(ws))
	if e.cfg.Restart != "" { // what it has left must not run beside the next
		_ = syscall.Kill(-pid, syscall.SIGKILL) // there may be none
		timer := time.AfterFunc(outputGrace, func() { _, _ = files.Stdout.Close(), files.Stderr.Close() })
		defer timer.Stop()
	}
	copies.Wait()
}

// exitCode is a shell's: 128 and the signal's number for a death by signal.
func exitCode(ws syscall.WaitStatus) int {
	if ws.Signaled() {
		return 128 + int(ws.Signal())
	}
	return ws.ExitStatus()
}

func (e *entrypoint) record(change func(*envd.Entrypoint)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(&e.state)
}

func (e *entrypoint) start() (*spawn.Stdio, int, <-chan syscall.WaitStatus, error) {
	spec := e.cfg.User
	if spec == "" {
		spec = "0"
	}
	acc, err := e.settings.Accounts.Resolve(spec)
	if err != nil {
		return nil, 0, nil, err
	}
	dir := filepath.Join("/", e.cfg.Workdir)
	// Container engines create a missing directory too.
	if err := account.MakeDirs(dir, acc); err != nil {
		return nil, 0, nil, err
	}
	files, err := spawn.OpenPipes(acc, false)
	if err != nil {
		return nil, 0, nil, err
	}
	env := e.settings.Environ(acc, nil)
	pid, exit, err := e.reaper.Spawn(spawn.Command{Argv: e.cfg.Entrypoint, Env: env, Dir: dir, User: acc, Files: files.Child})
	files.CloseChild()
	if err != nil {
		files.CloseAll()
		return nil, 0, nil, err
	}
	return files, pid, exit, nil
}

// copy writes one stream to the buffer and, if configured, to a file. After a write error it drops the
// file and continues.
func (e *entrypoint) copy(ctx context.Context, from *os.File, stream, file string) {
	defer func() { _ = from.Close() }()
	lines := &logs.LineWriter{Buffer: e.buffer, Source: envd.SourceEntrypoint, Stream: stream}
	defer lines.Flush()
	var out *logs.File
	if file != "" {
		var err error
		if out, err = logs.OpenFile(file); err != nil {
			e.log.WarnContext(ctx, "log file dropped", "path", file, "error", err)
		} else {
			defer func() { _ = out.Close() }()
		}
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		_, _ = lines.Write(buf[:n]) // never fails
		if out != nil && n > 0 {
			if _, err := out.Write(buf[:n]); err != nil {
				e.log.WarnContext(ctx, "log file dropped", "path", file, "error", err)
				out = nil
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) {
				e.log.WarnContext(ctx, "read entrypoint output", "error", err)
			}
			return
		}
	}
}
