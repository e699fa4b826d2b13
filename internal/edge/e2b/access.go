package e2b

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/runtime/schema"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/kubeauth"
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
	keyResource        = schema.GroupResource{Group: barchan.GroupVersion.Group, Resource: "apikeys"}

	updateSandboxes = kubeauth.Access{Verb: "update", Resource: sandboxResource}
)

// sandboxDetail is the one route that returns a sandbox's access token and changes nothing.
const sandboxDetail = "GET /sandboxes/{sandboxID}"

// accessOf is what the caller of a route must be allowed to do with the objects behind it. API keys are allowed everything in
// their namespace.
var accessOf = map[string]kubeauth.Access{
	"POST /sandboxes":                                     {Verb: "create", Resource: sandboxResource},
	"POST /v2/sandboxes":                                  {Verb: "create", Resource: sandboxResource},
	"GET /sandboxes":                                      {Verb: "list", Resource: sandboxResource},
	"GET /v2/sandboxes":                                   {Verb: "list", Resource: sandboxResource},
	"GET /sandboxes/metrics":                              {Verb: "list", Resource: sandboxResource},
	sandboxDetail:                                         {Verb: "get", Resource: sandboxResource},
	"GET /sandboxes/{sandboxID}/metrics":                  {Verb: "get", Resource: sandboxResource},
	"GET /sandboxes/{sandboxID}/logs":                     {Verb: "get", Resource: sandboxResource},
	"GET /v2/sandboxes/{sandboxID}/logs":                  {Verb: "get", Resource: sandboxResource},
	"DELETE /sandboxes/{sandboxID}":                       {Verb: "delete", Resource: sandboxResource},
	"POST /sandboxes/{sandboxID}/connect":                 updateSandboxes,
	"POST /v2/sandboxes/{sandboxID}/connect":              updateSandboxes,
	"POST /sandboxes/{sandboxID}/timeout":                 updateSandboxes,
	"POST /sandboxes/{sandboxID}/refreshes":               updateSandboxes,
	"POST /sandboxes/{sandboxID}/pause":                   updateSandboxes,
	"POST /sandboxes/{sandboxID}/resume":                  updateSandboxes,
	"PUT /sandboxes/{sandboxID}/network":                  updateSandboxes,
	"POST /sandboxes/{sandboxID}/fork":                    {Verb: "create", Resource: sandboxResource},
	"POST /sandboxes/{sandboxID}/snapshots":               {Verb: "create", Resource: checkpointResource},
	"GET /snapshots":                                      {Verb: "list", Resource: checkpointResource},
	"DELETE /templates/{templateID}":                      {Verb: "delete", Resource: checkpointResource}, // it deletes snapshots; where there are tokens, templates are not built
	"GET /templates":                                      {Verb: "list", Resource: templateResource},
	"GET /v2/templates":                                   {Verb: "list", Resource: templateResource},
	"GET /templates/{templateID}":                         {Verb: "get", Resource: templateResource},
	"GET /templates/aliases/{alias}":                      {Verb: "get", Resource: templateResource},
	"PATCH /templates/{templateID}":                       {Verb: "update", Resource: templateResource},
	"PATCH /v2/templates/{templateID}":                    {Verb: "update", Resource: templateResource},
	"POST /templates/tags":                                {Verb: "update", Resource: templateResource},
	"DELETE /templates/tags":                              {Verb: "delete", Resource: templateResource},
	tagsRoute:                                             {Verb: "get", Resource: templateResource},
	"DELETE /templates/{templateID}/builds/{buildID}":     {Verb: "delete", Resource: buildResource},
	"POST /v3/templates":                                  {Verb: "create", Resource: buildResource},
	"POST /v2/templates":                                  {Verb: "create", Resource: buildResource},
	"GET /templates/{templateID}/files/{hash}":            {Verb: "create", Resource: buildResource},
	"POST /v2/templates/{templateID}/builds/{buildID}":    {Verb: "update", Resource: buildResource},
	"GET /templates/{templateID}/builds/{buildID}/status": {Verb: "get", Resource: buildResource},
	"GET /templates/{templateID}/builds/{buildID}/logs":   {Verb: "get", Resource: buildResource},
	"GET /volumes":                                        {Verb: "list", Resource: volumeResource},
	"POST /volumes":                                       {Verb: "create", Resource: volumeResource},
	"GET /volumes/{volumeID}":                             {Verb: "update", Resource: volumeResource}, // it returns the token of the files
	"DELETE /volumes/{volumeID}":                          {Verb: "delete", Resource: volumeResource},
	"GET /teams":                                          {Verb: "list", Resource: sandboxResource},
	"GET /ssh":                                            {Verb: "list", Resource: sandboxResource},
	"GET /api-keys":                                       {Verb: "list", Resource: keyResource},
	"GET /ssh-keys":                                       {Verb: "list", Resource: keyResource},
	"POST /ssh-keys":                                      {Verb: "update", Resource: keyResource},
	"DELETE /ssh-keys":                                    {Verb: "update", Resource: keyResource},
	"POST /api-keys":                                      {Verb: "create", Resource: keyResource},
	"DELETE /api-keys/{apiKeyID}":                         {Verb: "delete", Resource: keyResource},
}

// authorize authenticates a caller by a token of the cluster, and checks that it may use a route.
func (s *Server) authorize(ctx context.Context, c *caller, route string) (err error) {
	access, known := accessOf[route]
	if !known {
		return errs.Public(errs.ErrForbidden, "a token of the cluster has no right to this route; use an API key")
	}
	if c.Namespace, err = s.tokens.Authorize(ctx, c.secret, access); err != nil || route != sandboxDetail {
		return err
	}
	_, err = s.tokens.Authorize(ctx, c.secret, updateSandboxes)
	if c.readOnly = errors.Is(err, errs.ErrForbidden); c.readOnly {
		return nil
	}
	return err
}
