package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

const (
	startTime  = 2 * time.Minute
	stopTime   = time.Minute
	removeTime = 30 * time.Minute // 100,000 sandboxes take ten
)

// Server is one barchan with all of its own: directories, ports, names, subnet.
type Server struct {
	Dir    string // of the programs, and of what is measured beside the server on the same disk
	Data   string // the server's data directory, in Dir
	Addr   string // of the gateway and the REST API
	Cgroup string // of all of its sandboxes

	program string
	env     []string
	metrics string       // address
	http    *http.Client // keeps its connections, as an SDK does
	admin   *adminclient.Client

	cmd  *exec.Cmd // nil while it does not run
	done chan error

	// Known once it has run for the first time.
	REST       *client.Client
	Key        string // of the REST API
	Kubeconfig string
	Classes    []string          // that this machine offers, gVisor first
	Paths      map[string]string // programs, by name
}

// NewServer prepares a server. Its programs are copied, so that a build that runs at the
// same time does not change what is measured.
func NewServer(ctx context.Context, parent, programs string) (*Server, error) {
	dir, err := os.MkdirTemp(parent, "bb-") // short: sockets lie below
	if err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	s := &Server{Dir: dir, Data: filepath.Join(dir, "d"), program: filepath.Join(dir, "barchan"), http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 128}}}
	for _, name := range []string{"barchan", "barchan-agent"} {
		if err := copyProgram(filepath.Join(programs, name), filepath.Join(dir, name)); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	var ports [4]string
	for i := range ports {
		if ports[i], err = FreeAddr(ctx); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	s.Addr, s.metrics = ports[0], ports[3]
	n := os.Getpid()
	tag := fmt.Sprintf("bb%d", n)
	s.Cgroup = "/" + tag
	s.env = append(os.Environ(),
		"BARCHAN_DATA_DIR="+s.Data, "BARCHAN_HTTP_ADDR="+ports[0], "BARCHAN_TLS_ADDR="+ports[1], "BARCHAN_KUBE_ADDR="+ports[2], "BARCHAN_SSH_ADDR=", "BARCHAN_METRICS_ADDR="+ports[3],
		"BARCHAN_BRIDGE_NAME="+tag, fmt.Sprintf("BARCHAN_SUBNET=10.%d.%d.0/22", 210+n%40, 4*(n/40%64)),
		"BARCHAN_NETNS_PREFIX="+tag+"-", "BARCHAN_NFT_TABLE="+tag, "BARCHAN_CGROUP_PARENT="+s.Cgroup, "BARCHAN_CONTAINERD_NAMESPACE="+tag,
		"BARCHAN_RUN_DIR=", "BARCHAN_API_URL=", "BARCHAN_API_KEY=",
		"BARCHAN_QUOTA_SANDBOXES=0", "BARCHAN_QUOTA_CREATES=0", // what is measured is the server, not its limits
		"BARCHAN_POOL_SIZE=0", // what is measured makes its own
	)
	s.admin = adminclient.New(filepath.Join(s.Data, "run", "admin.sock"), s.Data)
	return s, nil
}

func copyProgram(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("copy program (is it built?): %w", err)
	}
	return os.WriteFile(to, b, 0o755) //nolint:gosec // a program
}

// FreeAddr returns an address of loopback whose port is free at the moment.
func FreeAddr(ctx context.Context) (string, error) {
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return ln.Addr().String(), ln.Close()
}

func (s *Server) logFile() string { return filepath.Join(s.Dir, "log") }

// start starts the server and returns how long it took from the start of its process until it
// reported that it is ready.
func (s *Server) start(ctx context.Context) (time.Duration, error) {
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, fmt.Errorf("open log: %w", err)
	}
	defer func() { _ = log.Close() }()
	cmd := exec.CommandContext(context.WithoutCancel(ctx), s.program, "up") // it is stopped, not killed
	cmd.Env, cmd.Stdout, cmd.Stderr = s.env, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal's signals are for us
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start the server: %w", err)
	}
	s.cmd, s.done = cmd, make(chan error, 1)
	go func(done chan<- error) { done <- cmd.Wait() }(s.done)
	if err := s.awaitReady(ctx); err != nil {
		return 0, err
	}
	took := time.Since(began)
	return took, s.meet(ctx)
}

