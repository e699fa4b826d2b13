// Package settings holds what /init and a restore may change: token, environment and defaults, and
// the user that a request acts as. It starts nothing and reads no request body.
//
// Settings.mu is a leaf.
package settings

import (
	"cmp"
	"crypto/subtle"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

var (
	// ErrToken means that a request has no valid token.
	ErrToken = errors.New("unauthorized: a valid " + envd.HeaderAccessToken + " header is needed")
	// ErrInvalid means that a request has impossible settings.
	ErrInvalid = errors.New("invalid request")
)

// Settings is what /init may change: token, environment and defaults.
type Settings struct {
	Accounts account.Database

	mu      sync.RWMutex
	id      string            // +checklocks:mu
	token   string            // +checklocks:mu
	hash    string            // of the token, in hex, until the token is known; +checklocks:mu
	open    bool              // +checklocks:mu
	env     map[string]string // +checklocks:mu
	user    string            // +checklocks:mu
	workdir string            // +checklocks:mu
	last    time.Time         // +checklocks:mu
}

// New takes settings from a configuration.
func New(cfg *envd.Config, acc account.Database) *Settings {
	s := &Settings{
		Accounts: acc, id: cfg.SandboxID, token: cfg.AccessToken, hash: cfg.AccessTokenSHA256, open: cfg.Open, user: cmp.Or(cfg.DefaultUser, cfg.User),
		workdir: cmp.Or(cfg.DefaultWorkdir, cfg.Workdir), // the latter is the template's, or the image's
		env:     envOf(cfg),
	}
	if s.user == "" {
		s.user = envd.DefaultUser
		if uid := os.Geteuid(); uid != 0 { // it can run programs as no other user
			s.user = strconv.Itoa(uid)
		} else if _, err := acc.Lookup(s.user); err != nil {
			s.user = "root"
		}
	}
	return s
}

// envOf is a configuration's environment.
func envOf(cfg *envd.Config) map[string]string {
	env := map[string]string{"E2B_SANDBOX": "true"}
	if cfg.SandboxID != "" {
		env["E2B_SANDBOX_ID"] = cfg.SandboxID
	}
	if cfg.TemplateID != "" {
		env["E2B_TEMPLATE_ID"] = cfg.TemplateID
	}
	maps.Copy(env, cfg.Env)
	return env
}

// Restore replaces identity, token and environment by those of the configuration, which includes
// earlier /init requests. It reports whether the sandbox's ID changed.
func (s *Settings) Restore(cfg *envd.Config) (another bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	another = s.id != cfg.SandboxID
	s.id, s.token, s.hash, s.open, s.env = cfg.SandboxID, cfg.AccessToken, cfg.AccessTokenSHA256, cfg.Open, envOf(cfg)
	s.last = time.Time{} // a previous owner may have set any time
	return another
}

// IsOpen reports whether requests need no token.
func (s *Settings) IsOpen() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.open
}

// Accepts reports whether presented is the token, or none is needed.
func (s *Settings) Accepts(presented string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.acceptsLocked(presented)
}

// +checklocksread:s.mu
func (s *Settings) acceptsLocked(presented string) bool {
	switch {
	case s.open:
		return true
	case s.token != "":
		return subtle.ConstantTimeCompare([]byte(s.token), []byte(presented)) == 1
	case s.hash != "":
		return subtle.ConstantTimeCompare([]byte(s.hash), []byte(envd.TokenSHA256(presented))) == 1
	}
	return false
}

// Verify checks a file URL's signature.
func (s *Settings) Verify(signature, path string, op envd.Operation, user string, expiry *time.Time) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.token == "" && s.hash != "" {
		return ErrToken
	}
	return envd.Verify(signature, path, op, user, s.token, expiry, time.Now())
}

// Prove returns the response to a nonce that was received at an address of the sandbox.
func (s *Settings) Prove(nonce string, addr netip.Addr) envd.IdentityProof {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return envd.ProveIdentity(s.token, s.hash, nonce, s.id, addr)
}

// Apply applies an /init request completely or not at all. presented is the token of the header. A
// secured agent accepts a request with the token in the header or, so that a request can be repeated,
// in the body. An agent without a token accepts its first one.
func (s *Settings) Apply(req envd.InitRequest, presented string) (applied bool, err error) {
	if err := s.check(req); err != nil {
		return false, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.token == "" && s.hash == "" && req.AccessToken != ""
	if !first && !s.acceptsLocked(presented) && !s.acceptsLocked(req.AccessToken) {
		return false, ErrToken
	}
	if req.Timestamp != nil {
		if req.Timestamp.Before(s.last) {
			return false, nil
		}
		s.last = *req.Timestamp
	}
	if req.AccessToken != "" {
		s.token, s.hash, s.open = req.AccessToken, "", false
	}
	if req.Open { // the token still proves the identity
		s.open = true
	}
	if req.DefaultUser != "" {
		s.user = req.DefaultUser
	}
	if req.DefaultWorkdir != "" {
		s.workdir = req.DefaultWorkdir
	}
	maps.Copy(s.env, req.EnvVars)
	return true, nil
}

func (s *Settings) check(req envd.InitRequest) error {
	for k, v := range req.EnvVars {
		if err := CheckVariable(k, v); err != nil {
			return fmt.Errorf("envVars: %w", err)
		}
	}
	if req.DefaultUser != "" {
		if _, err := s.Accounts.Resolve(req.DefaultUser); err != nil {
			return fmt.Errorf("defaultUser: %w", err)
		}
	}
	if req.DefaultWorkdir != "" && !filepath.IsAbs(req.DefaultWorkdir) {
		return fmt.Errorf("defaultWorkdir: %q is not an absolute path", req.DefaultWorkdir)
	}
	return nil
}

// CheckVariable refuses names and values that an environment cannot hold.
func CheckVariable(k, v string) error {
	if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
		return fmt.Errorf("%q is not a variable's name, or its value has a zero byte", k)
	}
	return nil
}

// Defaults are the user, in an image configuration's form, and the directory of requests without
// them.
func (s *Settings) Defaults() (user, workdir string) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.user, s.workdir
}

// Envs is a copy of the sandbox's environment.
func (s *Settings) Envs() map[string]string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.env)
}

// Environ makes a process's environment. The request overrides the sandbox, the sandbox the user, and
// the user the agent, whose PATH alone is used.
func (s *Settings) Environ(acc account.User, request map[string]string) map[string]string {
	env := map[string]string{"PATH": os.Getenv("PATH"), "HOME": acc.Home, "USER": acc.Name, "LOGNAME": acc.Name}
	if env["PATH"] == "" {
		env["PATH"] = defaultPath
	}
	maps.Copy(env, s.Envs())
	maps.Copy(env, request)
	return env
}
