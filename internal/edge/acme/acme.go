// Package acme obtains and renews certificates of public domains from an ACME authority (RFC 8555),
// and stores them in files.
//
// It never blocks a server: without a certificate for a name, or after a failed renewal, the server
// continues with its existing certificates. It installs no trust, revokes nothing, and orders nothing
// because of a client's request: the certificates follow from its configuration alone.
//
// Lock order: Manager.mu alone; no function is called while it is held.
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

// Protocol must be offered by listeners in ALPN, so that the authority can validate over TLS.
const Protocol = acme.ALPNProto

// Config configures a Manager.
type Config struct {
	// Dir has accounts, keys and certificates; it is created if missing.
	Dir string
	// Directory is the authority's URL. Empty: LetsEncrypt.
	Directory string
	// Roots are trusted for Directory. Nil: the system's.
	Roots *x509.CertPool
	// Email is the account's contact. It may be empty.
	Email string
	// Domains are the domains of sandboxes. A ":port" is ignored, and so are names that no authority
	// certifies: names of one label, and those below localhost.
	Domains []string
	// DNS answers challenges by records, so that *.<domain> can be certified as well. Nil: only the
	// names of the API are certified, and the authority validates at ports 443 and 80 of this machine.
	DNS DNS
	// Settings identifies a configuration of DNS: after a change, the next attempt does not wait.
	Settings string
	Log      *slog.Logger
}

// Manager obtains certificates while Run runs. Its methods may be called from any goroutine.
type Manager struct {
	cfg   Config
	log   *slog.Logger
	dir   string // of this authority
	wants []certSpec
	// pause is the minimum time between two attempts for one certificate.
	pause time.Duration

	mu sync.Mutex
	// held and tries are by a certSpec's id, byName by each name in a certificate.
	held   map[string]*tls.Certificate // +checklocks:mu
	byName map[string]*tls.Certificate // +checklocks:mu
	tries  map[string]orderAttempt     // +checklocks:mu
	// proofs are the published challenge responses, by name, or by host and path.
	proofs map[string]challengeResponse // +checklocks:mu
}

// challengeResponse answers a challenge: over TLS a certificate, over HTTP a text.
type challengeResponse struct {
	cert   *tls.Certificate
	answer string
}

// certSpec is one wanted certificate.
type certSpec struct {
	id    string // names its file
	names []string
}

// New checks the configuration and reads the stored certificates. It starts nothing and sends no
// request. An unreadable file is left in place, and its certificate ordered again.
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

// wantsOf returns the wanted certificates: one for each domain and the names below it, or, without
// wildcards, one for each name of the API, so that a name that does not lead here does not block the
// others.
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

// Certificate returns the certificate for a client: the newest that covers the requested name, or the
// challenge response for the authority. Nil if there is neither. It does not block.
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

// ServeChallenge answers an HTTP challenge of the authority, and reports whether there was a response
// for the request.
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
	_, _ = w.Write([]byte(p.answer)) // the client may be gone
	return true
}

// State is the state of one certificate.
type State struct {
	Names []string
	// Expires is zero while there is none.
	Expires time.Time
	Issuer  string
	// Next is when it is ordered next.
	Next time.Time
	// Failures counts those since the last success, and Failure is the last one's text.
	Failures int
	Failure  string
}

// States returns the states of all certificates, in the order of the domains.
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
