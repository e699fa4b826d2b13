package gateway

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// withNames makes a gateway's names those of its table, and "<namespace>-key" the key of a namespace.
func withNames(c *Config) {
	c.Names = func(_ context.Context, namespace, name string) (sandbox.ID, bool) {
		return c.Routes.(*route.Table).LookupName(namespace, name)
	}
	c.KeyNamespace = func(_ context.Context, key string) (string, bool) { return strings.CutSuffix(key, "-key") }
}

// TestNamesNeedKeys: a name reaches a sandbox only with a key of its namespace or a token of its own.
// What is refused is refused alike whether or not the name exists.
func TestNamesNeedKeys(t *testing.T) {
	var seen atomic.Pointer[http.Header]
	port := backend(t, func(_ http.ResponseWriter, r *http.Request) { seen.Store(&r.Header) })
	dialer := &portDialer{agent: fmt.Sprintf("127.0.0.1:%d", port)}
	w := newFixture(t, withNames, func(c *Config) { c.Dialer = dialer })
	b := w.box("named", func(s *agents.Sandbox) { s.Spec.Barchan.Access = &agents.AccessPolicy{OpenAgent: true} })
	other := w.box("other")
	key, bearer := []string{"X-API-Key", "default-key"}, []string{"Authorization", "Bearer default-key"}
	for name, c := range map[string]struct {
		headers []string
		status  int // for the name of a sandbox that exists
		missing int // for one that does not
	}{
		"nothing":                 {nil, 401, 401},
		"key":                     {key, 200, 502},
		"bearer":                  {bearer, 200, 502},
		"bearer, and its service": {append(bearer, "X-API-Key", "mine"), 200, 502},
		"key, and its service":    {append(key, "Authorization", "Bearer mine"), 200, 502},
		"password":                {[]string{"Authorization", "Basic eDpkZWZhdWx0LWtleQ=="}, 200, 502},
		"wrong password":          {[]string{"Authorization", "Basic eDptaW5l"}, 401, 401},
		"unknown key":             {[]string{"X-API-Key", "mine"}, 401, 401},
		"key of another":          {[]string{"X-API-Key", "other-key"}, 401, 401},
		"another scheme":          {[]string{"Authorization", "Basic default-key"}, 401, 401},
		"agent's token":           {[]string{envd.HeaderAccessToken, w.tokens.Agent(b.id)}, 200, 401},
		"traffic token":           {[]string{envd.HeaderTrafficToken, w.tokens.Traffic(b.id)}, 200, 401},
		"token of another":        {[]string{envd.HeaderTrafficToken, w.tokens.Traffic(other.id)}, 401, 401},
		"token of no sandbox":     {[]string{envd.HeaderTrafficToken, ""}, 401, 401},
		"other namespace":         {append(key, target.HeaderNamespace, "secret"), 401, 401},
	} {
		for _, at := range []uint16{envd.Port, port} {
			for requested, want := range map[string]int{"named": c.status, "nosuch": c.missing} {
				w.gateway.failures = credentials.Failures{} // nothing else counts here
				seen.Store(nil)
				res, text := w.do(w.client, http.MethodGet, "http://x/files?path=/etc/shadow", nil, //nolint:bodyclose // do closes it
					append([]string{target.HeaderName, requested, target.HeaderPort, target.PortText(at)}, c.headers...)...)
				if res.StatusCode != want {
					t.Errorf("%s: %s, port %d: got %d %q, want %d", name, requested, at, res.StatusCode, text, want)
				}
				if want == http.StatusUnauthorized && (seen.Load() != nil || !strings.Contains(text, "X-API-Key") || res.Header.Get("Www-Authenticate") == "") {
					t.Errorf("%s: refused with %q and %v, or not at all", name, text, res.Header)
				}
				if h := seen.Load(); h != nil {
					text := fmt.Sprint(*h)
					if strings.Contains(text, "default-key") || strings.Contains(text, "eDpkZWZhdWx0LWtleQ") || strings.Contains(name, "service") && !strings.Contains(text, "mine") {
						t.Errorf("%s: the sandbox sees %v", name, text)
					}
				}
			}
		}
	}
}

