package apiserver

import (
	"fmt"
	"testing"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/barchan-dev/barchan/internal/control/apiserver/kinds"
)

// access is one request to authorize.
type access struct{ user, verb, group, resource, path string }

func (a access) String() string {
	if a.path != "" {
		return fmt.Sprintf("%s %s %s", a.user, a.verb, a.path)
	}
	return fmt.Sprintf("%s %s %s.%s", a.user, a.verb, a.resource, a.group)
}

// granted lists all rights to resources of users other than the admin. It repeats the table on
// purpose: it detects a rule that becomes wider.
func granted() map[access]bool {
	m := map[access]bool{}
	add := func(user string, verbs []string, group string, resources ...string) {
		for _, v := range verbs {
			for _, r := range resources {
				m[access{user: user, verb: v, group: group, resource: r}] = true
			}
		}
	}
	every := []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}
	add(UserController, every, "agents.x-k8s.io", "sandboxes", "sandboxes/status")
	add(UserController, every, "extensions.agents.x-k8s.io", "sandboxtemplates", "sandboxwarmpools", "sandboxwarmpools/status",
		"sandboxwarmpools/scale", "sandboxclaims", "sandboxclaims/status")
	add(UserController, every, "barchan.dev", "checkpoints", "checkpoints/status", "apikeys", "apikeys/status", "templaterevisions", "templatebuilds", "templatebuilds/status", "volumes", "volumes/status")
	add(UserController, every, "", "namespaces", "secrets", "configmaps", "events")
	add(UserController, every, "events.k8s.io", "events")
	add(UserController, every, "coordination.k8s.io", "leases")

	add(UserNode, []string{"get", "list", "watch", "update", "patch", "delete"}, "agents.x-k8s.io", "sandboxes", "sandboxes/status")
	add(UserNode, []string{"get", "list", "watch", "update", "patch", "delete"}, "barchan.dev", "checkpoints", "checkpoints/status")
	add(UserNode, []string{"create"}, "barchan.dev", "checkpoints")
	add(UserNode, []string{"get", "list", "watch"}, "extensions.agents.x-k8s.io", "sandboxtemplates", "sandboxwarmpools", "sandboxclaims")
	add(UserNode, []string{"get", "list", "watch"}, "barchan.dev", "templatebuilds")
	add(UserNode, []string{"get", "list", "watch", "update", "patch"}, "barchan.dev", "volumes", "volumes/status")
	add(UserNode, []string{"get", "list", "watch"}, "", "secrets", "configmaps", "namespaces")
	add(UserNode, []string{"create", "patch"}, "", "events")
	add(UserNode, []string{"create", "patch"}, "events.k8s.io", "events")
	return m
}

// TestRules checks every user, verb and resource, and compares with what is granted.
func TestRules(t *testing.T) {
	resources := map[string][]string{"autoscaling": {"scales"}, "authorization.k8s.io": {"subjectaccessreviews"}}
	for _, r := range kinds.All() {
		names := append(resources[r.GV.Group], r.Plural)
		if r.Status {
			names = append(names, r.Plural+"/status")
		}
		if r.Scale != nil {
			names = append(names, r.Plural+"/scale")
		}
		resources[r.GV.Group] = names
	}
	resources["events.k8s.io"] = []string{"events"}
	want := granted()
	for _, u := range []string{UserAdmin, UserController, UserNode, user.Anonymous, "unknown"} {
		for group, names := range resources {
			for _, resource := range names {
				for _, verb := range []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection", "impersonate"} {
					a := access{user: u, verb: verb, group: group, resource: resource}
					allowed := want[a] || u == UserAdmin
					// Only the admin writes the namespaces' status.
					if got := authorize(t, a); got != allowed {
						t.Errorf("%s: allowed = %v, want %v", a, got, allowed)
					}
					delete(want, a)
				}
			}
		}
	}
	for a := range want {
		t.Errorf("%s is granted and not served", a)
	}
}

func TestPaths(t *testing.T) {
	for path, open := range map[string]bool{
		"/healthz": true, "/livez": true, "/readyz": true, "/readyz/ping": true, "/version": true, "/version/": true,
		"/": false, "/api": false, "/apis": false, "/openapi/v3": false, "/metrics": false, "/healthzz": false, "/debug/pprof": false,
	} {
		if got := authorize(t, access{user: user.Anonymous, verb: "get", path: path}); got != open {
			t.Errorf("anonymous get %s = %v, want %v", path, got, open)
		}
		if authorize(t, access{user: user.Anonymous, verb: "post", path: path}) {
			t.Errorf("anonymous may post %s", path)
		}
		if !authorize(t, access{user: UserAdmin, verb: "post", path: path}) {
			t.Errorf("the admin may not post %s", path)
		}
	}
	for path, open := range map[string]bool{"/apis": true, "/apis/agents.x-k8s.io": true, "/openapi/v3": true, "/metrics": false} {
		if got := authorize(t, access{user: UserNode, verb: "get", path: path}); got != open {
			t.Errorf("node get %s = %v, want %v", path, got, open)
		}
	}
}

func authorize(t *testing.T, a access) bool {
	t.Helper()
	attrs := authorizer.AttributesRecord{
		User: &user.DefaultInfo{Name: a.user}, Verb: a.verb, APIGroup: a.group, Resource: a.resource, Path: a.path, ResourceRequest: a.path == "",
	}
	for i := range a.resource {
		if a.resource[i] == '/' {
			attrs.Resource, attrs.Subresource = a.resource[:i], a.resource[i+1:]
		}
	}
	d, reason, err := newAuthorizer().Authorize(t.Context(), attrs)
	if err != nil || (d != authorizer.DecisionAllow && reason == "") {
		t.Errorf("%s: error %v, reason %q", a, err, reason)
	}
	return d == authorizer.DecisionAllow
}
