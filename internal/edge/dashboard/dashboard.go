package dashboard

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/base/webfile"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/dashboard/sessions"
	"github.com/barchan-dev/barchan/internal/edge/dashboard/timeline"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Keys authenticates the holders of API keys; an apikeys.Store does.
type Keys interface {
	Authenticate(ctx context.Context, secret string) (apikeys.Identity, error)
}

// Cache has the sandboxes in memory; a cache.Cache does.
type Cache interface {
	SandboxByID(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error)
	Sandboxes(ctx context.Context, namespace string) ([]*agents.Sandbox, error)
}

// Config has the parts of a Server. All of it is required but for Domain, Conditions and Audit.
type Config struct {
	Keys  Keys
	Cache Cache
	// Objects reads the other kinds from memory, and Live the events of objects from the API server.
	Objects, Live client.Reader
	// REST is the handler of the REST API, which gets the session's key.
	REST http.Handler
	// Visit begins a use of a sandbox, and wakes it if its owner allows that.
	Visit func(ctx context.Context, id sandbox.ID) (*gateway.Visit, error)
	// Agent reaches the agent of a running sandbox to observe it, which does not count as use.
	Agent func(s *agents.Sandbox) (*envd.Client, error)
	// FollowLog streams the log of a container, the first if empty, of a source, both if empty; nil: the agents have the logs.
	FollowLog func(ctx context.Context, s *agents.Sandbox, container, source string, each func(envd.LogLine) error) error
	// Template finds a template that a namespace may use, by its name, alias or ID.
	Template func(ctx context.Context, namespace, name string) (templates.Template, error)
	// View is what a sandbox's tenant sees of it.
	View func(s *agents.Sandbox) sandboxes.Sandbox
	// Domain is that of the sandboxes' hosts, whose port is ignored; empty: their ports are linked by path.
	Domain string
	Quotas Quotas
	// Conditions are what is wrong with the server; nil: nothing ever is.
	Conditions func() []health.Condition
	About      About
	// Reachable are the private ranges that the setting of that name opens to all sandboxes.
	Reachable []netip.Prefix
	Log       *slog.Logger
	// Audit records sign-ins, terminals, signed URLs and changes of files; nil records nothing.
	Audit *auditlog.Log
}

// Quotas has the limits and the use of namespaces; a quota.Quotas does.
type Quotas interface {
	Limits(ctx context.Context, namespace string) (quota.Limits, error)
	Used(namespace string) (running, paused quota.Use)
	Stored(namespace string) int64
	Objects(namespace string, kind quota.Kind) int64
}

// About is what a server tells of itself.
type About struct {
	Version   string    `json:"version"`
	Node      string    `json:"node"`
	Role      string    `json:"role"`
	StartedAt time.Time `json:"startedAt"`
}

// Server is the handler of everything below /ui.
type Server struct {
	request.Errors
	cfg      Config
	sessions *sessions.Store
	hub      *hub
	history  *timeline.History
	assets   map[string]*webfile.File
	mux      *http.ServeMux
	stopped  chan struct{} // closed when Run ends
}

const (
	apiPath = "/ui/api/"
	maxJSON = 64 << 10
)

// New checks the configuration. Run must be called for streams and terminals to end.
func New(cfg Config) (*Server, error) {
	if cfg.Keys == nil || cfg.Cache == nil || cfg.Objects == nil || cfg.Live == nil || cfg.REST == nil || cfg.Visit == nil || cfg.Agent == nil || cfg.View == nil || cfg.Template == nil || cfg.Quotas == nil || cfg.Log == nil {
		return nil, fmt.Errorf("dashboard: a required part is missing: %w", errs.ErrInvalid)
	}
	if host, _, err := net.SplitHostPort(cfg.Domain); err == nil {
		cfg.Domain = host
	}
	assets, err := readAssets()
	if err != nil {
		return nil, err
	}
	s := &Server{
		Errors: request.Errors{Log: cfg.Log.With(telemetry.Component, "dashboard")},
		cfg:    cfg, sessions: sessions.New(), hub: newHub(), history: timeline.NewHistory(), assets: assets, mux: http.NewServeMux(), stopped: make(chan struct{}),
	}
	s.routes()
	return s, nil
}

