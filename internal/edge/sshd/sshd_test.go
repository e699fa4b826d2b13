package sshd_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/edge/sshd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// box is a sandbox of the namespace "a", whose API key is "key-a".
const box = sandbox.ID("i0123456789abcdefghi")

// noGateway refuses all visits. test/e2e has a real one.
type noGateway struct{}

func (noGateway) Visit(context.Context, sandbox.ID) (*gateway.Visit, error) {
	return nil, &reply.Reply{Status: http.StatusConflict, Message: "not now"}
}

// tokens derives them from IDs.
type tokens struct{}

func (tokens) Agent(id sandbox.ID) string   { return "agent-" + string(id) }
func (tokens) Traffic(id sandbox.ID) string { return "traffic-" + string(id) }

// server is a running one.
type server struct {
	t     *testing.T
	addr  string
	table *route.Table
	key   ssh.Signer // of the namespace "a", until revoked
	stop  func() error
	known *sync.Map // namespace by fingerprint
}

func start(t *testing.T, change func(*sshd.Config)) *server {
	t.Helper()
	s := &server{t: t, table: route.NewTable(), key: newKey(t), known: &sync.Map{}}
	s.known.Store(ssh.FingerprintSHA256(s.key.PublicKey()), "a")
	s.table.Upsert(route.Route{ID: box, Namespace: "a", Name: "box", State: sandbox.Paused, ResourceVersion: "1"})
	s.table.MarkSynced()
	host, err := sshd.OpenHostKey(filepath.Join(t.TempDir(), "keys", "host"))
	if err != nil {
		t.Fatal(err)
	}
	cfg := sshd.Config{
		Gateway: noGateway{}, Routes: s.table, Tokens: tokens{}, HostKey: host, Log: telemetry.Discard(),
		KeyNamespace: func(_ context.Context, key string) (string, bool) { return strings.CutPrefix(key, "key-") },
		SSHNamespaces: func(_ context.Context, fingerprint string) ([]string, error) {
			if namespace, ok := s.known.Load(fingerprint); ok {
				return []string{namespace.(string)}, nil
			}
			return nil, nil
		},
	}
	if change != nil {
		change(&cfg)
	}
	srv, err := sshd.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // on the loopback
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ctx, l) }()
	s.addr = l.Addr().String()
	s.stop = func() error {
		cancel()
		err := <-done
		done <- err
		return err
	}
	t.Cleanup(func() { _ = s.stop() })
	return s
}

func newKey(t *testing.T) ssh.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return signer
}

// connect opens a TCP connection, and sends text first.
func (s *server) connect(text string) net.Conn {
	s.t.Helper()
	nc, err := net.Dial("tcp", s.addr) //nolint:noctx // on the loopback
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = nc.Close() })
	_, _ = io.WriteString(nc, text)
	return nc
}

// login logs in over a connection that begins with a text.
func (s *server) login(text, user string, auth ...ssh.AuthMethod) (*ssh.Client, error) {
	s.t.Helper()
	sc, chans, reqs, err := ssh.NewClientConn(s.connect(text), s.addr, &ssh.ClientConfig{User: user, Auth: auth, HostKeyCallback: ssh.InsecureIgnoreHostKey()}) //nolint:gosec // a test's
	if err != nil {
		return nil, err
	}
	c := ssh.NewClient(sc, chans, reqs)
	s.t.Cleanup(func() { _ = c.Close() })
	return c, nil
}

// TestLogin lets in the owners of a sandbox, and refuses others in one way.
func TestLogin(t *testing.T) {
	s := start(t, nil)
	stranger := newKey(t)
	s.known.Store(ssh.FingerprintSHA256(stranger.PublicKey()), "b")
	id := string(box)
	tests := map[string]struct {
		text, user string
		auth       ssh.AuthMethod
		fine       bool
	}{
		"key":                          {user: id, auth: ssh.PublicKeys(s.key), fine: true},
		"key, another user":            {user: id + "+root", auth: ssh.PublicKeys(s.key), fine: true},
		"key after another":            {user: id, auth: ssh.PublicKeys(stranger, s.key), fine: true},
		"preface":                      {text: sandbox.SSHPreface + id + "\r\n", user: "root", auth: ssh.PublicKeys(s.key), fine: true},
		"API key":                      {user: id, auth: ssh.Password("key-a"), fine: true},
		"agent's token":                {user: id, auth: ssh.Password("agent-" + id), fine: true},
		"unknown key":                  {user: id, auth: ssh.PublicKeys(newKey(t))},
		"key of another tenant":        {user: id, auth: ssh.PublicKeys(stranger)},
		"API key of another tenant":    {user: id, auth: ssh.Password("key-b")},
		"traffic token":                {user: id, auth: ssh.Password("traffic-" + id)},
		"no such sandbox":              {user: "i0123456789abcdefghj", auth: ssh.PublicKeys(s.key)},
		"its token":                    {user: "i0123456789abcdefghj", auth: ssh.Password("agent-i0123456789abcdefghj")},
		"no ID":                        {user: "root", auth: ssh.PublicKeys(s.key)},
		"token of the empty ID":        {user: "", auth: ssh.Password("agent-")},
		"another sandbox in a preface": {text: sandbox.SSHPreface + "i0123456789abcdefghj\n", user: id, auth: ssh.PublicKeys(s.key)},
		"upper case":                   {user: strings.ToUpper(id), auth: ssh.PublicKeys(s.key)},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c, err := s.login(tt.text, tt.user, tt.auth)
			if tt.fine != (err == nil) {
				t.Errorf("got %v, want success: %t", err, tt.fine)
			}
			if err != nil && !strings.Contains(err.Error(), "unable to authenticate") {
				t.Errorf("another refusal: %v", err)
			}
			if err == nil {
				_ = c.Close()
			}
		})
	}
}

