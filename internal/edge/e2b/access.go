package e2b

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/runtime/schema"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/kubeauth"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// Tokens authenticates and authorizes by tokens of a Kubernetes cluster; kubeauth.Authorizer implements it.
type Tokens interface {
	// Authorize returns the namespace in which the holder of a key may do something.
	Authorize(ctx context.Context, key string, access kubeauth.Access) (namespace string, err error)
}

var (
	sandboxResource    = schema.GroupResource{Group: agents.GroupVersion.Group, Resource: "sandboxes"}
	templateResource   = schema.GroupResource{Group: extensions.GroupVersion.Group, Resource: "sandboxtemplates"}
	buildResource      = schema.GroupResource{Group: barchan.GroupVersion.Group, Resource: "templatebuilds"}
	checkpointResource = schema.GroupResource{Group: barchan.GroupVersion.Group, Resource: "checkpoints"}
	volumeResource     = schema.GroupResource{Group: barchan.GroupVersion.Group, Resource: "volumes"}
	// webhooks are Secrets, and an event of a sandbox may be older than the sandbox.
	secretResource = schema.GroupResource{Resource: "secrets"}
	keyResource    = schema.GroupResource{Group: barchan.GroupVersion.Group, Resource: "apikeys"}

	updateSandboxes = kubeauth.Access{Verb: "update", Resource: sandboxResource}
)

// sandboxDetail is the one route that returns a sandbox's access token and changes nothing.
const sandboxDetail = "GET /sandboxes/{sandboxID}"

// rights are what the caller of a route must have: an API key its scope, a token of the cluster access to the objects behind it.
type rights struct {
	scope  barchan.KeyScope
	access kubeauth.Access
	server bool // see onServer
}

func use(a kubeauth.Access) rights    { return rights{scope: barchan.ScopeUse, access: a} }
func manage(a kubeauth.Access) rights { return rights{scope: barchan.ScopeManage, access: a} }

// onServer is of a route that needs the log of events, the files and logs of builds, or the node, which only a server has: a replica
// forwards it. It also forwards the files of volumes and the uploads of builds, which are not in this table.
func (r rights) onServer() rights {
	r.server = true
	return r
}