// Run ends streams and terminals when ctx is done.
func (s *Server) Run(ctx context.Context) error {
	<-ctx.Done()
	close(s.stopped)
	return nil
}

// Observe receives each change of a sandbox, in order; it is one of the observers of a cache.
func (s *Server) Observe(older, newer *agents.Sandbox) {
	s.history.Observe(older, newer)
	s.hub.observe(older, newer)
}

// handler answers an authenticated request.
type handler func(w http.ResponseWriter, r *http.Request, who caller) error

func (s *Server) routes() {
	s.mux.HandleFunc("POST /ui/api/session", s.open(s.signIn))
	s.mux.HandleFunc("POST /ui/api/tickets", s.link)
	s.page("GET session", s.showSession)
	s.page("DELETE session", s.signOut)
	s.page("GET watch", s.watch)
	s.page("GET sandboxes/{id}", s.sandboxDetail)
	s.page("GET sandboxes/{id}/ports", s.ports)
	s.page("GET sandboxes/{id}/log", s.followLog)
	s.page("GET sandboxes/{id}/files", s.listFiles)
	s.page("PUT sandboxes/{id}/files", s.recorded(actionWrite, s.uploadFile))
	s.page("POST sandboxes/{id}/files", s.recorded(actionWrite, s.makeDirectory))
	s.page("DELETE sandboxes/{id}/files", s.recorded(actionDelete, s.removeFile))
	s.page("POST sandboxes/{id}/terminal", s.terminalTicket)
	s.page("GET pools", s.pools)
	s.page("GET snapshots", s.snapshots)
	s.page("GET templates/{id}/revisions", s.revisions)
	s.page("GET server", s.server)
	s.page(" rest/{path...}", s.rest)
	s.mux.HandleFunc("GET /ui/api/sandboxes/{id}/download", s.authenticated(true, s.download))
	s.mux.HandleFunc("GET /ui/api/sandboxes/{id}/ports/{port}", s.authenticated(true, s.openPort))
	s.mux.HandleFunc("GET /ui/api/sandboxes/{id}/terminal", s.authenticated(true, s.terminal))
	s.mux.HandleFunc(apiPath, func(w http.ResponseWriter, r *http.Request) {
		request.WriteError(w, http.StatusNotFound, "no such route: "+r.Method+" "+r.URL.Path)
	})
	s.mux.HandleFunc("/ui/assets/", webfile.Reads(s.serveAsset))
	s.mux.HandleFunc("/ui/", webfile.Reads(s.serveIndex))
	s.mux.Handle("/ui", http.RedirectHandler("/ui/", http.StatusFound))
}

// page registers a route of the page's scripts: a method and a path below apiPath.
func (s *Server) page(route string, h handler) {
	method, path, _ := strings.Cut(route, " ")
	s.mux.HandleFunc(strings.TrimSpace(method+" "+apiPath+path), s.authenticated(false, h))
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'; sandbox")
	h.Set("Cache-Control", "no-store")
	s.mux.ServeHTTP(w, r)
}

// open serves a route that needs no session, but must be the page's own.
func (s *Server) open(h func(w http.ResponseWriter, r *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		err := guard(r, false)
		if err == nil {
			err = h(w, r)
		}
		if err != nil {
			s.Fail(w, r, err)
		}
	}
}

func (s *Server) authenticated(bare bool, h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		err := guard(r, bare)
		var who caller
		if err == nil {
			who, err = s.authenticate(r)
		}
		if err == nil {
			err = h(w, r, who)
		}
		if err != nil && !errors.Is(err, errSent) {
			s.Fail(w, r, err)
		}
	}
}

// errSent is of a handler whose response has begun.
var errSent = errors.New("the response has begun")

// readJSON reads a body that may not have more than maxJSON bytes.
func readJSON(w http.ResponseWriter, r *http.Request, into any) error {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxJSON)).Decode(into); err != nil {
		return request.BadBody(err)
	}
	return nil
}

func writeJSON(w http.ResponseWriter, v any) error {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		return errors.Join(errSent, err)
	}
	return nil
}

