package agent_test

import (
	"net"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
)

// proofs returns whether an agent proves to be a sandbox by its token, and by the token's hash, on one connection.
func (a *testAgent) proofs(v *identity.Verifier, id sandbox.ID) (token, hash bool) {
	a.t.Helper()
	c, err := (&net.Dialer{}).DialContext(a.t.Context(), "tcp", strings.TrimPrefix(a.base, "http://"))
	noError(a.t, err)
	defer func() { noError(a.t, c.Close()) }()
	hash = v.VerifyHash(a.t.Context(), c, id) == nil
	token = v.Verify(a.t.Context(), c, id) == nil
	return token, hash
}

func TestIdentity(t *testing.T) {
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	noError(t, err)
	v, id := identity.NewVerifier(tokens), sandbox.IDOf("a")
	secret := tokens.Agent(id)
	hashed := envd.Config{SandboxID: string(id), AccessTokenSHA256: envd.TokenSHA256(secret)}
	open := hashed
	open.Open = true
	for name, tt := range map[string]struct {
		cfg         envd.Config
		token, hash bool
		init        *envd.InitRequest // after which token and hash are proved
	}{
		"token":            {cfg: envd.Config{SandboxID: string(id), AccessToken: secret}, token: true, hash: true},
		"token, opened":    {cfg: envd.Config{SandboxID: string(id), AccessToken: secret}, token: true, hash: true, init: &envd.InitRequest{Open: true}},
		"hash, then token": {cfg: hashed, hash: true, init: &envd.InitRequest{AccessToken: secret}},
		"hash, opened":     {cfg: hashed, hash: true, init: &envd.InitRequest{AccessToken: secret, Open: true}},
		"open":             {cfg: open, hash: true, init: &envd.InitRequest{AccessToken: secret, Open: true}},
		"no token":         {cfg: envd.Config{SandboxID: string(id)}, init: &envd.InitRequest{AccessToken: secret}},
		"no ID":            {cfg: envd.Config{AccessToken: secret}},
		"other token":      {cfg: envd.Config{SandboxID: string(id), AccessToken: "other"}},
		"other sandbox":    {cfg: envd.Config{SandboxID: "b", AccessToken: secret}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := startGuarded(t, tt.cfg)
			if token, hash := a.proofs(v, id); token != tt.token || hash != tt.hash {
				t.Errorf("proved by token %v, by its hash %v", token, hash)
			}
			if tt.init == nil {
				return
			}
			noError(t, a.client("root", secret).Init(t.Context(), *tt.init))
			if token, hash := a.proofs(v, id); !token || !hash {
				t.Errorf("once it knows its token: proved by token %v, by its hash %v", token, hash)
			}
			if _, err := a.client("root").Envs(t.Context()); (err == nil) != tt.init.Open {
				t.Errorf("a request without a token: %v", err)
			}
		})
	}
}

func TestIdentityRefuses(t *testing.T) {
	a := startGuarded(t, envd.Config{SandboxID: "a"})
	for query, want := range map[string]int{
		"":                                     400,
		"?nonce=" + strings.Repeat("n", 15):    400,
		"?nonce=" + strings.Repeat("n", 65):    400,
		"?nonce=" + strings.Repeat("n", 64):    503, // it has no token
		"?nonce=" + strings.Repeat("n", 1<<16): 400,
	} {
		if status, _, body := a.do("GET", envd.PathIdentity+query, ""); status != want {
			t.Errorf("%.40s: %d %s, want %d", query, status, body, want)
		}
	}
	if status, _, _ := a.do("POST", envd.PathIdentity, ""); status != 401 {
		t.Errorf("POST: %d", status)
	}
}
