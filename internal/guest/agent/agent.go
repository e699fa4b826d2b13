// Package agent is PID 1 of a sandbox. It serves E2B's envd protocol (processes, terminals, files and
// watches), runs the template's entrypoint, keeps its output and exit code, and reaps all processes.
// It depends on no node, pool or claim: its input is its configuration, /init and /restored.
//
// It runs as root, and a client with the access token may act as any user of the sandbox. It guards
// the sandbox against clients without the token, not against its owner.
//
// Locks: requests.mu, entrypoint.mu, trust.mu and etc.mu are leaves.
package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/files"
	"github.com/barchan-dev/barchan/internal/guest/agent/logs"
	"github.com/barchan-dev/barchan/internal/guest/agent/oom"
	"github.com/barchan-dev/barchan/internal/guest/agent/process"
	"github.com/barchan-dev/barchan/internal/guest/agent/settings"
	"github.com/barchan-dev/barchan/internal/guest/agent/spawn"
	"github.com/barchan-dev/barchan/internal/guest/agent/usage"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// stopGrace is how long processes have after SIGTERM.
	stopGrace = 10 * time.Second
	// killGrace is how long the kernel has after SIGKILL.
	killGrace = 2 * time.Second
	// idleTimeout outlasts that of the gateway, so that the gateway closes first.
	idleTimeout = 640 * time.Second
	// serves is logged once the port is open; the node waits for it.
	serves = envd.Serves
)

// Agent serves one sandbox.
type Agent struct {
	cfg        *envd.Config
	file       string // where cfg was read
	log        *slog.Logger
	buffer     *logs.Buffer
	settings   *settings.Settings
	users      settings.Users
	reaper     *spawn.Reaper
	processes  *process.Table
	entrypoint *entrypoint
	containers *httputil.ReverseProxy
	uploads    *files.Uploads
	watchers   *files.Watchers
	meter      *usage.Sampler
	history    *usage.History
	trust      *trust
	oom        *oom.Killer
	etc        *etc
	requests   *requests
}

// New reads the configuration from a file and prepares an agent; it starts nothing. Logs go to
// out and are kept for the control plane to read.
func New(file string, out io.Writer) (*Agent, error) {
	cfg, err := envd.ReadConfig(file)
	if err != nil {
		return nil, err
	}
	return newAgent(cfg, file, out), nil
}

// NewBeside is New for an agent beside the program of a container, which is not its own: it is given its
// configuration, and passes its environment on to the processes that it starts.
func NewBeside(cfg *envd.Config, out io.Writer) *Agent {
	own := *cfg
	own.Env = map[string]string{}
	for _, v := range os.Environ() {
		if name, value, ok := strings.Cut(v, "="); ok && name != "" {
			own.Env[name] = value
		}
	}
	// Container runtimes add the home of the container's user. Other users have their own.
	if user, err := account.System().Resolve(strconv.Itoa(os.Getuid())); err == nil && own.Env["HOME"] == user.Home {
		delete(own.Env, "HOME")
	}
	maps.Copy(own.Env, cfg.Env)
	return newAgent(&own, "", out)
}

func newAgent(cfg *envd.Config, file string, out io.Writer) *Agent {
	buffer := logs.NewBuffer()
	lines := &logs.LineWriter{Buffer: buffer, Source: envd.SourceAgent, Stream: envd.StreamStderr}
	log := slog.New(slog.NewTextHandler(io.MultiWriter(out, lines), nil)).With("component", "agent")
	acc := account.System()
	s := settings.New(cfg, acc)
	r := spawn.NewReaper()
	return &Agent{
		cfg: cfg, file: file, log: log, buffer: buffer, settings: s, users: settings.Users{Accounts: acc, Settings: s}, reaper: r,
		processes:  process.NewTable(log, r, s),
		entrypoint: &entrypoint{log: log, cfg: cfg, settings: s, reaper: r, buffer: buffer}, containers: newContainers(log),
		uploads: files.NewUploads(), watchers: files.NewWatchers(), meter: usage.NewSampler(), history: usage.NewHistory(log), trust: systemTrust(),
		oom: &oom.Killer{Proc: "/proc", Signal: signal},
		etc: &etc{root: "/"}, requests: newRequests(),
	}
}

// signal sends a signal to a process of the sandbox, or to all. Where the agent is not the first process, all are the machine's.
func signal(pid int, s syscall.Signal) error {
	if pid == -1 && os.Getpid() != 1 {
		return syscall.EPERM
	}
	return syscall.Kill(pid, s)
}