// signIn exchanges a key or the ticket of a link for a session. A session that the browser had ends.
func (s *Server) signIn(w http.ResponseWriter, r *http.Request) error {
	var req struct{ Key, Ticket string }
	if err := readJSON(w, r, &req); err != nil {
		return err
	}
	key := strings.TrimSpace(req.Key)
	switch {
	case (key == "") == (req.Ticket == ""):
		return request.Invalid("key: give an API key, or the ticket of a link")
	case req.Ticket != "":
		var ok bool
		if key, ok = s.sessions.TakeLink(req.Ticket); !ok {
			return errs.Public(errs.ErrUnauthenticated, "the link is used up or older than a minute; make a new one with: barchan ui")
		}
	}
	who, err := s.cfg.Keys.Authenticate(r.Context(), key)
	if err != nil {
		return err
	}
	if old, err := s.authenticate(r); err == nil {
		s.sessions.End(old.session)
	}
	secret, err := s.sessions.Start(who.Namespace, key)
	if err != nil {
		return err
	}
	setCookie(w, r, secret)
	s.record(r, who, actionSignIn, http.StatusOK)
	s.Log.InfoContext(r.Context(), "dashboard session started", telemetry.Namespace, who.Namespace, telemetry.Name, who.Key)
	return writeJSON(w, sessionView(who))
}

// link makes a ticket for the holder of a key, for a program: a browser's page of another origin cannot read the answer.
func (s *Server) link(w http.ResponseWriter, r *http.Request) {
	key := r.Header.Get("X-API-Key")
	who, err := s.cfg.Keys.Authenticate(r.Context(), key)
	var secret string
	if err == nil {
		secret, err = s.sessions.Link(who.Namespace, key)
	}
	if err != nil {
		s.Fail(w, r, err)
		return
	}
	_ = writeJSON(w, map[string]any{"ticket": secret, "expiresInSeconds": int(sessions.LinkLife.Seconds())})
}

func sessionView(who apikeys.Identity) any {
	return map[string]any{"namespace": who.Namespace, "key": who.Key, "scope": who.Scope.OrAdmin(), "expiresAt": who.ExpiresAt}
}

func (s *Server) showSession(w http.ResponseWriter, _ *http.Request, who caller) error {
	return writeJSON(w, sessionView(who.Identity))
}

func (s *Server) signOut(w http.ResponseWriter, r *http.Request, who caller) error {
	s.sessions.End(who.session)
	setCookie(w, r, "")
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// rest passes a request to the REST API, by the session's key.
func (s *Server) rest(w http.ResponseWriter, r *http.Request, who caller) error {
	to := r.Clone(r.Context())
	to.URL.Path = "/" + r.PathValue("path")
	to.URL.RawPath = ""
	to.RequestURI = to.URL.RequestURI()
	for _, name := range []string{"Cookie", "Authorization", "Origin"} {
		to.Header.Del(name)
	}
	to.Header.Set("X-API-Key", who.session.Key)
	s.cfg.REST.ServeHTTP(closed{w}, to)
	return nil
}

// closed leaves the headers that the API opens to pages of all origins out of a response.
type closed struct{ http.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (c closed) WriteHeader(status int) {
	c.clear()
	c.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (c closed) Write(b []byte) (int, error) {
	c.clear()
	return c.ResponseWriter.Write(b)
}

func (c closed) clear() {
	h := c.Header()
	for _, name := range []string{"Allow-Origin", "Allow-Methods", "Allow-Headers", "Expose-Headers"} {
		h.Del("Access-Control-" + name)
	}
}

// Unwrap serves http.ResponseController.
func (c closed) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// live is a context that ends with a request, with the server, or with the session.
func (s *Server) live(parent context.Context, who caller) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	go func() {
		check := time.NewTicker(checkEvery)
		defer check.Stop()
		defer cancel()
		for {
			select {
			case <-ctx.Done():
				return
			case <-s.stopped:
				return
			case <-check.C:
			}
			if !s.sessions.Alive(who.session) {
				return
			}
			if _, err := s.cfg.Keys.Authenticate(ctx, who.session.Key); errs.Kind(err) == errs.ErrUnauthenticated { //nolint:errorlint // a kind is compared
				return
			}
		}
	}()
	return ctx, cancel
}

// checkEvery is how soon a stream ends after its session or its key.
const checkEvery = 10 * time.Second