// TestRevoked refuses channels of a connection whose key was revoked, and ends it with the sandbox.
func TestRevoked(t *testing.T) {
	s := start(t, nil)
	c, err := s.login("", string(box), ssh.PublicKeys(s.key))
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	session, err := c.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	session.Stderr = &stderr
	if err := session.Run("true"); err == nil || stderr.String() != "barchan: not now\n" {
		t.Errorf("a sandbox that cannot be visited: %v, %q", err, stderr.String())
	}
	for network, address := range map[string]string{"tcp": "example.org:80", "unix": "relative"} {
		if _, err := c.Dial(network, address); err == nil {
			t.Errorf("a channel to %s", address)
		}
	}
	s.known.Delete(ssh.FingerprintSHA256(s.key.PublicKey()))
	if _, err := c.NewSession(); err == nil || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("a session after the key was revoked: %v", err)
	}
	s.table.Delete(box, "2")
	if err := c.Wait(); err == nil {
		t.Error("the connection outlives the sandbox")
	}
}

// TestGuesses closes a connection at its first wrong password once an address has sent too many, and still lets in the right one.
func TestGuesses(t *testing.T) {
	s := start(t, nil)
	tries := 0
	guess := ssh.RetryableAuthMethod(ssh.PasswordCallback(func() (string, error) {
		tries++
		return "guess", nil
	}), 10)
	last := 10
	for range 4 {
		tries = 0
		if _, err := s.login("", string(box), guess); err == nil {
			t.Fatal("a guess is let in")
		}
		if tries > last {
			t.Errorf("%d tries after %d", tries, last)
		}
		last = tries
	}
	if last != 1 {
		t.Errorf("%d tries over the limit, want 1", last)
	}
	if _, err := s.login("", string(box), ssh.Password("key-a")); err != nil {
		t.Errorf("the right key from the same address: %v", err)
	}
}

// TestLimits bounds the connections of an address that have not logged in.
func TestLimits(t *testing.T) {
	s := start(t, nil)
	var open []net.Conn
	for range sshd.MaxLoginsPerHost {
		nc := s.connect("")
		if _, err := io.ReadFull(nc, make([]byte, 4)); err != nil { // the version
			t.Fatal(err)
		}
		open = append(open, nc)
	}
	if n, err := s.connect("").Read(make([]byte, 1)); n > 0 {
		t.Errorf("one more is served, %v", err)
	}
	_ = open[0].Close()
	eventually.NoError(t, "a place is free", func() error {
		_, err := s.login("", string(box), ssh.PublicKeys(s.key))
		return err
	})
}

// TestEnds closes connections that are idle, or whose client does not answer, and all at a stop.
func TestEnds(t *testing.T) {
	s := start(t, func(c *sshd.Config) { c.Keepalive, c.Idle = 5*time.Millisecond, 20*time.Millisecond })
	c, err := s.login("", string(box), ssh.PublicKeys(s.key))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // it is idle

	s = start(t, func(c *sshd.Config) { c.Keepalive = 5 * time.Millisecond })
	nc := s.connect("")
	_, _, _, err = ssh.NewClientConn(nc, s.addr, &ssh.ClientConfig{User: string(box), Auth: []ssh.AuthMethod{ssh.PublicKeys(s.key)}, HostKeyCallback: ssh.InsecureIgnoreHostKey()}) //nolint:gosec // a test's
	if err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the end of one that does not answer", func() bool { _, err := nc.Write([]byte{0}); return err != nil })

	s = start(t, func(c *sshd.Config) { c.Grace = time.Hour })
	if c, err = s.login("", string(box), ssh.PublicKeys(s.key)); err != nil {
		t.Fatal(err)
	}
	silent := s.connect("")
	if err := s.stop(); !errors.Is(err, context.Canceled) {
		t.Errorf("the server ends with %v", err)
	}
	_ = c.Wait()
	_, _ = io.Copy(io.Discard, silent)
}

// TestHostKey makes a key once, which only its owner can read, and replaces no other file.
func TestHostKey(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys", "host")
	first, err := sshd.OpenHostKey(file)
	if err != nil {
		t.Fatal(err)
	}
	again, err := sshd.OpenHostKey(file)
	if err != nil || again.Public() != first.Public() || !strings.HasPrefix(first.Public(), "ssh-ed25519 ") {
		t.Errorf("%v, then %v, %v", first.Public(), again.Public(), err)
	}
	if st, err := os.Stat(file); err != nil || st.Mode() != fs.FileMode(0o600) {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if err := os.WriteFile(file, []byte("none"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := sshd.OpenHostKey(file); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a file without a key: %v", err)
	}
}
