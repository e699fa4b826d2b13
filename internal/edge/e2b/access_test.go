package e2b

import (
	"context"
	"net/http"
	"os"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/kubeauth"
	"github.com/barchan-dev/barchan/internal/edge/e2b/volumes"
)

// TestAccessOfRoutes has each route of the document require a right, and no others.
func TestAccessOfRoutes(t *testing.T) {
	text, err := os.ReadFile("api/openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var document struct {
		Paths map[string]map[string]any
	}
	if err := yaml.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	routes := map[string]bool{}
	for path, methods := range document.Paths {
		for method := range methods {
			if method != "parameters" {
				routes[strings.ToUpper(method)+" "+path] = true
			}
		}
	}
	for route := range routes {
		if _, path, _ := strings.Cut(route, " "); strings.HasPrefix(path, volumes.ContentPath) {
			continue // the volume's token is needed, and no key
		}
		if right := rightsOf[route]; right.access.Verb == "" || right.access.Resource.Resource == "" || !right.scope.Known() {
			t.Errorf("%s requires no right", route)
		}
	}
	for route := range rightsOf {
		if !routes[route] {
			t.Errorf("%s is no route", route)
		}
	}
}

// tokenHolders are the verbs that the holder of a token may use in the team's namespace.
type tokenHolders map[string]string

// Authorize implements Tokens.
func (h tokenHolders) Authorize(_ context.Context, key string, access kubeauth.Access) (string, error) {
	verbs, known := h[key]
	switch {
	case key == "away":
		return "", errs.Public(errs.ErrUnavailable, "the cluster does not answer")
	case !known:
		return "", errs.Public(errs.ErrUnauthenticated, "no token")
	case !strings.Contains(verbs, access.Verb):
		return "", errs.Public(errs.ErrForbidden, "no right to "+access.Verb)
	}
	return team, nil
}

// TestTokens uses tokens of a cluster as keys. A reader gets no access token of a sandbox.
func TestTokens(t *testing.T) {
	f := newFixture(t, func(c *Config) {
		c.Tokens = tokenHolders{"editor": "get list create update delete", "viewer": "get list", "e2b_unknown": "get"}
	})
	as := func(key, method, path, body string) (status int, text string) {
		status, text, _ = f.do(method, path, body, "X-API-Key", key)
		return status, text
	}
	s := f.create(`{"templateID":"base"}`)
	path := "/sandboxes/" + s.SandboxID
	for _, tt := range []struct {
		key, method, path, body string
		status                  int
		with, without           string
	}{
		{key: "viewer", method: "GET", path: path, status: http.StatusOK, with: s.SandboxID, without: "envdAccessToken"},
		{key: "editor", method: "GET", path: path, status: http.StatusOK, with: "envdAccessToken"},
		{key: "viewer", method: "GET", path: "/v2/sandboxes", status: http.StatusOK, with: s.SandboxID},
		{key: "viewer", method: "POST", path: path + "/timeout", body: `{"timeout":60}`, status: http.StatusForbidden, with: "no right to update"},
		{key: "viewer", method: "POST", path: "/v2/sandboxes/" + s.SandboxID + "/connect", body: `{"timeout":60}`, status: http.StatusForbidden},
		{key: "viewer", method: "DELETE", path: path, status: http.StatusForbidden},
		{key: "viewer", method: "POST", path: "/api-keys", body: `{"name":"x"}`, status: http.StatusForbidden},
		{key: "stranger", method: "GET", path: path, status: http.StatusUnauthorized, with: "no token"},
		{key: "e2b_unknown", method: "GET", path: path, status: http.StatusUnauthorized, with: "barchan key create"},
		{key: "away", method: "GET", path: path, status: http.StatusServiceUnavailable, with: "does not answer"},
		{key: f.other, method: "GET", path: path, status: http.StatusNotFound},
		{key: "editor", method: "POST", path: path + "/timeout", body: `{"timeout":60}`, status: http.StatusNoContent},
		{key: "editor", method: "DELETE", path: path, status: http.StatusNoContent},
	} {
		status, text := as(tt.key, tt.method, tt.path, tt.body)
		if status != tt.status || !strings.Contains(text, tt.with) || tt.without != "" && strings.Contains(text, tt.without) {
			t.Errorf("%s: %s %s: %d %s, want %d with %q without %q", tt.key, tt.method, tt.path, status, text, tt.status, tt.with, tt.without)
		}
	}
	if status, text, _ := f.do("GET", "/v2/sandboxes", "", "X-API-Key", "", "Authorization", "Bearer viewer"); status != http.StatusOK {
		t.Errorf("as a bearer token: %d %s", status, text)
	}
}