func (s *Server) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if res, err := s.get(ctx, s.Addr, "/readyz"); err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			_ = res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case err := <-s.done:
			s.cmd = nil
			return fmt.Errorf("the server ended at its start: %w\n%s", err, s.Tail())
		case <-ctx.Done():
			return fmt.Errorf("wait until the server is ready: %w\n%s", ctx.Err(), s.Tail())
		case <-tick.C:
		}
	}
}

func (s *Server) get(ctx context.Context, addr, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	return s.http.Do(req)
}

// meet learns what clients need to know of a server.
func (s *Server) meet(ctx context.Context) error {
	status, err := s.admin.Status(ctx)
	if err != nil {
		return fmt.Errorf("read status: %w", err)
	}
	s.Kubeconfig = status.Addresses.Kubeconfig
	s.Paths, s.Classes = map[string]string{}, []string{"gvisor"}
	for _, c := range status.Components {
		s.Paths[c.Name] = c.Path
		if c.Name == "runc" && c.Path != "" {
			s.Classes = append(s.Classes, "runc")
		}
	}
	key, err := os.ReadFile(status.Addresses.APIKeyFile)
	if err != nil {
		return fmt.Errorf("read the API key: %w", err)
	}
	s.Key = strings.TrimSpace(string(key))
	s.REST, err = client.New(client.Config{URL: "http://" + s.Addr, Key: s.Key, HTTP: s.http, UserAgent: "bench"})
	return err
}

// stop ends the server; sandboxes keep running.
func (s *Server) stop() error {
	if s.cmd == nil {
		return nil
	}
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop the server: %w", err)
	}
	return s.awaitEnd()
}

func (s *Server) awaitEnd() error {
	s.http.CloseIdleConnections()
	cmd := s.cmd
	s.cmd = nil
	select {
	case err := <-s.done:
		if err != nil {
			return fmt.Errorf("the server ended: %w\n%s", err, s.Tail())
		}
		return nil
	case <-time.After(stopTime):
		_ = cmd.Process.Kill()
		return fmt.Errorf("the server did not end within %s\n%s", stopTime, s.Tail())
	}
}

// PID returns the process of the server, which runs.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// restart measures a boot over what is there.
func (s *Server) restart(ctx context.Context) (time.Duration, error) {
	return s.Restart(ctx, nil)
}

// Restart stops the server, calls f, which may be nil, and starts it. It returns how long it took from the start of its process until it
// reported that it is ready.
func (s *Server) Restart(ctx context.Context, f func() error) (time.Duration, error) {
	if err := s.stop(); err != nil {
		return 0, err
	}
	if f != nil {
		if err := f(); err != nil {
			return 0, err
		}
	}
	return s.start(ctx)
}

// RestartIdle restarts the server and returns when it counts as idle.
func (s *Server) RestartIdle(ctx context.Context) error {
	if _, err := s.restart(ctx); err != nil {
		return err
	}
	return Rest(ctx, Settle)
}

// RestartWith restarts the server with a setting of its own, NAME=VALUE.
func (s *Server) RestartWith(ctx context.Context, setting string) error {
	s.env = append(s.env, setting) // the last of a name counts
	_, err := s.restart(ctx)
	return err
}

// Remove takes everything away. The directory stays if anything else did, for it is then
// needed to try again. It ignores that ctx is done.
func (s *Server) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTime)
	defer cancel()
	if _, err := os.Stat(s.Data); err == nil {
		if _, err := s.Command(ctx, "down", "--all", "--yes"); err != nil {
			return fmt.Errorf("%w\n%s\nthe data directory is kept in %s", err, s.Tail(), s.Dir)
		}
	}
	if s.cmd != nil {
		if err := s.awaitEnd(); err != nil {
			return err
		}
	}
	return os.RemoveAll(s.Dir)
}

// Tail returns the end of the server's log.
func (s *Server) Tail() string {
	b, err := os.ReadFile(s.logFile())
	if err != nil {
		return ""
	}
	lines := strings.Split(string(b), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// Command runs one of our commands and returns what it printed.
func (s *Server) Command(ctx context.Context, args ...string) (string, error) {
	return s.command(ctx, "", args...)
}

// Apply makes or changes objects.
func (s *Server) Apply(ctx context.Context, manifest string) error {
	_, err := s.command(ctx, manifest, "apply", "-f", "-")
	return err
}

func (s *Server) command(ctx context.Context, stdin string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, s.program, args...)
	var out, talk bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.Stdin = s.env, &out, &talk, strings.NewReader(stdin)
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("barchan %s: %w: %s", strings.Join(args, " "), err, talk.String())
	}
	return out.String(), nil
}
