package e2b

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
)

var pathParameter = regexp.MustCompile(`\{[^}]+\}`)

// TestScopes has keys of each scope ask each route: below the one that it needs they are refused, and told which one.
func TestScopes(t *testing.T) {
	f := newFixture(t)
	keys := map[barchan.KeyScope]string{barchan.ScopeAdmin: f.key}
	for _, scope := range []barchan.KeyScope{barchan.ScopeUse, barchan.ScopeManage} {
		var made api.CreatedAPIKey
		f.want(201, &made, "POST", "/api-keys", fmt.Sprintf(`{"name":"x","scope":%q}`, scope))
		if string(made.Scope) != string(scope) {
			t.Fatalf("asked for scope %s, got %s", scope, made.Scope)
		}
		keys[scope] = made.Key
	}
	for route, right := range rightsOf {
		method, path, _ := strings.Cut(route, " ")
		for scope, key := range keys {
			status, text, _ := f.do(method, pathParameter.ReplaceAllString(path, "none"), `{}`, "X-API-Key", key)
			refused := status == http.StatusForbidden && strings.Contains(text, fmt.Sprintf("has the scope %s, and %s needs %s", scope, route, right.scope))
			if refused == scope.Covers(right.scope) || !refused && strings.Contains(text, "has the scope") {
				t.Errorf("%s by a key of scope %s: %d %s", route, scope, status, text)
			}
		}
	}
}

// TestTheKeyIsInTheObject: a sandbox names the key that created it and a fork that of its own request; neither has the key.
func TestTheKeyIsInTheObject(t *testing.T) {
	f := newFixture(t)
	var user api.CreatedAPIKey
	f.want(201, &user, "POST", "/api-keys", `{"name":"u"}`)
	var s api.Sandbox
	f.want(201, &s, "POST", "/sandboxes", `{"templateID":"base"}`, "X-API-Key", user.Key)
	var forks []api.ForkResult
	f.want(201, &forks, "POST", "/sandboxes/"+s.SandboxID+"/fork", "{}")
	for id, key := range map[string]string{s.SandboxID: user.Key, forks[0].Sandbox.SandboxID: f.key} {
		who, err := f.manager.Keys.Authenticate(t.Context(), key)
		if err != nil || who.Key == "" {
			t.Fatalf("%+v, %v", who, err)
		}
		o, err := f.cluster.SandboxByID(t.Context(), sandbox.ID(id))
		if err != nil || o.Annotations["barchan.dev/created-by-key"] != who.Key || strings.Contains(fmt.Sprint(o), key) {
			t.Errorf("the object of %s is %+v, %v, want the name %s alone", id, o, err, who.Key)
		}
		var d api.SandboxDetail
		if f.want(200, &d, "GET", "/sandboxes/"+id, ""); d.CreatedByKey == nil || *d.CreatedByKey != who.Key {
			t.Errorf("%s was created by %v, want %s", id, d.CreatedByKey, who.Key)
		}
	}
}

// TestKeysOfScopes has each key hand out no more than it may, and change no key of a higher scope.
func TestKeysOfScopes(t *testing.T) {
	f := newFixture(t)
	var admin, manager, user api.CreatedAPIKey
	f.want(201, &admin, "POST", "/api-keys", `{"name":"a"}`)
	f.want(201, &manager, "POST", "/api-keys", `{"name":"m","scope":"manage"}`)
	f.want(201, &user, "POST", "/api-keys", `{"name":"u"}`, "X-API-Key", manager.Key)
	if admin.Scope != "admin" || user.Scope != "use" {
		t.Errorf("without a scope, an admin makes %s and a manager %s", admin.Scope, user.Scope)
	}
	var token api.CreatedAccessToken
	f.want(201, &token, "POST", "/access-tokens", `{"name":"t"}`, "X-API-Key", manager.Key)
	if status, text, _ := f.do("GET", "/api-keys", "", "X-API-Key", token.Token); status != 403 || !strings.Contains(text, "needs manage") {
		t.Errorf("a manager's access token: %d %s", status, text)
	}
	for _, tt := range []struct {
		method, path, body string
		status             int
	}{
		{"POST", "/api-keys", `{"name":"x","scope":"admin"}`, 403},
		{"POST", "/api-keys", `{"name":"x","scope":"manage"}`, 403},
		{"POST", "/api-keys", `{"name":"x","scope":"root"}`, 400},
		{"DELETE", "/api-keys/" + admin.ID, "", 403},
		{"DELETE", "/access-tokens/" + admin.ID, "", 403},
		{"PATCH", "/api-keys/" + manager.ID, `{"name":"y"}`, 403},
		{"PATCH", "/api-keys/" + user.ID, `{"name":"y"}`, 204},
		{"DELETE", "/api-keys/" + user.ID, "", 204},
	} {
		if status, text, _ := f.do(tt.method, tt.path, tt.body, "X-API-Key", manager.Key); status != tt.status || status/100 == 4 && !strings.Contains(text, "scope") {
			t.Errorf("%s %s %s by a manager: %d %s, want %d", tt.method, tt.path, tt.body, status, text, tt.status)
		}
	}
}
