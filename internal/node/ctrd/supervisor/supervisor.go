// Package supervisor keeps a containerd process of ours running. It makes no calls to containerd's
// API, and ends a containerd only in Stop: the process outlives ours.
//
// Supervisor.mu is a leaf.
package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

const (
	firstPause = 100 * time.Millisecond // before the first restart
	longPause  = 30 * time.Second       // between two restarts, at most
	soundAfter = time.Minute            // a run this long makes the next pause the first again
	stopGrace  = 10 * time.Second       // between SIGTERM and SIGKILL
	// maxLog is the size above which a start rotates the log.
	maxLog = 16 << 20
)

// Config is the program and the place of a containerd.
type Config struct {
	// Binary is the path of the program.
	Binary string
	// Dir is a directory of its own for data, state, socket, configuration and log. The path
	// of the socket in it must fit into 107 bytes.
	Dir string
	Log *slog.Logger
}

// Supervisor keeps one containerd running. The child outlives this process: the next Supervisor of
// the directory adopts it.
type Supervisor struct {
	cfg Config
	log *slog.Logger

	mu   sync.Mutex
	live *lifecycle.Process // +checklocks:mu
}

// New checks the configuration and starts nothing.
func New(cfg Config) (*Supervisor, error) {
	switch {
	case cfg.Log == nil || cfg.Dir == "":
		return nil, fmt.Errorf("containerd: a directory and a logger are needed: %w", errs.ErrInvalid)
	case !filepath.IsAbs(cfg.Dir):
		return nil, fmt.Errorf("containerd directory %q: must be absolute: %w", cfg.Dir, errs.ErrInvalid)
	}
	s := &Supervisor{cfg: cfg, log: cfg.Log.With("component", "ctrd")}
	if len(s.Address()) > len(unix.RawSockaddrUnix{}.Path)-1 {
		return nil, fmt.Errorf("containerd socket %q: longer than a socket's path may be; choose a shorter directory: %w", s.Address(), errs.ErrInvalid)
	}
	if _, err := exec.LookPath(cfg.Binary); err != nil {
		return nil, fmt.Errorf("containerd program %q: %w: %w", cfg.Binary, err, errs.ErrInvalid)
	}
	return s, nil
}

// Address is the path of the socket.
func (s *Supervisor) Address() string { return filepath.Join(s.cfg.Dir, "containerd.sock") }

func (s *Supervisor) pidFile() string { return filepath.Join(s.cfg.Dir, "containerd.pid") }

// Run adopts the containerd of the directory or starts one, calls ready when it answers, and
// restarts it with exponential backoff. It returns when ctx is done and leaves containerd running;
// [Supervisor.Stop] ends it.
func (s *Supervisor) Run(ctx context.Context, ready func()) error {
	pause := firstPause
	for {
		began := time.Now()
		p, child, err := s.ensure(ctx)
		if err == nil {
			ready()
			s.log.InfoContext(ctx, "containerd ready", "pid", p.PID, "duration", time.Since(began))
			err = p.Wait(ctx)
			if child != nil && !p.Alive() {
				child.Reap()
			} else if !p.Alive() { // our child if this program re-executed itself
				_, _ = unix.Wait4(p.PID, nil, unix.WNOHANG, nil)
			}
		}
		if ctx.Err() != nil {
			return nil //nolint:nilerr // ctx is done
		}
		if time.Since(began) > soundAfter {
			pause = firstPause
		}
		s.log.WarnContext(ctx, "containerd exited; restarting", "error", err, "pause", pause)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, longPause)
	}
}

// ensure returns the running, answering containerd of the directory, and its child if it was
// started now.
func (s *Supervisor) ensure(ctx context.Context) (lifecycle.Process, *lifecycle.Child, error) {
	p, found := s.find(ctx)
	var child *lifecycle.Child
	if !found {
		var err error
		if child, err = s.start(); err != nil {
			return lifecycle.Process{}, nil, err
		}
		p = child.Process
	}
	s.mu.Lock()
	s.live = &p
	s.mu.Unlock()
	if err := s.awaitAnswer(ctx, p); err != nil {
		if child != nil && !p.Alive() {
			child.Reap()
		}
		return lifecycle.Process{}, nil, err
	}
	return p, child, nil
}

// find returns the directory's running containerd: by its pid file, or by the socket's peer if a
// predecessor died before it wrote the file.
func (s *Supervisor) find(ctx context.Context) (p lifecycle.Process, ok bool) {
	if b, err := os.ReadFile(s.pidFile()); err == nil && json.Unmarshal(b, &p) == nil && p.Alive() {
		return p, true
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", s.Address())
	if err != nil {
		return p, false
	}
	defer func() { _ = conn.Close() }()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return p, false
	}
	var cred *unix.Ucred
	if err := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || cred == nil {
		return p, false
	}
	p, err = lifecycle.ProcessOf(int(cred.Pid))
	return p, err == nil
}

// start starts a new containerd, whose output goes to a file.
func (s *Supervisor) start() (*lifecycle.Child, error) {
	if err := s.writeConfig(); err != nil {
		return nil, err
	}
	logPath := filepath.Join(s.cfg.Dir, "containerd.log")
	if info, err := os.Stat(logPath); err == nil && info.Size() > maxLog {
		if err := os.Rename(logPath, logPath+".1"); err != nil {
			return nil, fmt.Errorf("rotate log of containerd: %w", err)
		}
	}
	out, err := os.OpenFile(logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log of containerd: %w", err)
	}
	defer func() { _ = out.Close() }()
	cmd := exec.Command(s.cfg.Binary, "--config", s.configFile()) //nolint:noctx // it outlives every context
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, s.cfg.Dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // no signals of our terminal
	child, err := lifecycle.StartChild(cmd)
	if err != nil {
		return nil, fmt.Errorf("start containerd: %w", err)
	}
	b, err := json.Marshal(child.Process)
	if err == nil {
		err = os.WriteFile(s.pidFile(), b, 0o600)
	}
	if err != nil {
		err = errors.Join(fmt.Errorf("write pid file of containerd: %w", err), child.Signal(syscall.SIGKILL))
		child.Reap()
		return nil, err
	}
	return child, nil
}

// awaitAnswer returns when the socket accepts connections, or the process has exited.
func (s *Supervisor) awaitAnswer(ctx context.Context, p lifecycle.Process) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", s.Address())
		if err == nil {
			return conn.Close()
		}
		if !p.Alive() {
			return fmt.Errorf("containerd exited before it answered; see %s", filepath.Join(s.cfg.Dir, "containerd.log"))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for containerd: %w", context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// Stop ends the containerd of the directory and returns when it has exited. Call it after Run has
// returned, or Run starts another.
func (s *Supervisor) Stop(ctx context.Context) error {
	s.mu.Lock()
	live := s.live
	s.mu.Unlock()
	p, found := s.find(ctx)
	if !found && (live == nil || !live.Alive()) {
		return nil
	} else if !found {
		p = *live
	}
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		if err := p.Signal(signal); err != nil {
			return fmt.Errorf("stop containerd: %w", err)
		}
		limited, cancel := context.WithTimeout(ctx, stopGrace)
		err := p.Wait(limited)
		cancel()
		if !p.Alive() {
			for _, left := range []string{s.pidFile(), s.Address()} {
				if err := os.Remove(left); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return fmt.Errorf("stop containerd: %w", err)
				}
			}
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("stop containerd: %w", err)
		}
	}
	return fmt.Errorf("stop containerd: process %d does not end: %w", p.PID, errs.ErrUnavailable)
}
