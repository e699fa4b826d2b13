package agent

import (
	"net/http"
	"slices"

	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/agent/settings"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// openRoutes check the token themselves, or need none.
var openRoutes = map[string][]string{
	envd.PathHealth: {http.MethodGet, http.MethodHead},
	envd.PathFiles:  {http.MethodGet, http.MethodHead, http.MethodPost},
	envd.PathInit:   {http.MethodPost},
	// A client sends its token only after the response.
	envd.PathIdentity: {http.MethodGet},
	// It takes no input from its caller, see restored.go.
	envd.PathRestored: {http.MethodPost},
}

// guard rejects requests without the token. An open agent needs none.
func guard(s *settings.Settings, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		open := slices.Contains(openRoutes[r.URL.Path], r.Method)
		if !open && !s.Accepts(r.Header.Get(envd.HeaderAccessToken)) {
			reply.WriteError(w, http.StatusUnauthorized, settings.ErrToken)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// allowBrowsers allows any origin: the token authorizes, not the origin.
func allowBrowsers(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Access-Control-Allow-Origin", "*")
		h.Set("Access-Control-Expose-Headers", "*")
		if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
			h.Set("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE")
			allowed := r.Header.Get("Access-Control-Request-Headers")
			if allowed == "" {
				allowed = "*"
			}
			h.Set("Access-Control-Allow-Headers", allowed)
			h.Set("Access-Control-Max-Age", "7200")
			h.Add("Vary", "Access-Control-Request-Headers")
			w.WriteHeader(http.StatusNoContent)
			return
		}
		next.ServeHTTP(w, r)
	})
}
