package client_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// newSandbox is a sandbox of a server that has one, whose agent is the real program.
func newSandbox(t *testing.T) *client.Sandbox {
	t.Helper()
	dir := t.TempDir()
	binary := filepath.Join(dir, "agent")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "../cmd/barchan-agent").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cfg := envd.Config{ListenAddress: "127.0.0.1", Port: -1, PortFile: filepath.Join(dir, "port"), DefaultUser: "root", DefaultWorkdir: dir, AccessToken: "secret"}
	if err := envd.WriteConfig(filepath.Join(dir, "config.json"), &cfg); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, "-config", filepath.Join(dir, "config.json")) //nolint:noctx // ended below
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Signal(os.Interrupt); _ = cmd.Wait() })
	var addr string
	eventually.True(t, "the agent's port file", func() bool {
		b, err := os.ReadFile(cfg.PortFile)
		addr = strings.TrimSpace(string(b))
		return err == nil && addr != ""
	})
	if !strings.Contains(addr, ":") {
		addr = "127.0.0.1:" + addr
	}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: addr})
	proxy.FlushInterval = -1
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v2/sandboxes" {
			w.WriteHeader(http.StatusCreated)
			_ = json.NewEncoder(w).Encode(client.Sandbox{SandboxID: "i1", AgentToken: "secret"})
			return
		}
		if r.Header.Get(envd.HeaderSandboxID) != "i1" || r.Header.Get(envd.HeaderSandboxPort) != "49983" {
			t.Errorf("%s has the headers %v", r.URL, r.Header)
		}
		_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/2 has it anyway
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(front.Close)
	c, err := client.New(client.Config{URL: front.URL, Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.Create(t.Context(), client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestSandbox uses the real agent, as root because a sandbox's agent is.
func TestSandbox(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, for users of commands")
	}
	s := newSandbox(t)
	before := runtime.NumGoroutine()
	t.Run("run", func(t *testing.T) { testRun(t, s) })
	t.Run("start", func(t *testing.T) { testStart(t, s) })
	t.Run("pty", func(t *testing.T) { testPTY(t, s) })
	t.Run("files", func(t *testing.T) { testFiles(t, s) })
	t.Run("watch", func(t *testing.T) { testWatch(t, s) })
	if ok, err := s.IsRunning(t.Context()); !ok || err != nil {
		t.Errorf("is running: %v, %v", ok, err)
	}
	http.DefaultClient.CloseIdleConnections()
	eventually.True(t, "the end of goroutines", func() bool { return runtime.NumGoroutine() <= before+20 }) // idle connections have some
}

// noProfile keeps the profile of this machine's root out of shells: it may take a minute.
func noProfile() map[string]string { return map[string]string{"HOME": "/none"} }

func testRun(t *testing.T, s *client.Sandbox) {
	ctx := t.Context()
	var out bytes.Buffer
	res, err := s.Commands.Run(ctx, `echo "$A"; cat; echo e >&2; exit 3`, client.CommandOptions{Env: map[string]string{"A": "b", "HOME": "/none"}, Stdin: strings.NewReader("in\n"), Stdout: &out})
	exit, ok := errors.AsType[*client.ExitError](err)
	if !ok || exit.ExitCode != 3 || res.ExitCode != 3 || out.String() != "b\nin\n" || res.Stderr != "e\n" || res.Stdout != "" {
		t.Errorf("%+v, %v; printed %q", res, err, out.String())
	}
	began := time.Now()
	res, err = s.Commands.Run(ctx, "echo first; sleep 60", client.CommandOptions{Env: noProfile(), Timeout: 300 * time.Millisecond})
	if !errors.Is(err, client.ErrTimeout) || res.Stdout != "first\n" || time.Since(began) > 30*time.Second {
		t.Errorf("timeout: %+v, %v", res, err)
	}
	ended, cancel := context.WithCancel(ctx)
	time.AfterFunc(100*time.Millisecond, cancel)
	if _, err := s.Commands.Run(ended, "sleep 60", client.CommandOptions{Env: noProfile()}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	testRefusals(ctx, t, s)
}

func testRefusals(ctx context.Context, t *testing.T, s *client.Sandbox) {
	if list, err := s.Commands.List(ctx); err != nil || len(list) != 0 {
		t.Errorf("processes left: %+v, %v", list, err)
	}
	if _, err := s.Commands.Run(ctx, "true", client.CommandOptions{Env: noProfile(), Dir: "/none"}); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("no such directory: %v", err)
	}
	if res, err := s.As("nobody").Commands.Run(ctx, "id -un", client.CommandOptions{Env: noProfile(), Dir: "/"}); err != nil || res.Stdout != "nobody\n" {
		t.Errorf("as nobody: %+v, %v", res, err)
	}
}

func testStart(t *testing.T, s *client.Sandbox) {
	ctx := t.Context()
	cmd, err := s.Commands.Start(ctx, `read x; echo "got $x"; sleep 60`, client.CommandOptions{Env: noProfile(), OpenStdin: true})
	if err != nil {
		t.Fatal(err)
	}
	list, err := s.Commands.List(ctx)
	if err != nil || len(list) != 1 || list[0].PID != cmd.PID {
		t.Errorf("list: %+v, %v", list, err)
	}
	r, w := io.Pipe()
	second, err := s.Commands.Connect(ctx, cmd.PID, client.CommandOptions{Stdout: w})
	if err != nil {
		t.Fatal(err)
	}
	read := make(chan string)
	go func() { // ends with the write
		b := make([]byte, 6)
		_, _ = io.ReadFull(r, b)
		read <- string(b)
		_, _ = io.Copy(io.Discard, r)
	}()
	waited := make(chan error)
	go func() {
		_, err := second.Wait()
		_ = w.Close()
		waited <- err
	}()
	if err := cmd.SendStdin(ctx, []byte("me\n")); err != nil {
		t.Error(err)
	}
	if text := <-read; text != "got me" {
		t.Errorf("read %q", text)
	}
	if err := cmd.Kill(ctx); err != nil {
		t.Error(err)
	}
	exit, ok := errors.AsType[*client.ExitError](<-waited)
	if !ok || exit.ExitCode != 137 {
		t.Errorf("killed: %v", exit)
	}
	if res, err := cmd.Wait(); res.Stdout != "got me\n" || res.ExitCode != 137 {
		t.Errorf("first: %+v, %v", res, err)
	}
	if err := cmd.Kill(ctx); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("killed twice: %v", err)
	}
	testCutOff(ctx, t, s)
}

// testCutOff: the stream ends with its context, and the command goes on.
func testCutOff(ctx context.Context, t *testing.T, s *client.Sandbox) {
	short, cancel := context.WithCancel(ctx)
	cmd, err := s.Commands.Start(short, "sleep 60", client.CommandOptions{Env: noProfile()})
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := cmd.Wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	if err := s.Commands.Kill(ctx, cmd.PID); err != nil {
		t.Errorf("it did not go on: %v", err)
	}
}

func testPTY(t *testing.T, s *client.Sandbox) {
	ctx := t.Context()
	cmd, err := s.PTY.Create(ctx, client.PTYOptions{Env: noProfile(), Cols: 100, Rows: 30})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.PTY.Resize(ctx, cmd.PID, 77, 22), s.PTY.SendInput(ctx, cmd.PID, []byte("stty size; exit 4\n"))); err != nil {
		t.Error(err)
	}
	res, err := cmd.Wait()
	if res.ExitCode != 4 || !strings.Contains(res.Stdout, "22 77") {
		t.Errorf("%+v, %v", res, err)
	}
}