// rightsOf has the rights that each route needs. Which keys a key may make and delete, package apikeys decides.
var rightsOf = map[string]rights{
	"POST /sandboxes":                                     use(kubeauth.Access{Verb: "create", Resource: sandboxResource}),
	"POST /v2/sandboxes":                                  use(kubeauth.Access{Verb: "create", Resource: sandboxResource}),
	"GET /sandboxes":                                      use(kubeauth.Access{Verb: "list", Resource: sandboxResource}),
	"GET /v2/sandboxes":                                   use(kubeauth.Access{Verb: "list", Resource: sandboxResource}),
	"GET /sandboxes/metrics":                              use(kubeauth.Access{Verb: "list", Resource: sandboxResource}),
	sandboxDetail:                                         use(kubeauth.Access{Verb: "get", Resource: sandboxResource}),
	"GET /sandboxes/{sandboxID}/metrics":                  use(kubeauth.Access{Verb: "get", Resource: sandboxResource}),
	"GET /sandboxes/{sandboxID}/logs":                     use(kubeauth.Access{Verb: "get", Resource: sandboxResource}),
	"GET /v2/sandboxes/{sandboxID}/logs":                  use(kubeauth.Access{Verb: "get", Resource: sandboxResource}),
	"DELETE /sandboxes/{sandboxID}":                       use(kubeauth.Access{Verb: "delete", Resource: sandboxResource}),
	"POST /sandboxes/{sandboxID}/connect":                 use(updateSandboxes),
	"POST /v2/sandboxes/{sandboxID}/connect":              use(updateSandboxes),
	"POST /sandboxes/{sandboxID}/timeout":                 use(updateSandboxes),
	"POST /sandboxes/{sandboxID}/refreshes":               use(updateSandboxes),
	"POST /sandboxes/{sandboxID}/pause":                   use(updateSandboxes),
	"POST /sandboxes/{sandboxID}/resume":                  use(updateSandboxes),
	"PUT /sandboxes/{sandboxID}/network":                  use(updateSandboxes),
	"GET /sandboxes/{sandboxID}/network/trace":            use(kubeauth.Access{Verb: "get", Resource: sandboxResource}).onServer(),
	"POST /sandboxes/{sandboxID}/fork":                    use(kubeauth.Access{Verb: "create", Resource: sandboxResource}),
	"POST /sandboxes/{sandboxID}/snapshots":               use(kubeauth.Access{Verb: "create", Resource: checkpointResource}),
	"GET /snapshots":                                      use(kubeauth.Access{Verb: "list", Resource: checkpointResource}),
	"DELETE /templates/{templateID}":                      manage(kubeauth.Access{Verb: "delete", Resource: templateResource}).onServer(), // also snapshots, which clusters, where tokens are, do not have
	"GET /templates":                                      use(kubeauth.Access{Verb: "list", Resource: templateResource}),
	"GET /v2/templates":                                   use(kubeauth.Access{Verb: "list", Resource: templateResource}),
	"GET /templates/{templateID}":                         use(kubeauth.Access{Verb: "get", Resource: templateResource}).onServer(),
	"GET /templates/aliases/{alias}":                      use(kubeauth.Access{Verb: "get", Resource: templateResource}),
	"PATCH /templates/{templateID}":                       manage(kubeauth.Access{Verb: "update", Resource: templateResource}),
	"PATCH /v2/templates/{templateID}":                    manage(kubeauth.Access{Verb: "update", Resource: templateResource}),
	"POST /templates/tags":                                manage(kubeauth.Access{Verb: "update", Resource: templateResource}).onServer(),
	"DELETE /templates/tags":                              manage(kubeauth.Access{Verb: "delete", Resource: templateResource}).onServer(),
	tagsRoute:                                             use(kubeauth.Access{Verb: "get", Resource: templateResource}).onServer(),
	"DELETE /templates/{templateID}/builds/{buildID}":     manage(kubeauth.Access{Verb: "delete", Resource: buildResource}).onServer(),
	"POST /v3/templates":                                  manage(kubeauth.Access{Verb: "create", Resource: buildResource}).onServer(),
	"POST /v2/templates":                                  manage(kubeauth.Access{Verb: "create", Resource: buildResource}).onServer(),
	"GET /templates/{templateID}/files/{hash}":            manage(kubeauth.Access{Verb: "create", Resource: buildResource}).onServer(),
	"POST /v2/templates/{templateID}/builds/{buildID}":    manage(kubeauth.Access{Verb: "update", Resource: buildResource}).onServer(),
	"GET /templates/{templateID}/builds/{buildID}/status": use(kubeauth.Access{Verb: "get", Resource: buildResource}).onServer(),
	"GET /templates/{templateID}/builds/{buildID}/logs":   use(kubeauth.Access{Verb: "get", Resource: buildResource}).onServer(),
	"GET /volumes":                                        use(kubeauth.Access{Verb: "list", Resource: volumeResource}),
	"POST /volumes":                                       manage(kubeauth.Access{Verb: "create", Resource: volumeResource}),
	"GET /volumes/{volumeID}":                             use(kubeauth.Access{Verb: "update", Resource: volumeResource}), // it returns the token of the files
	"DELETE /volumes/{volumeID}":                          manage(kubeauth.Access{Verb: "delete", Resource: volumeResource}),
	"GET /teams":                                          use(kubeauth.Access{Verb: "list", Resource: sandboxResource}),
	"GET /ssh":                                            use(kubeauth.Access{Verb: "list", Resource: sandboxResource}),
	"GET /api-keys":                                       manage(kubeauth.Access{Verb: "list", Resource: keyResource}),
	"GET /ssh-keys":                                       use(kubeauth.Access{Verb: "list", Resource: keyResource}),
	"POST /ssh-keys":                                      use(kubeauth.Access{Verb: "update", Resource: keyResource}),
	"DELETE /ssh-keys":                                    use(kubeauth.Access{Verb: "update", Resource: keyResource}),
	"POST /api-keys":                                      manage(kubeauth.Access{Verb: "create", Resource: keyResource}),
	"DELETE /api-keys/{apiKeyID}":                         manage(kubeauth.Access{Verb: "delete", Resource: keyResource}),
	"PATCH /api-keys/{apiKeyID}":                          manage(kubeauth.Access{Verb: "update", Resource: keyResource}),
	"POST /access-tokens":                                 manage(kubeauth.Access{Verb: "create", Resource: keyResource}),
	"DELETE /access-tokens/{accessTokenID}":               manage(kubeauth.Access{Verb: "delete", Resource: keyResource}),
	"GET /teams/{teamID}/metrics":                         use(kubeauth.Access{Verb: "list", Resource: sandboxResource}).onServer(),
	"GET /teams/{teamID}/metrics/max":                     use(kubeauth.Access{Verb: "list", Resource: sandboxResource}).onServer(),
	"GET /events/sandboxes":                               use(kubeauth.Access{Verb: "list", Resource: sandboxResource}).onServer(),
	"GET /events/sandboxes/{sandboxID}":                   use(kubeauth.Access{Verb: "list", Resource: sandboxResource}).onServer(),
	"GET /events/webhooks":                                manage(kubeauth.Access{Verb: "list", Resource: secretResource}).onServer(),
	"POST /events/webhooks":                               manage(kubeauth.Access{Verb: "create", Resource: secretResource}).onServer(),
	"GET /events/webhooks/{webhookID}":                    manage(kubeauth.Access{Verb: "get", Resource: secretResource}).onServer(),
	"PATCH /events/webhooks/{webhookID}":                  manage(kubeauth.Access{Verb: "update", Resource: secretResource}).onServer(),
	"DELETE /events/webhooks/{webhookID}":                 manage(kubeauth.Access{Verb: "delete", Resource: secretResource}).onServer(),
}

// checkScope refuses a route beyond the scope of an API key. A route without rights needs all of them.
func checkScope(have barchan.KeyScope, route string) error {
	need := rightsOf[route].scope.OrAdmin()
	if have.Covers(need) {
		return nil
	}
	return errs.Public(errs.ErrForbidden, fmt.Sprintf("this API key has the scope %s, and %s needs %s; use such a key: barchan key create --scope %s", have, route, need, need))
}

// authorize authenticates a caller by a token of the cluster, and checks that it may use a route.
func (s *Server) authorize(ctx context.Context, c *request.Caller, route string) (err error) {
	right, known := rightsOf[route]
	if !known {
		return errs.Public(errs.ErrForbidden, "a token of the cluster has no right to this route; use an API key")
	}
	if c.Namespace, err = s.tokens.Authorize(ctx, c.Secret, right.access); err != nil || route != sandboxDetail {
		return err
	}
	_, err = s.tokens.Authorize(ctx, c.Secret, updateSandboxes)
	if c.ReadOnly = errors.Is(err, errs.ErrForbidden); c.ReadOnly {
		return nil
	}
	return err
}
