package agent

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// users finds whom a request acts as.
type users struct {
	accounts accounts
	settings *settings
}

// of reads the user from the Authorization header of an RPC. Where the password would be may be a group.
func (u users) of(h http.Header) (account, error) {
	name := ""
	if h.Get("Authorization") != "" {
		user, group, ok := (&http.Request{Header: h}).BasicAuth()
		if !ok {
			return account{}, connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("authorization: Basic with a user's name is needed"))
		}
		name = user
		if group = strings.TrimSuffix(group, ":"); group != "" {
			name += ":" + group
		}
	}
	acc, err := u.named(name)
	if err != nil {
		return account{}, connect.NewError(connect.CodeUnauthenticated, err)
	}
	return acc, nil
}

// named finds a user by a name or a number, with ":group" if wanted, or the default one.
func (u users) named(name string) (account, error) {
	if name == "" {
		name, _ = u.settings.defaults()
	}
	acc, err := u.accounts.resolve(name)
	if err != nil {
		return account{}, fmt.Errorf("invalid username: '%s'", name)
	}
	return acc, nil
}

// openRoutes check the token themselves, or need none.
var openRoutes = map[string][]string{
	envd.PathHealth: {http.MethodGet, http.MethodHead},
	envd.PathFiles:  {http.MethodGet, http.MethodHead, http.MethodPost},
	envd.PathInit:   {http.MethodPost},
	// It takes nothing from whoever calls it, see restored.go.
	envd.PathRestored: {http.MethodPost},
}

// guard lets through who has the token. Only an open agent asks for none.
func guard(s *settings, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		open := slices.Contains(openRoutes[r.URL.Path], r.Method)
		if !open && !s.accepts(r.Header.Get(envd.HeaderAccessToken)) {
			writeError(w, http.StatusUnauthorized, errToken)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// allowBrowsers answers for any origin: the token guards, not the origin.
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
