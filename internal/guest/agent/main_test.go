package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/agent"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// childConfig names, in the environment of this test's own program started
// again, the configuration of the agent that it then is. So the real agent is
// tested as a process of its own, with the race detector in it.
const childConfig = "BARCHAN_TEST_AGENT_CONFIG"

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "-"+agent.FlagSFTP { // the agent starts its own program
		if err := agent.ServeSFTP(os.Stdin, os.Stdout, os.Args[2]); err != nil {
			os.Exit(1)
		}
		return
	}
	if file := os.Getenv(childConfig); file != "" {
		if err := runAgent(file); err != nil {
			fmt.Fprintln(os.Stderr, "agent:", err)
			os.Exit(1)
		}
		return
	}
	m.Run()
}

func runAgent(file string) error {
	if err := os.Unsetenv(childConfig); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	a, err := agent.New(file, os.Stderr)
	if err != nil {
		return err
	}
	agent.SetRoot(a, filepath.Join(filepath.Dir(file), "root"))
	err = a.Run(ctx)
	stop()
	// Timers that only forget an ended process may be left; goroutines not.
	return errors.Join(err, eventually.NoGoroutines())
}

// testAgent is a running agent.
type testAgent struct {
	t      *testing.T
	dir    string
	base   string
	cmd    *exec.Cmd
	stderr *lockedBuffer
	exited chan struct{}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start runs an agent, which is open unless it has a token.
func start(t *testing.T, cfg envd.Config, wrapper ...string) *testAgent {
	t.Helper()
	cfg.Open = cfg.AccessToken == ""
	return startGuarded(t, cfg, wrapper...)
}

// startGuarded runs an agent, behind a wrapper if given, until the test's end, where
// it must stop cleanly.
func startGuarded(t *testing.T, cfg envd.Config, wrapper ...string) *testAgent {
	t.Helper()
	dir := t.TempDir()
	a := &testAgent{t: t, dir: dir, stderr: &lockedBuffer{}, exited: make(chan struct{})}
	if cfg.Container == "" {
		cfg.Port, cfg.PortFile, cfg.ListenAddress = -1, filepath.Join(dir, "port"), "127.0.0.1"
	}
	if cfg.DefaultUser == "" {
		cfg.DefaultUser = "root"
	}
	file := filepath.Join(dir, "config.json")
	noError(t, envd.WriteConfig(file, &cfg))
	argv := append(wrapper, "/proc/self/exe")
	if len(wrapper) > 0 {
		argv[len(argv)-1] = executable(t)
	}
	a.cmd = exec.Command(argv[0], argv[1:]...) //nolint:noctx // stopped in Cleanup
	a.cmd.Env = append(os.Environ(), childConfig+"="+file, "GORACE=atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	a.cmd.Stderr = a.stderr
	noError(t, a.cmd.Start())
	go func() {
		_ = a.cmd.Wait() // see the state below
		close(a.exited)
	}()
	t.Cleanup(a.stop)
	if cfg.Container != "" {
		return a
	}
	eventually.True(t, "port file", func() bool {
		b, err := os.ReadFile(cfg.PortFile)
		a.base = "http://" + string(b)
		select {
		case <-a.exited:
			t.Fatalf("agent ended early: %s", a.stderr)
		default:
		}
		return err == nil
	})
	return a
}

func executable(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	noError(t, err)
	return exe
}

// stop ends the agent and checks its exit.
func (a *testAgent) stop() {
	select {
	case <-a.exited:
		return
	default:
	}
	_ = syscall.Kill(a.cmd.Process.Pid, syscall.SIGTERM)
	select {
	case <-a.exited:
		if !a.cmd.ProcessState.Success() {
			a.t.Errorf("agent ended with %s: %s", a.cmd.ProcessState, a.stderr)
		}
	case <-time.After(eventually.Patience):
		_ = a.cmd.Process.Signal(syscall.SIGQUIT)
		<-a.exited
		a.t.Errorf("agent did not end: %s", a.stderr)
	}
}

// client returns a client of the agent for a user.
func (a *testAgent) client(user string, token ...string) *envd.Client {
	a.t.Helper()
	tr := &http.Transport{}
	a.t.Cleanup(tr.CloseIdleConnections)
	cfg := envd.ClientConfig{HTTP: &http.Client{Transport: tr}, BaseURL: a.base, User: user}
	if len(token) > 0 {
		cfg.Token = func() string { return token[0] }
	}
	c, err := envd.NewClient(cfg)
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// do sends a plain request and returns status, header and body.
func (a *testAgent) do(method, path, body string, header ...string) (int, http.Header, string) {
	a.t.Helper()
	req, err := http.NewRequestWithContext(a.t.Context(), method, a.base+path, strings.NewReader(body))
	if err != nil {
		a.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	tr := &http.Transport{DisableCompression: true}
	defer tr.CloseIdleConnections()
	res, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		a.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		a.t.Fatal(err)
	}
	return res.StatusCode, res.Header, string(b)
}

// needRoot skips loudly, yet never in CI.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") != "" {
		t.Fatal("CI must run this as root")
	}
	t.Skip("SKIPPED: needs root")
}

// sh is a request for a shell command.
func sh(script string) *processpb.StartRequest {
	return &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}}
}

// testCommand is an agent that is not expected to run.
func testCommand(t *testing.T, config string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), executable(t))
	cmd.Env = append(os.Environ(), childConfig+"="+config)
	return cmd
}

// noError ends a test at an error.
func noError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// links makes symbolic links in a directory.
func links(t *testing.T, dir string, targets map[string]string) {
	t.Helper()
	for link, target := range targets {
		noError(t, os.Symlink(target, dir+link))
	}
}