func testFiles(t *testing.T, s *client.Sandbox) {
	ctx := t.Context()
	dir := t.TempDir()
	p := filepath.Join(dir, "a/b.txt")
	if err := s.Files.Write(ctx, p, strings.NewReader("text"), client.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if b, err := s.Files.Read(ctx, p); err != nil || string(b) != "text" {
		t.Errorf("read %q, %v", b, err)
	}
	if _, err := s.Files.Read(ctx, p+"x"); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("read of nothing: %v", err)
	}
	info, err := s.Files.Info(ctx, p)
	if err != nil || info.Type != client.TypeFile || info.Size != 4 || info.Mode != 0o644 || time.Since(info.ModTime) > time.Hour {
		t.Errorf("info %+v, %v", info, err)
	}
	testTree(ctx, t, s, dir)
}

func testTree(ctx context.Context, t *testing.T, s *client.Sandbox, dir string) {
	p := filepath.Join(dir, "a/b.txt")
	if list, err := s.Files.List(ctx, dir, 2); err != nil || len(list) != 2 || list[0].Type != client.TypeDirectory {
		t.Errorf("list %+v, %v", list, err)
	}
	if err := s.Files.MakeDir(ctx, filepath.Join(dir, "a")); !errors.Is(err, client.ErrConflict) {
		t.Errorf("directory twice: %v", err)
	}
	if _, err := s.Files.Rename(ctx, p, filepath.Join(dir, "c")); err != nil {
		t.Error(err)
	}
	if has, err := s.Files.Exists(ctx, p); has || err != nil {
		t.Errorf("exists: %v, %v", has, err)
	}
	testFileURL(ctx, t, s, filepath.Join(dir, "c"))
	if err := s.Files.Remove(ctx, dir); err != nil {
		t.Error(err)
	}
}

func testFileURL(ctx context.Context, t *testing.T, s *client.Sandbox, file string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.Files.DownloadURL(file, time.Minute), nil)
	if err != nil {
		t.Fatal(err)
	}
	_, req.Header = s.Address(envd.Port)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if b, _ := io.ReadAll(res.Body); string(b) != "text" {
		t.Errorf("by URL: %s, %q", res.Status, b)
	}
}

func testWatch(t *testing.T, s *client.Sandbox) {
	dir := t.TempDir()
	if _, err := s.Files.Watch(t.Context(), filepath.Join(dir, "none"), client.WatchOptions{}); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("watch of nothing: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	w, err := s.Files.Watch(ctx, dir, client.WatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := s.Files.WriteString(ctx, filepath.Join(dir, "x"), "y"); err != nil {
		t.Error(err)
	}
	for {
		e, err := w.Next()
		if err != nil {
			t.Fatal(err)
		}
		if e.Name == "x" {
			break
		}
	}
	cancel()
	for err == nil {
		_, err = w.Next()
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("end: %v", err)
	}
}
