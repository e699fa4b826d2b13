package agent

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

var (
	errToken   = errors.New("unauthorized: a valid " + envd.HeaderAccessToken + " header is needed")
	errInvalid = errors.New("invalid request")
)

// settings is what /init may change: token, environment and defaults.
type settings struct {
	accounts accounts

	mu      sync.RWMutex
	id      string            // +checklocks:mu
	token   string            // +checklocks:mu
	open    bool              // +checklocks:mu
	env     map[string]string // +checklocks:mu
	user    string            // +checklocks:mu
	workdir string            // +checklocks:mu
	last    time.Time         // +checklocks:mu
}

func newSettings(cfg *envd.Config, acc accounts) *settings {
	s := &settings{
		accounts: acc, id: cfg.SandboxID, token: cfg.AccessToken, open: cfg.Open, user: cfg.DefaultUser, workdir: cfg.DefaultWorkdir, env: envOf(cfg),
	}
	if s.workdir == "" {
		s.workdir = cfg.Workdir // the template's, or the image's
	}
	if s.user == "" {
		s.user = cfg.User
	}
	if s.user == "" {
		s.user = envd.DefaultUser
		if _, err := acc.lookup(s.user); err != nil {
			s.user = "root"
		}
	}
	return s
}

// envOf is the environment that a configuration asks for.
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

// restore replaces what makes a sandbox this one by what its configuration says now; what /init
// had added is in there. It reports whether the sandbox has become another one.
func (s *settings) restore(cfg *envd.Config) (another bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	another = s.id != cfg.SandboxID
	s.id, s.token, s.open, s.env = cfg.SandboxID, cfg.AccessToken, cfg.Open, envOf(cfg)
	s.last = time.Time{} // an owner of before may have said what it liked
	return another
}

// isOpen reports whether the token is asked for at all.
func (s *settings) isOpen() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.open
}

// accepts reports whether presented is the token, or none is asked for.
func (s *settings) accepts(presented string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.acceptsLocked(presented)
}

// +checklocksread:s.mu
func (s *settings) acceptsLocked(presented string) bool {
	return s.open || (s.token != "" && subtle.ConstantTimeCompare([]byte(s.token), []byte(presented)) == 1)
}

// verify checks a file URL's signature.
func (s *settings) verify(signature, path string, op envd.Operation, user string, expiry *time.Time) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return envd.Verify(signature, path, op, user, s.token, expiry, time.Now())
}

// apply does what /init asks for: all of it, or nothing. presented is the
// token that came in the header. A secured agent takes a request that has the
// token in the header or, so that repeating a request is harmless, in the body.
// One that has no token yet takes its first.
func (s *settings) apply(req envd.InitRequest, presented string) (applied bool, err error) {
	if err := s.check(req); err != nil {
		return false, fmt.Errorf("%w: %w", errInvalid, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.token == "" && req.AccessToken != ""
	if !first && !s.acceptsLocked(presented) && !s.acceptsLocked(req.AccessToken) {
		return false, errToken
	}
	if req.Timestamp != nil {
		if req.Timestamp.Before(s.last) {
			return false, nil
		}
		s.last = *req.Timestamp
	}
	if req.AccessToken != "" || req.Open {
		s.token, s.open = req.AccessToken, req.Open
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

func (s *settings) check(req envd.InitRequest) error {
	if req.Open && req.AccessToken != "" {
		return errors.New("open: cannot come with an accessToken")
	}
	for k, v := range req.EnvVars {
		if err := checkEnv(k, v); err != nil {
			return fmt.Errorf("envVars: %w", err)
		}
	}
	if req.DefaultUser != "" {
		if _, err := s.accounts.lookup(req.DefaultUser); err != nil {
			return fmt.Errorf("defaultUser: %w", err)
		}
	}
	if req.DefaultWorkdir != "" && !filepath.IsAbs(req.DefaultWorkdir) {
		return fmt.Errorf("defaultWorkdir: %q is not an absolute path", req.DefaultWorkdir)
	}
	return nil
}

func checkEnv(k, v string) error {
	if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
		return fmt.Errorf("%q is not a variable's name, or its value has a zero byte", k)
	}
	return nil
}

// defaults are the user that a request without one runs as, as image configurations name it,
// and where.
func (s *settings) defaults() (user, workdir string) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.user, s.workdir
}

// envs is a copy of the sandbox's environment.
func (s *settings) envs() map[string]string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.env)
}

// environ makes a process's environment. What is more special wins: the
// request over the sandbox over the user over the agent, of which PATH alone is taken.
func (s *settings) environ(acc account, request map[string]string) map[string]string {
	env := map[string]string{"PATH": os.Getenv("PATH"), "HOME": acc.home, "USER": acc.name, "LOGNAME": acc.name}
	if env["PATH"] == "" {
		env["PATH"] = defaultPath
	}
	maps.Copy(env, s.envs())
	maps.Copy(env, request)
	return env
}

// envList is an environment as the kernel takes it, in a fixed order.
func envList(env map[string]string) []string {
	list := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		list = append(list, k+"="+env[k])
	}
	return list
}
