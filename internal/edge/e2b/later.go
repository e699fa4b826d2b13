package e2b

import (
	"fmt"
	"net/http"
)

// notYet has the features of E2B that Barchan lacks, by their routes.
var notYet = map[string][]string{
	pushedBuilds: {"POST /templates", "POST /templates/{id}", "POST /templates/{id}/builds/{rest...}"},

	"secrets":           {"/secrets", "/secrets/{rest...}"},
	"team metrics":      {"GET /teams/{id}/metrics", "GET /teams/{id}/metrics/max"},
	"renaming API keys": {"PATCH /api-keys/{id}"},
	"access tokens":     {"/access-tokens", "/access-tokens/{rest...}"},
}

// pushedBuilds are those of a Docker daemon that pushes the image.
const pushedBuilds = "template builds whose image a Docker daemon pushes"

// laterRoutes answers 501 there: a 404 would mean to the SDKs that the sandbox is gone.
func laterRoutes() *http.ServeMux {
	mux := http.NewServeMux()
	for what, patterns := range notYet {
		message := what + ": not available on this server yet"
		if what == pushedBuilds {
			message = what + ": not available, for this server is no registry; use `e2b template create`, or Template.build of the SDK"
		}
		for _, pattern := range patterns {
			mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) {
				writeError(w, http.StatusNotImplemented, message)
			})
		}
	}
	return mux
}

// noRoute answers requests without a generated route.
func (s *Server) noRoute(w http.ResponseWriter, r *http.Request) {
	if h, pattern := s.later.Handler(r); pattern != "" {
		h.ServeHTTP(w, r)
		return
	}
	h, _ := s.mux.Handler(r)
	verdict := &verdict{header: http.Header{}}
	h.ServeHTTP(verdict, r)
	if verdict.status == http.StatusMethodNotAllowed {
		w.Header().Set("Allow", verdict.header.Get("Allow"))
		writeError(w, http.StatusMethodNotAllowed, fmt.Sprintf("%s is not allowed here; allowed: %s", r.Method, verdict.header.Get("Allow")))
		return
	}
	writeError(w, http.StatusNotFound, fmt.Sprintf("no such route: %s %s", r.Method, r.URL.Path))
}

// verdict records the mux's response to a request without a route.
type verdict struct {
	header http.Header
	status int
}

func (v *verdict) Header() http.Header         { return v.header }
func (v *verdict) Write(b []byte) (int, error) { return len(b), nil }
func (v *verdict) WriteHeader(status int)      { v.status = status }
