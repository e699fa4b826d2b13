package e2b

import (
	"fmt"
	"net/http"

	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// refused has the messages for what no API key may do here, by E2B's routes.
var refused = map[string][]string{
	pushedBuilds: {"POST /templates", "POST /templates/{id}", "POST /templates/{id}/builds/{rest...}"},
	secrets:      {"/secrets", "/secrets/{rest...}"},
	nodes:        {"/nodes", "/nodes/{rest...}"},
}

const (
	pushedBuilds = "template builds whose image a Docker daemon pushes: not available, for this server is no registry; use `e2b template create`, or Template.build of the SDK"
	// The value of E2B's secrets never enters a sandbox: its gateway for outgoing TLS puts it into requests.
	secrets = "secrets: not available, for this server does not rewrite what sandboxes send, and a value that the sandbox could read would be no secret; use envs, or a Secret in the template"
	nodes   = "nodes: not for API keys, which are a team's; the operator of the server reads them with barchan status, or kubectl get sandboxes"
)

// refusedRoutes answers 403, as upstream does to teams without secrets and to keys that are no operator's. A 404 would mean to the
// SDKs that the sandbox is gone.
func refusedRoutes() *http.ServeMux {
	mux := http.NewServeMux()
	for message, patterns := range refused {
		for _, pattern := range patterns {
			mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) {
				request.WriteError(w, http.StatusForbidden, message)
			})
		}
	}
	return mux
}

// noRoute answers requests without a generated route.
func (s *Server) noRoute(w http.ResponseWriter, r *http.Request) {
	if h, pattern := s.refused.Handler(r); pattern != "" {
		h.ServeHTTP(w, r)
		return
	}
	h, _ := s.mux.Handler(r)
	verdict := &verdict{header: http.Header{}}
	h.ServeHTTP(verdict, r)
	if verdict.status == http.StatusMethodNotAllowed {
		w.Header().Set("Allow", verdict.header.Get("Allow"))
		request.WriteError(w, http.StatusMethodNotAllowed, fmt.Sprintf("%s is not allowed here; allowed: %s", r.Method, verdict.header.Get("Allow")))
		return
	}
	request.WriteError(w, http.StatusNotFound, fmt.Sprintf("no such route: %s %s", r.Method, r.URL.Path))
}

// verdict records the mux's response to a request without a route.
type verdict struct {
	header http.Header
	status int
}

func (v *verdict) Header() http.Header         { return v.header }
func (v *verdict) Write(b []byte) (int, error) { return len(b), nil }
func (v *verdict) WriteHeader(status int)      { v.status = status }