// TestIDsNeedNoKeys: an ID in the same header is as good as in a host, and a key shown with it does not
// continue.
func TestIDsNeedNoKeys(t *testing.T) {
	var seen http.Header
	port := backend(t, func(_ http.ResponseWriter, r *http.Request) { seen = r.Header })
	w := newFixture(t, withNames)
	b := w.box("named")
	ask := func(id sandbox.ID, headers ...string) int {
		res, _ := w.do(w.client, http.MethodGet, "http://x/", nil, append([]string{target.HeaderName, string(id), target.HeaderPort, target.PortText(port)}, headers...)...) //nolint:bodyclose // do closes it
		return res.StatusCode
	}
	if status := ask(b.id); status != http.StatusOK {
		t.Errorf("by ID: %d", status)
	}
	if status := ask(b.id, "X-API-Key", "other-key"); status != http.StatusOK || seen.Get("X-API-Key") != "" {
		t.Errorf("by ID with a key: %d, the sandbox sees %v", status, seen)
	}
	if status := ask(sandbox.IDOf("gone")); status != http.StatusBadGateway {
		t.Errorf("by the ID of none: %d", status)
	}
}

// TestKeysOpenTheAgent: with an API key of the sandbox's own namespace, agent-sandbox's clients need no token of the agent.
func TestKeysOpenTheAgent(t *testing.T) {
	var seen http.Header
	port := backend(t, func(_ http.ResponseWriter, r *http.Request) { seen = r.Header })
	w := newFixture(t, withNames, func(c *Config) { c.Dialer = &portDialer{agent: fmt.Sprintf("127.0.0.1:%d", port)} })
	b := w.box("named")
	token := w.tokens.Agent(b.id)
	for name, c := range map[string]struct {
		id      string
		port    uint16
		headers []string
		want    string
	}{
		"name and key":             {"named", envd.Port, []string{"X-API-Key", "default-key"}, token},
		"ID and key":               {string(b.id), envd.Port, []string{"X-API-Key", "default-key"}, token},
		"another port":             {"named", port, []string{"X-API-Key", "default-key"}, ""},
		"a token of its own":       {"named", envd.Port, []string{"X-API-Key", "default-key", envd.HeaderAccessToken, "mine"}, "mine"},
		"ID alone":                 {string(b.id), envd.Port, nil, ""},
		"ID and another's key":     {string(b.id), envd.Port, []string{"X-API-Key", "other-key"}, ""},
		"ID, its key and its name": {string(b.id), envd.Port, []string{"X-API-Key", "other-key", target.HeaderNamespace, "other"}, ""},
	} {
		seen = nil
		res, text := w.do(w.client, http.MethodGet, "http://x/list/x", nil, append([]string{target.HeaderName, c.id, target.HeaderPort, target.PortText(c.port)}, c.headers...)...) //nolint:bodyclose // do closes it
		if res.StatusCode != http.StatusOK || seen.Get(envd.HeaderAccessToken) != c.want || seen.Get("X-API-Key") != "" {
			t.Errorf("%s: %d %s, the agent sees %v", name, res.StatusCode, text, seen)
		}
	}
}

// TestGuessesAreThrottled: failed attempts from one address are slowed down, in bounded memory, and
// those with a key are not.
func TestGuessesAreThrottled(t *testing.T) {
	port := backend(t, hello)
	w := newFixture(t, withNames)
	w.box("named")
	statuses := map[int]int{}
	for i := range 200 {
		res, text := w.do(w.client, http.MethodGet, "http://x/", nil, target.HeaderName, fmt.Sprintf("pool-%05d", i), target.HeaderPort, target.PortText(port)) //nolint:bodyclose // do closes it
		statuses[res.StatusCode]++
		if res.StatusCode == http.StatusTooManyRequests && (res.Header.Get("Retry-After") == "" || !strings.Contains(text, "key")) {
			t.Fatalf("refused with %q, %v", text, res.Header)
		}
	}
	if statuses[401] < 20 || statuses[429] == 0 || statuses[401]+statuses[429] != 200 {
		t.Errorf("guesses were answered %v", statuses)
	}
	if res, _ := w.do(w.client, http.MethodGet, "http://x/", nil, target.HeaderName, "named", target.HeaderPort, target.PortText(port), "X-API-Key", "default-key"); res.StatusCode != http.StatusOK { //nolint:bodyclose // do closes it
		t.Errorf("with a key from the same address: %d", res.StatusCode)
	}
}
