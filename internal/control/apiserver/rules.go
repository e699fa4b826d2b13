package apiserver

import (
	"context"
	"fmt"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
)

// The users. Any other is anonymous.
const (
	// UserAdmin has all rights.
	UserAdmin = "barchan:admin"
	// UserController is for the controllers, the manager and the gateway.
	UserController = "barchan:controller"
	// UserNode is for the node, which runs sandboxes on a machine.
	UserNode = "barchan:node"
)

const all = "*"

// rule lets users use verbs on resources of a group, or on paths.
type rule struct {
	users     []string
	verbs     []string
	group     string
	resources []string // "sandboxes", or "sandboxes/status" for a subresource
	paths     []string // of requests that are not about resources
}

var (
	read    = []string{"get", "list", "watch"}
	write   = []string{"create", "update", "patch", "delete", "deletecollection"}
	readAll = append(slices.Clone(read), write...)
	// keeperVerbs are for what a node keeps, which is not its own to delete.
	keeperVerbs = append(slices.Clone(read), "update", "patch")
	// nodeVerbs are for what a node runs.
	nodeVerbs = append(slices.Clone(read), "update", "patch", "delete")
)

// rules lists all rights; anything else is refused. Tenants have theirs only in their own
// namespace. They do not write status, which has addresses, nor warm pools, whose members
// no quota counts. What the node may change of an object is less than the verbs say: see isNode.
func rules() []rule {
	admins := []string{tenancy.Group(barchan.ScopeAdmin)}
	managers := append([]string{tenancy.Group(barchan.ScopeManage)}, admins...)
	tenants := append([]string{tenancy.Group(barchan.ScopeUse)}, managers...)
	known := append([]string{UserAdmin, UserController, UserNode}, tenants...)
	return []rule{
		{users: append([]string{user.Anonymous}, known...), verbs: []string{"get", "head"}, paths: []string{
			"/healthz", "/healthz/*", "/livez", "/livez/*", "/readyz", "/readyz/*", "/version", "/version/",
		}},
		{users: known, verbs: []string{"get", "head"}, paths: []string{"/", "/api", "/api/*", "/apis", "/apis/*", "/openapi/*"}},

		{users: []string{UserAdmin}, verbs: []string{all}, group: all, resources: []string{all}},
		{users: []string{UserAdmin}, verbs: []string{all}, paths: []string{all}},

		{users: tenants, verbs: readAll, group: agents.GroupVersion.Group, resources: []string{"sandboxes"}},
		{users: tenants, verbs: readAll, group: extensions.GroupVersion.Group, resources: []string{"sandboxclaims"}},
		{users: tenants, verbs: read, group: extensions.GroupVersion.Group, resources: []string{"sandboxtemplates"}},
		{users: managers, verbs: write, group: extensions.GroupVersion.Group, resources: []string{"sandboxtemplates"}},
		{users: tenants, verbs: readAll, group: barchan.GroupVersion.Group, resources: []string{"checkpoints"}},
		{users: tenants, verbs: read, group: barchan.GroupVersion.Group, resources: []string{"templatebuilds", "volumes"}},
		{users: managers, verbs: write, group: barchan.GroupVersion.Group, resources: []string{"templatebuilds", "volumes"}},
		// A manager makes keys over the REST API, which compares their scopes.
		{users: managers, verbs: read, group: barchan.GroupVersion.Group, resources: []string{"apikeys"}},
		{users: admins, verbs: write, group: barchan.GroupVersion.Group, resources: []string{"apikeys"}},
		{users: tenants, verbs: read, group: extensions.GroupVersion.Group, resources: []string{"sandboxwarmpools", "sandboxwarmpools/scale"}},
		{users: tenants, verbs: read, group: barchan.GroupVersion.Group, resources: []string{"templaterevisions"}},
		{users: tenants, verbs: read, resources: []string{"pods", "pods/log", "events"}},
		{users: tenants, verbs: []string{"get", "create"}, resources: []string{"pods/exec", "pods/portforward"}},
		{users: tenants, verbs: read, group: eventsv1.GroupName, resources: []string{"events"}},
		{users: tenants, verbs: []string{"get"}, resources: []string{"namespaces"}},
		// Reading a Secret gives a tenant no more than a sandbox that mounts it, which the same key may create.
		{users: managers, verbs: readAll, resources: []string{"secrets", "configmaps"}},

		{users: []string{UserController}, verbs: readAll, group: agents.GroupVersion.Group, resources: []string{all}},
		{users: []string{UserController}, verbs: readAll, group: extensions.GroupVersion.Group, resources: []string{all}},
		{users: []string{UserController}, verbs: readAll, group: barchan.GroupVersion.Group, resources: []string{all}},
		{users: []string{UserController}, verbs: readAll, resources: []string{"namespaces", "secrets", "configmaps", "events"}},
		{users: []string{UserController}, verbs: readAll, group: eventsv1.GroupName, resources: []string{"events"}},
		{users: []string{UserController}, verbs: readAll, group: coordinationv1.GroupName, resources: []string{"leases"}},

		{users: []string{UserNode}, verbs: nodeVerbs, group: agents.GroupVersion.Group, resources: []string{"sandboxes", "sandboxes/status"}},
		{users: []string{UserNode}, verbs: nodeVerbs, group: barchan.GroupVersion.Group, resources: []string{"checkpoints", "checkpoints/status"}},
		{users: []string{UserNode}, verbs: keeperVerbs, group: barchan.GroupVersion.Group, resources: []string{"volumes", "volumes/status"}},
		{users: []string{UserNode}, verbs: read, resources: []string{"namespaces"}},                                                   // which have quotas
		{users: []string{UserNode}, verbs: []string{"create"}, group: barchan.GroupVersion.Group, resources: []string{"checkpoints"}}, // of imports
		{users: []string{UserNode}, verbs: read, group: extensions.GroupVersion.Group, resources: []string{"sandboxtemplates", "sandboxwarmpools", "sandboxclaims"}},
		{users: []string{UserNode}, verbs: read, group: barchan.GroupVersion.Group, resources: []string{"templatebuilds"}}, // whose images stay
		{users: []string{UserNode}, verbs: read, resources: []string{"secrets", "configmaps"}},                             // of which sandboxes get variables and files
		{users: []string{UserNode}, verbs: []string{"create", "patch"}, resources: []string{"events"}},
		{users: []string{UserNode}, verbs: []string{"create", "patch"}, group: eventsv1.GroupName, resources: []string{"events"}},
	}
}

