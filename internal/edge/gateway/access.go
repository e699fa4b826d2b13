package gateway

import (
	"net/http"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// resolve finds the sandbox of agent-sandbox's headers. An ID suffices, as in a host. A name can be
// guessed: it requires an API key of its namespace, or a token of the sandbox. Without one the
// response does not depend on whether the name exists.
func (x *exchange) resolve() *reply.Reply {
	var owner bool
	x.keyed, owner = credentials.Keys(x.r, x.Namespace, x.g.cfg.KeyNamespace)
	id, err := sandbox.ParseID(x.Name)
	isID := err == nil && string(id) == x.Name
	if isID {
		if entry, ok := x.g.cfg.Routes.Lookup(id); ok {
			x.ID, x.byKey = id, owner && entry.Namespace == x.Namespace
			return nil
		}
	}
	if x.g.cfg.Names == nil || (isID && !owner) {
		return x.g.unknown()
	}
	id, found := x.g.cfg.Names(x.r.Context(), x.Namespace, x.Name)
	if !owner && !credentials.HasTokenOf(x.r, x.g.cfg.Tokens, id) {
		return x.g.failures.Count(x.r)
	}
	if !found {
		return x.g.unknown()
	}
	x.ID, x.byKey = id, owner
	return nil
}

// mayPass checks the traffic token, or a signature made with it. The agent's port has its own token,
// which the agent checks.
func (x *exchange) mayPass(public bool) bool {
	if x.Port == envd.Port || public || x.owner {
		return true
	}
	if got := x.r.Header.Get(envd.HeaderTrafficToken); got != "" {
		return sandbox.EqualToken(got, x.g.cfg.Tokens.Traffic(x.ID))
	}
	until, ok := x.signature.Verify(func() string { return x.g.cfg.Tokens.Traffic(x.ID) }, x.Port)
	// The cookie is for this sandbox and port alone, if the host or path names them. With headers, it
	// would also go to other sandboxes, so there is none.
	if ok && !until.IsZero() && !x.ByHeader {
		x.grant = x.signature.Cookie(x.Prefix+"/", until, x.r.TLS != nil)
	}
	return ok
}

// mayWake makes the checks of a paused sandbox's agent. Nil: allowed.
func (x *exchange) mayWake(e *route.Entry) *reply.Reply {
	if x.Port != envd.Port || !e.Access.Secure || x.byKey {
		return nil
	}
	return credentials.Agent(x.r, x.url, x.g.cfg.Tokens.Agent(x.ID))
}

// isHealthCheck reports whether a request is only a health check of the agent. E2B's SDKs send one
// when a stream breaks, as a pause does; it must not wake the sandbox.
func (x *exchange) isHealthCheck() bool {
	return x.Port == envd.Port && x.url.Path == envd.PathHealth
}

// bySignature finds the target of a signed file URL that does not name it.
func (g *Gateway) bySignature(r *http.Request) (target.Target, error) {
	id, err := g.failures.Signature(r, func() (sandbox.ID, error) { return credentials.SignedFile(r, g.cfg.Routes.All(), g.cfg.Tokens) })
	if err != nil {
		return target.Target{}, err
	}
	return target.Target{ID: id, Port: envd.Port}, nil
}
