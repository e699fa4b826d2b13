package sshd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// maxPreface bounds the line.
const maxPreface = 128

// errDenied is the one refusal: a client learns neither which sandboxes exist nor whose a key is.
var errDenied = errors.New("permission denied")

// login is who a connection acts as.
type login struct {
	id   sandbox.ID
	user string // of the sandbox; empty: the default one
	// method is for logs and metrics.
	method string
	// fingerprint of the public key that was shown last.
	fingerprint string
	// allowed repeats the check of the credential: a key may have been revoked.
	allowed func(ctx context.Context) bool
}

type loginKey struct{}

// login authenticates a client.
func (s *Server) login(ctx context.Context, nc net.Conn) (*conn, <-chan ssh.NewChannel, <-chan *ssh.Request, error) {
	ctx, cancel := context.WithTimeout(ctx, loginTime)
	defer cancel()
	p := &prefaced{Conn: nc, br: bufio.NewReaderSize(nc, 4<<10)}
	guessed := false
	cfg := &ssh.ServerConfig{
		MaxAuthTries: maxAuthTries, ServerVersion: "SSH-2.0-Barchan",
		PublicKeyCallback: func(meta ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			return s.byPublicKey(ctx, p.login(meta), key)
		},
		PasswordCallback: func(meta ssh.ConnMetadata, password []byte) (*ssh.Permissions, error) {
			permissions, err := s.byPassword(ctx, p.login(meta), string(password))
			if err != nil {
				guessed = true
				if s.failures.CountFrom(nc.RemoteAddr().String()) > 0 {
					_ = nc.Close() // valid credentials of the same address still pass
				}
			}
			return permissions, err
		},
	}
	cfg.AddHostKey(s.cfg.HostKey.signer)
	if err := nc.SetDeadline(time.Now().Add(loginTime)); err != nil {
		return nil, nil, nil, fmt.Errorf("set deadline: %w", err)
	}
	sc, chans, reqs, err := ssh.NewServerConn(p, cfg)
	if err != nil {
		if !guessed { // a connection that tried keys alone counts once: clients try all that they have
			_ = s.failures.CountFrom(nc.RemoteAddr().String())
		}
		s.metrics.logins.WithLabelValues("any", "failed").Inc()
		return nil, nil, nil, fmt.Errorf("log in: %w", err)
	}
	who, _ := sc.Permissions.ExtraData[loginKey{}].(*login)
	s.metrics.logins.WithLabelValues(who.method, "ok").Inc()
	s.record(who, nc.RemoteAddr().String())
	c := &conn{s: s, ssh: sc, login: who, close: sync.OnceFunc(func() { _ = sc.Close() })}
	c.idle.Store(int64(s.clock()))
	return c, chans, reqs, nc.SetDeadline(time.Time{})
}

// record tells the audit log of a login.
func (s *Server) record(who *login, remote string) {
	host, _, _ := net.SplitHostPort(remote)
	e := auditlog.Entry{By: auditlog.BySSH, Name: who.method, Action: "open ssh", Sandbox: string(who.id), Address: host}
	if who.fingerprint != "" {
		e.Name += " " + who.fingerprint
	}
	if entry, exists := s.cfg.Routes.Lookup(who.id); exists {
		e.Namespace = entry.Namespace
	}
	s.cfg.Audit.Add(e)
}

// byPublicKey checks a public key; its possession is proved afterwards.
func (s *Server) byPublicKey(ctx context.Context, who *login, key ssh.PublicKey) (*ssh.Permissions, error) {
	fingerprint := ssh.FingerprintSHA256(key)
	who.method, who.fingerprint = "publickey", fingerprint
	who.allowed = func(ctx context.Context) bool {
		namespaces, err := s.cfg.SSHNamespaces(ctx, fingerprint)
		return s.owns(who.id, namespaces) && err == nil
	}
	return who.permissions(ctx)
}

// byPassword checks an API key or the sandbox's access token.
func (s *Server) byPassword(ctx context.Context, who *login, password string) (*ssh.Permissions, error) {
	who.method, who.fingerprint = "password", ""
	who.allowed = func(ctx context.Context) bool {
		isToken := sandbox.EqualToken(password, s.cfg.Tokens.Agent(who.id))
		namespace, isKey := s.cfg.KeyNamespace(ctx, password)
		entry, exists := s.cfg.Routes.Lookup(who.id)
		return exists && (isToken || isKey && namespace == entry.Namespace)
	}
	return who.permissions(ctx)
}

// owns reports whether a sandbox exists and is in one of the namespaces.
func (s *Server) owns(id sandbox.ID, namespaces []string) bool {
	entry, exists := s.cfg.Routes.Lookup(id)
	return exists && slices.Contains(namespaces, entry.Namespace)
}

func (l *login) permissions(ctx context.Context) (*ssh.Permissions, error) {
	if !l.allowed(ctx) {
		return nil, errDenied
	}
	return &ssh.Permissions{ExtraData: map[any]any{loginKey{}: l}}, nil
}

// prefaced is a client's connection that may begin with a line for us.
type prefaced struct {
	net.Conn
	br   *bufio.Reader
	once sync.Once
	// sandbox is what the line names; empty without one.
	sandbox string
	err     error
}

// Read implements net.Conn. The line is read with the first data, since some clients wait for the server's first.
func (p *prefaced) Read(b []byte) (int, error) {
	p.once.Do(func() { p.sandbox, p.err = takePreface(p.br) })
	if p.err != nil {
		return 0, p.err
	}
	return p.br.Read(b)
}

// takePreface reads the line, if there is one, and no further.
func takePreface(br *bufio.Reader) (string, error) {
	for n := 1; n <= len(sandbox.SSHPreface); n++ {
		start, err := br.Peek(n)
		if err != nil {
			return "", err
		}
		if string(start) != sandbox.SSHPreface[:n] {
			return "", nil
		}
	}
	line := make([]byte, 0, maxPreface)
	for len(line) < maxPreface {
		c, err := br.ReadByte()
		if err != nil {
			return "", err
		}
		if c == '\n' {
			return strings.TrimSuffix(strings.TrimPrefix(string(line), sandbox.SSHPreface), "\r"), nil
		}
		line = append(line, c)
	}
	return "", errors.New("the line before the SSH version is too long")
}

// login parses whom a client wants to be: ID or ID+USER, or with a preface USER. An ID that is none fits no sandbox.
func (p *prefaced) login(meta ssh.ConnMetadata) *login {
	id, user, _ := strings.Cut(meta.User(), "+")
	if p.sandbox != "" {
		id, user = p.sandbox, meta.User()
		if user == sandbox.SSHDefaultUser {
			user = ""
		}
	}
	who := &login{user: user}
	if parsed, err := sandbox.ParseID(id); err == nil && string(parsed) == id {
		who.id = parsed
	}
	return who
}