// Run serves until ctx ends; then it sends SIGTERM to all processes, and after a grace SIGKILL.
func (a *Agent) Run(ctx context.Context) error {
	// New directories are 0755, ours and those of programs.
	unix.Umask(0o022)
	// Orphans come to us even when we are not PID 1.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		a.log.WarnContext(ctx, "not a subreaper", "error", err)
	}
	if err := errors.Join(a.reaper.Limit(uint64(a.cfg.Processes)), a.setNames()); err != nil {
		return err
	}
	ln, err := a.listen(ctx)
	if err != nil {
		return err
	}
	a.log.InfoContext(ctx, serves, "address", ln.Addr().String(), "version", envd.Version)
	// Requests outlive ctx until the processes have ended.
	serving, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	srv := a.server(serving)
	var wg sync.WaitGroup
	reaping, stopReaping := context.WithCancel(context.WithoutCancel(ctx))
	wg.Go(func() { _ = a.reaper.Run(reaping) })
	wg.Go(func() { a.entrypoint.run(serving) })
	if a.cfg.Container == "" {
		wg.Go(func() { a.history.Run(serving) })
	}
	served := make(chan error, 1)
	wg.Go(func() { served <- srv.Serve(ln) })

	var failed error
	select {
	case <-ctx.Done():
		a.log.InfoContext(ctx, "agent stops")
	case failed = <-served:
	}
	a.stopProcesses(serving)
	a.watchers.CloseAll()
	a.closeServer(serving, srv, stopServing)
	stopReaping()
	wg.Wait()
	if failed != nil && !errors.Is(failed, http.ErrServerClosed) {
		return fmt.Errorf("serve: %w", failed)
	}
	return nil
}

// server serves HTTP/1.1 and HTTP/2, both without TLS, and streams without a timeout.
func (a *Agent) server(ctx context.Context) *http.Server {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler: a.handler(), Protocols: protocols,
		ReadHeaderTimeout: 30 * time.Second, IdleTimeout: idleTimeout,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          4096,
			MaxReceiveBufferPerConnection: 16 << 20,
			MaxReceiveBufferPerStream:     4 << 20,
		},
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(a.log.Handler(), slog.LevelDebug),
	}
}

// closeServer gives replies a moment, and then closes the remaining connections.
func (a *Agent) closeServer(ctx context.Context, srv *http.Server, cut context.CancelFunc) {
	grace, cancel := context.WithTimeout(ctx, killGrace)
	defer cancel()
	done := context.AfterFunc(grace, cut)
	defer done()
	// Streams that watch or follow end only when they are cut.
	timer := time.AfterFunc(killGrace/4, cut)
	defer timer.Stop()
	if err := srv.Shutdown(grace); err != nil {
		_ = srv.Close()
	}
	cut()
}

// listen opens the port and writes it to PortFile, if configured.
func (a *Agent) listen(ctx context.Context) (net.Listener, error) {
	if a.cfg.Container != "" {
		ln, err := (&net.ListenConfig{}).Listen(ctx, "unix", envd.ContainerSocket(a.cfg.Container))
		if err != nil {
			return nil, fmt.Errorf("listen: %w", err)
		}
		return ln, nil
	}
	port := a.cfg.Port
	switch port {
	case 0:
		port = envd.Port
	case -1:
		port = 0
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(a.cfg.ListenAddress, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if a.cfg.PortFile != "" {
		tmp := a.cfg.PortFile + ".tmp"
		if err := os.WriteFile(tmp, []byte(ln.Addr().String()), 0o644); err != nil {
			return nil, errors.Join(fmt.Errorf("write port file: %w", err), ln.Close())
		}
		if err := os.Rename(tmp, a.cfg.PortFile); err != nil {
			return nil, errors.Join(fmt.Errorf("place port file: %w", err), ln.Close())
		}
	}
	return ln, nil
}

// setNames sets the sandbox's own name and its host aliases, if configured.
func (a *Agent) setNames() error {
	if a.cfg.Hostname != "" {
		if err := unix.Sethostname([]byte(a.cfg.Hostname)); err != nil {
			return fmt.Errorf("set hostname: %w", err)
		}
	}
	if len(a.cfg.Hosts) == 0 {
		return nil
	}
	var b strings.Builder
	for _, h := range a.cfg.Hosts {
		fmt.Fprintf(&b, "%s\t%s\n", h.IP, strings.Join(h.Names, " "))
	}
	if err := os.WriteFile("/etc/hosts", []byte(b.String()), 0o644); err != nil {
		return fmt.Errorf("write hosts: %w", err)
	}
	return nil
}

// stopProcesses ends all of them, those not started by us too if we are PID 1.
func (a *Agent) stopProcesses(ctx context.Context) {
	a.reaper.Close()
	for _, step := range []struct {
		sig   syscall.Signal
		grace time.Duration
	}{{syscall.SIGTERM, stopGrace}, {syscall.SIGKILL, killGrace}} {
		a.signalAll(step.sig)
		grace, cancel := context.WithTimeout(ctx, step.grace)
		ended := a.waitChildren(grace)
		cancel()
		if ended {
			break
		}
	}
	grace, cancel := context.WithTimeout(ctx, killGrace)
	defer cancel()
	a.processes.Wait(grace)
}

func (a *Agent) signalAll(sig syscall.Signal) {
	if os.Getpid() == 1 {
		// It fails only without other processes.
		_ = syscall.Kill(-1, sig)
		return
	}
	for _, pid := range a.reaper.Children() {
		if err := a.reaper.Signal(pid, sig); err != nil && !errors.Is(err, spawn.ErrGone) {
			a.log.Warn("signal process", "pid", pid, "error", err)
		}
	}
}

// waitChildren reports whether all children ended before ctx did.
func (a *Agent) waitChildren(ctx context.Context) bool {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for a.hasChildren() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// hasChildren also counts adopted ones if we are PID 1.
func (a *Agent) hasChildren() bool {
	if os.Getpid() != 1 {
		return len(a.reaper.Children()) > 0
	}
	err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return !errors.Is(err, unix.ECHILD)
}