// newAuthorizer returns an authorizer by the rules.
func newAuthorizer() authorizer.Authorizer {
	byUser := map[string][]rule{}
	for _, r := range rules() {
		for _, u := range r.users {
			byUser[u] = append(byUser[u], r)
		}
	}
	return authorizer.AuthorizerFunc(func(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
		name := a.GetUser().GetName()
		if t, ok := tenancy.OfUser(a.GetUser()); ok {
			name = tenancy.Group(t.Scope)
			if a.IsResourceRequest() && a.GetNamespace() != t.Namespace {
				return authorizer.DecisionDeny, fmt.Sprintf("the API key is good for namespace %s alone", t.Namespace), nil
			}
		}
		for _, r := range byUser[name] {
			if r.allows(a) {
				return authorizer.DecisionAllow, "", nil
			}
		}
		if t, ok := tenancy.OfUser(a.GetUser()); ok {
			return authorizer.DecisionDeny, fmt.Sprintf("the API key has the scope %s, which does not include it", t.Scope), nil
		}
		return authorizer.DecisionDeny, fmt.Sprintf("%s has no rule for it", name), nil
	})
}

func (r *rule) allows(a authorizer.Attributes) bool {
	if !slices.Contains(r.verbs, all) && !slices.Contains(r.verbs, a.GetVerb()) {
		return false
	}
	if !a.IsResourceRequest() {
		return slices.ContainsFunc(r.paths, func(p string) bool { return pathMatches(p, a.GetPath()) })
	}
	if r.group != all && r.group != a.GetAPIGroup() {
		return false
	}
	resource := a.GetResource()
	if sub := a.GetSubresource(); sub != "" {
		resource += "/" + sub
	}
	return slices.Contains(r.resources, all) || slices.Contains(r.resources, resource)
}

// pathMatches compares a path with a pattern that may end in a star.
func pathMatches(pattern, path string) bool {
	if n := len(pattern) - 1; n >= 0 && pattern[n] == '*' {
		return len(path) >= n && path[:n] == pattern[:n]
	}
	return pattern == path
}

// isNode reports whether a request is the node's. Of objects it may change only what package registry lists: what
// it reports goes to the status subresource.
func isNode(ctx context.Context) bool {
	u, ok := genericapirequest.UserFrom(ctx)
	return ok && u.GetName() == UserNode
}
