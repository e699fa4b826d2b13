// Package acme has the certificates of public domains issued, and renewed in time, by an authority
// that speaks ACME (RFC 8555), and keeps them in files.
//
// It never stands in the way: while it has no certificate for a name, or a renewal fails, whoever
// serves goes on with what there is. It installs no trust, revokes nothing, and asks for nothing
// on the word of a client: what it wants follows from its configuration alone.
//
// Lock order: Manager.mu alone; nothing is called while it is held.
package acme

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/acme"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// LetsEncrypt is the directory of Let's Encrypt.
const LetsEncrypt = acme.LetsEncryptURL

// Protocol is what a listener must offer in ALPN, so that the authority can ask over TLS.
const Protocol = acme.ALPNProto

// Config is what New needs.
type Config struct {
	// Dir keeps accounts, keys and certificates; it is made if need be.
	Dir string
	// Directory is the authority's URL. Empty: LetsEncrypt.
	Directory string
	// Roots are trusted for Directory. Nil: the system's.
	Roots *x509.CertPool
	// Email is told to the authority. It may be empty.
	Email string
	// Domains are those of sandboxes. A ":port" is ignored, and so is what no authority certifies:
	// names of one label, and those below localhost.
	Domains []string
	// DNS proves the domains by their records, so that *.<domain> can be certified as well. Nil: the
	// names of the API alone are, and the authority asks at ports 443 and 80 of this machine.
	DNS DNS
	// Settings tells one configuration of DNS from another: with new ones, a try need not wait.
	Settings string
	Log      *slog.Logger
}

// Manager has certificates issued while Run runs. Its methods may be called from any goroutine.
type Manager struct {
	cfg   Config
	log   *slog.Logger
	dir   string // of this authority
	wants []certSpec
	// pause is the least time between two tries for one certificate.
	pause time.Duration

	mu sync.Mutex
	// held and tries are by a want's id, byName by each name in a certificate.
	held   map[string]*tls.Certificate // +checklocks:mu
	byName map[string]*tls.Certificate // +checklocks:mu
	tries  map[string]orderAttempt     // +checklocks:mu
	// proofs are those that lie ready, by name, or by host and path.
	proofs map[string]challengeResponse // +checklocks:mu
}

// challengeResponse is what the authority asks for: over TLS a certificate, over HTTP a text.
type challengeResponse struct {
	cert   *tls.Certificate
	answer string
}

// certSpec is one certificate to have.
type certSpec struct {
	id    string // names its file
	names []string
}

// New checks the configuration and reads what was issued before. It starts nothing and asks nobody.
// A file that cannot be read is left where it is, and its certificate asked for again.
func New(cfg Config) (*Manager, error) {
	if cfg.Dir == "" || cfg.Log == nil {
		return nil, fmt.Errorf("acme: a directory for the state and a log are needed: %w", errs.ErrInvalid)
	}
	if cfg.Directory == "" {
		cfg.Directory = LetsEncrypt
	}
	m := &Manager{
		cfg: cfg, log: cfg.Log.With(telemetry.Component, "acme"), dir: filepath.Join(cfg.Dir, folderOf(cfg.Directory)), pause: time.Minute,
		held: map[string]*tls.Certificate{}, byName: map[string]*tls.Certificate{}, tries: map[string]orderAttempt{},
		proofs: map[string]challengeResponse{},
	}
	if m.wants = wantsOf(cfg.Domains, cfg.DNS != nil); len(m.wants) == 0 {
		return nil, fmt.Errorf("acme: none of the domains %s is one that an authority certifies: %w", strings.Join(cfg.Domains, ", "), errs.ErrInvalid)
	}
	if err := os.MkdirAll(m.dir, dirMode); err != nil {
		return nil, fmt.Errorf("acme: make directory: %w", err)
	}
	m.load()
	return m, nil
}

// wantsOf are the certificates to have: one for each domain and the names below it, or, where
// there can be no wildcard, one for each name of the API, so that one that does not lead here
// does not keep the others from theirs.
func wantsOf(domains []string, wildcard bool) (out []certSpec) {
	for _, d := range domains {
		d, _, _ = strings.Cut(strings.ToLower(d), ":")
		d = strings.Trim(d, ".")
		if !strings.Contains(d, ".") || strings.HasSuffix(d, ".localhost") {
			continue
		}
		if wildcard {
			out = append(out, certSpec{id: d, names: []string{d, "*." + d}})
			continue
		}
		for _, name := range []string{"api." + d, "sandbox." + d, d} {
			out = append(out, certSpec{id: name, names: []string{name}})
		}
	}
	return out
}

// Certificate is the one that a client should see: the newest that covers the name that it asks
// for, or the proof that the authority asks for. Nil if there is neither. It blocks for nobody.
func (m *Manager) Certificate(hello *tls.ClientHelloInfo) *tls.Certificate {
	name := strings.TrimSuffix(strings.ToLower(hello.ServerName), ".")
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(hello.SupportedProtos) == 1 && hello.SupportedProtos[0] == Protocol {
		return m.proofs[name].cert
	}
	if c := m.byName[name]; c != nil {
		return c
	}
	_, parent, _ := strings.Cut(name, ".")
	return m.byName["*."+parent]
}

// ServeChallenge answers a question of the authority over HTTP, and reports whether it was one
// that has an answer now.
func (m *Manager) ServeChallenge(w http.ResponseWriter, r *http.Request) bool {
	if !strings.HasPrefix(r.URL.Path, "/.well-known/acme-challenge/") {
		return false
	}
	host, _, _ := strings.Cut(strings.ToLower(r.Host), ":")
	m.mu.Lock()
	p, ok := m.proofs[host+r.URL.Path]
	m.mu.Unlock()
	if !ok {
		return false
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	_, _ = w.Write([]byte(p.answer)) // who asked may have gone
	return true
}

// State is how one certificate stands.
type State struct {
	Names []string
	// Expires is zero while there is none.
	Expires time.Time
	Issuer  string
	// Next is when it is asked for next.
	Next time.Time
	// Failures are those since the last success, and Failure says what the last one was.
	Failures int
	Failure  string
}

// States tells of all certificates, in the order of the domains.
func (m *Manager) States() []State {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]State, 0, len(m.wants))
	for _, w := range m.wants {
		s := State{Names: w.names, Next: m.dueLocked(w)}
		if c := m.held[w.id]; c != nil {
			s.Expires, s.Issuer = c.Leaf.NotAfter, c.Leaf.Issuer.String()
		}
		t := m.tries[w.id]
		s.Failures, s.Failure = t.Failures, t.Failure
		out = append(out, s)
	}
	return out
}

// Wildcard reports whether the hosts of sandboxes are certified too.
func (m *Manager) Wildcard() bool { return m.cfg.DNS != nil }
