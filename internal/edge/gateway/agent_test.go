package gateway

import (
	"bytes"
	"context"
	"crypto/sha256"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/coder/websocket"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// portDialer leads the agent's port to where a test's agent listens.
type portDialer struct {
	net.Dialer
	agent string
}

func (d *portDialer) DialContext(ctx context.Context, network, _ string) (net.Conn, error) {
	return d.Dialer.DialContext(ctx, network, d.agent)
}

// startAgent builds the real agent, runs it on a free port of loopback and returns its address.
func startAgent(t testing.TB, id sandbox.ID, token string) string {
	t.Helper()
	dir := t.TempDir()
	bin := filepath.Join(dir, "agent")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "../../../cmd/barchan-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build agent: %v: %s", err, out)
	}
	cfg, portFile := filepath.Join(dir, "config.json"), filepath.Join(dir, "port")
	if err := envd.WriteConfig(cfg, &envd.Config{ListenAddress: "127.0.0.1", Port: -1, PortFile: portFile, DefaultUser: "root", SandboxID: string(id), AccessToken: token}); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	run := exec.CommandContext(t.Context(), bin, "-config", cfg)
	run.Stderr = &log
	run.Cancel = func() error { return run.Process.Signal(os.Interrupt) }
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = run.Wait() }) // the test's context has ended it by now
	var addr []byte
	eventually.True(t, "the agent listens", func() bool {
		addr, _ = os.ReadFile(portFile)
		return len(addr) > 0
	})
	return strings.TrimSpace(string(addr))
}

// TestRealAgent drives the real agent through the gateway with the real client.
func TestRealAgent(t *testing.T) {
	dialer := &portDialer{}
	w := newFixture(t, func(c *Config) { c.Dialer, c.Verifier = dialer, identity.NewVerifier(c.Tokens.(*sandbox.Tokens)) })
	b := w.box("agent", func(s *agents.Sandbox) { s.Spec.Barchan.Access = &agents.AccessPolicy{} })
	token := w.tokens.Agent(b.id)
	dialer.agent = startAgent(t, b.id, token)
	dir := t.TempDir()
	clients := w.clients(t)
	for name, httpClient := range clients {
		t.Run(name, func(t *testing.T) {
			client, err := envd.NewClient(envd.ClientConfig{
				HTTP: httpClient, BaseURL: strings.TrimSuffix(b.url(envd.Port, "/"), "/"), Token: func() string { return token }, User: "root",
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := client.Health(t.Context()); err != nil {
				t.Errorf("health: %v", err)
			}
			if err := client.Init(t.Context(), envd.InitRequest{}); err == nil {
				t.Error("init passed the gateway")
			}
			runEcho(t, client)
			moveFile(t, client, filepath.Join(dir, name))
		})
	}
	stream := startSleep(t, clients["tls_h2"], b, token)
	b.kill()
	for stream.Receive() {
		t.Logf("still received %v", stream.Msg())
	}
	if stream.Err() == nil {
		t.Error("the stream of a killed sandbox ended as if its process had")
	}
	if status, _ := w.get(b.url(envd.Port, envd.PathHealth)); status != http.StatusBadGateway {
		t.Errorf("health of a killed sandbox: %d", status)
	}
}

func runEcho(t *testing.T, client *envd.Client) {
	t.Helper()
	stream, err := client.Process().Start(t.Context(), connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", "for i in 1 2 3; do echo $i; done"}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	var out []byte
	ended := false
	for stream.Receive() {
		out = append(out, stream.Msg().GetEvent().GetData().GetStdout()...)
		ended = ended || stream.Msg().GetEvent().GetEnd() != nil
	}
	if string(out) != "1\n2\n3\n" || !ended || stream.Err() != nil {
		t.Errorf("output %q, ended %v, %v", out, ended, stream.Err())
	}
}

func startSleep(t *testing.T, c *http.Client, b *box, token string) *connect.ServerStreamForClient[processpb.StartResponse] {
	t.Helper()
	client, err := envd.NewClient(envd.ClientConfig{HTTP: c, BaseURL: strings.TrimSuffix(b.url(envd.Port, "/"), "/"), Token: func() string { return token }, User: "root"})
	if err != nil {
		t.Fatal(err)
	}
	stream, err := client.Process().Start(t.Context(), connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sleep", Args: []string{"60"}},
	}))
	if err != nil {
		t.Fatal(err)
	}
	if !stream.Receive() || stream.Msg().GetEvent().GetStart() == nil {
		t.Fatalf("first event %v, %v", stream.Msg(), stream.Err())
	}
	pid := stream.Msg().GetEvent().GetStart().GetPid()
	t.Cleanup(func() {
		if p, err := os.FindProcess(int(pid)); err == nil {
			_ = p.Kill()
		}
	})
	return stream
}

func moveFile(t *testing.T, client *envd.Client, path string) {
	t.Helper()
	const size = 8 << 20
	want := sha256.New()
	content := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{7}), size), want)
	if _, err := client.Upload(t.Context(), path, content, nil); err != nil {
		t.Fatalf("upload: %v", err)
	}
	body, err := client.Download(t.Context(), path)
	if err != nil {
		t.Fatalf("download: %v", err)
	}
	got := sha256.New()
	n, err := io.Copy(got, body)
	_ = body.Close()
	if err != nil || n != size || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Errorf("downloaded %d bytes, %v; or other bytes", n, err)
	}
}

// boxDialer is a sandbox whose services all listen on its own loopback: but for the agent, every
// port refuses.
type boxDialer struct {
	net.Dialer
	agent, closed string
}

func (d *boxDialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if _, port, err := net.SplitHostPort(address); err == nil && port == target.PortText(envd.Port) {
		return d.Dialer.DialContext(ctx, network, d.agent)
	}
	return d.Dialer.DialContext(ctx, network, d.closed)
}

// TestServiceOnLoopback reaches services that listen on the loopback of their sandbox alone.
func TestServiceOnLoopback(t *testing.T) {
	dialer := &boxDialer{closed: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), closedPort(t)).String()}
	w := newFixture(t, func(c *Config) { c.Dialer, c.Verifier = dialer, identity.NewVerifier(c.Tokens.(*sandbox.Tokens)) })
	b := w.box("local")
	dialer.agent = startAgent(t, b.id, w.tokens.Agent(b.id))
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/ws" {
			echoWebSocket(w, r)
			return
		}
		_, _ = io.Copy(w, r.Body)
	})
	for name, httpClient := range w.clients(t) {
		for range 2 { // a new connection, and one that was used before
			res, text := w.do(httpClient, http.MethodPost, b.url(port, "/"), strings.NewReader(name)) //nolint:bodyclose // do closes it
			if res.StatusCode != http.StatusOK || text != name {
				t.Errorf("%s: got %d %q", name, res.StatusCode, text)
			}
		}
	}
	c, _, err := websocket.Dial(t.Context(), b.url(port, "/ws"), &websocket.DialOptions{HTTPClient: w.client}) //nolint:bodyclose // the library does
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.CloseNow() }()
	if err := c.Write(t.Context(), websocket.MessageText, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, got, err := c.Read(t.Context()); err != nil || string(got) != "hello" {
		t.Errorf("WebSocket: %q, %v", got, err)
	}
	if status, text := w.get(b.url(closedPort(t), "/")); status != http.StatusBadGateway || !strings.Contains(text, reply.MessagePort) {
		t.Errorf("a port without a listener: %d %q", status, text)
	}
	b.kill()
	if _, _, err := c.Read(t.Context()); err == nil {
		t.Error("a WebSocket outlives its sandbox")
	}
}
