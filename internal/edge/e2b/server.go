package e2b

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/events"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/edge/e2b/sandboxes"
	"github.com/barchan-dev/barchan/internal/edge/e2b/teams"
	"github.com/barchan-dev/barchan/internal/edge/e2b/templates"
	"github.com/barchan-dev/barchan/internal/edge/e2b/volumes"
)

// Defaults of the wire format.
const (
	defaultTimeout = 300 * time.Second
	defaultMaxBody = 1 << 20
)

// Config configures a Server.
type Config struct {
	// Manager and Log are required.
	Manager *manager.Manager
	Log     *slog.Logger
	// Domains are the domains of sandboxes. A request to the host api below one of them gets that
	// domain in responses, others get Domain, which may have a port. Empty: clients use their own.
	Domains []string
	Domain  string
	// MaxBody bounds a request's body, in bytes. Default 1 MiB.
	MaxBody int64
	// DefaultTimeout is the time to live of a sandbox made or connected to by the v2 routes
	// without a timeout. Default 300 s.
	DefaultTimeout time.Duration
	// SSH is how clients reach sandboxes over SSH; nil: they cannot.
	SSH *api.SSHAccess
	// Tokens accepts tokens of a Kubernetes cluster as keys; nil: there are API keys alone.
	Tokens Tokens
	// Server sends a request to the server whose replica this process is, which answers what a replica cannot; nil: it is none.
	Server http.RoundTripper
	// Audit records what callers change; nil: nothing.
	Audit *auditlog.Log
	// Metrics, if set, gets the request histogram.
	Metrics prometheus.Registerer
}

// The families of routes, named for embedding.
type (
	sandboxRoutes  = sandboxes.Handlers
	templateRoutes = templates.Handlers
	volumeRoutes   = volumes.Handlers
	teamRoutes     = teams.Handlers
	eventRoutes    = events.Handlers
)

// handlers has all generated routes.
type handlers struct {
	*sandboxRoutes
	*templateRoutes
	*volumeRoutes
	*teamRoutes
	*eventRoutes
}

var _ api.StrictServerInterface = handlers{}

// Server serves the control plane's requests. It is safe for concurrent use.
type Server struct {
	request.Errors
	handlers handlers
	keys     *apikeys.Store
	tokens   Tokens // nil: there are none
	domains  []string
	domain   string
	maxBody  int64
	bodies   request.Bodies
	mux      *http.ServeMux         // generated routes
	refused  *http.ServeMux         // E2B's routes that no key may use
	forward  *httputil.ReverseProxy // nil but in a replica
	seconds  *prometheus.HistogramVec
	audit    *auditlog.Log // nil: nothing is recorded
}

// Metrics registers the metrics of a server without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to)
	return err
}

func newMetrics(to prometheus.Registerer) (*prometheus.HistogramVec, error) {
	seconds := prometheus.NewHistogramVec(telemetry.DurationOpts("api", "request",
		"Time to answer a request of the E2B API, by route (such as `POST /v2/sandboxes`) and HTTP status."), []string{"route", "status"})
	return seconds, telemetry.Register(to, seconds)
}

// New checks the configuration.
func New(cfg Config) (*Server, error) {
	if cfg.Manager == nil || cfg.Log == nil {
		return nil, fmt.Errorf("e2b: Manager and Log are required: %w", errs.ErrInvalid)
	}
	if cfg.MaxBody < 0 || cfg.DefaultTimeout < 0 {
		return nil, fmt.Errorf("e2b: MaxBody and DefaultTimeout must be positive: %w", errs.ErrInvalid)
	}
	seconds, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, fmt.Errorf("e2b: %w", err)
	}
	s := &Server{
		Errors: request.Errors{Log: cfg.Log.With(telemetry.Component, "e2b")},
		keys:   cfg.Manager.Keys, tokens: cfg.Tokens, domains: cfg.Domains, domain: cfg.Domain, maxBody: cmp.Or(cfg.MaxBody, defaultMaxBody), audit: cfg.Audit,
		mux: http.NewServeMux(), refused: refusedRoutes(),
		seconds: seconds,
	}
	if cfg.Server != nil {
		s.forward = s.newForward(cfg.Server)
	}
	s.handlers = handlers{
		&sandboxRoutes{Errors: s.Errors, Manager: cfg.Manager, DefaultTimeout: cmp.Or(cfg.DefaultTimeout, defaultTimeout)},
		&templateRoutes{Errors: s.Errors, Manager: cfg.Manager},
		&volumeRoutes{Errors: s.Errors, Manager: cfg.Manager, MaxBody: s.maxBody},
		&teamRoutes{Manager: cfg.Manager, SSH: cfg.SSH},
		&eventRoutes{Manager: cfg.Manager},
	}
	strict := api.NewStrictHandlerWithOptions(s.handlers, nil, api.StrictHTTPServerOptions{
		RequestErrorHandlerFunc:  func(w http.ResponseWriter, r *http.Request, err error) { s.Fail(w, r, request.BadBody(err)) },
		ResponseErrorHandlerFunc: s.Fail,
	})
	api.HandlerWithOptions(strict, api.StdHTTPServerOptions{
		BaseRouter:       router{s.mux},
		ErrorHandlerFunc: func(w http.ResponseWriter, r *http.Request, err error) { s.Fail(w, r, request.BadParameter(err)) },
	})
	return s, nil
}

// tagsInMux is tagsRoute in a form that a mux can have beside GET /templates/aliases/{alias}, which takes precedence.
const (
	tagsRoute = "GET /templates/{templateID}/tags"
	tagsInMux = "GET /templates/{templateID}/{tags}"
)

// router registers that route so.
type router struct{ *http.ServeMux }

// HandleFunc implements the generated interface.
func (r router) HandleFunc(pattern string, serve func(http.ResponseWriter, *http.Request)) {
	if pattern != tagsRoute {
		r.ServeMux.HandleFunc(pattern, serve)
		return
	}
	r.ServeMux.HandleFunc(tagsInMux, func(w http.ResponseWriter, req *http.Request) {
		if req.PathValue("tags") != "tags" {
			request.WriteError(w, http.StatusNotFound, fmt.Sprintf("no such route: %s %s", req.Method, req.URL.Path))
			return
		}
		serve(w, req)
	})
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	out := &telemetry.StatusRecorder{ResponseWriter: w}
	_, route := s.mux.Handler(r)
	if route == tagsInMux {
		route = tagsRoute
	}
	defer func() { //nolint:contextcheck // it is the request's
		if p := recover(); p != nil {
			s.panicked(out, r, p)
		}
		if route == "" {
			route = "none"
		}
		telemetry.ObserveSince(r.Context(), s.seconds.WithLabelValues(route, strconv.Itoa(out.Status)), start)
	}()
	if r.Method == http.MethodPut && strings.HasPrefix(r.URL.Path, templates.UploadPath) {
		route = uploadRoute
	}
	if s.isServers(r, route) {
		s.forward.ServeHTTP(out, r)
		return
	}
	allowOrigins(w.Header())
	switch {
	case route == uploadRoute:
		s.handlers.ServeUpload(out, r, strings.TrimPrefix(r.URL.Path, templates.UploadPath))
	case r.Method == http.MethodOptions:
		out.WriteHeader(http.StatusNoContent)
	case isContent(r, route):
		s.handlers.ServeContent(out, r, s.mux)
	case route == "":
		s.noRoute(out, r)
	default:
		s.serveRoute(out, r, route)
	}
}

func (s *Server) serveRoute(w *telemetry.StatusRecorder, r *http.Request, route string) {
	who, err := s.authenticate(r, route)
	defer func() { s.record(w, r, route, who) }()
	if err != nil {
		s.Fail(w, r, err)
		return
	}
	done, err := s.bodies.Take(who.Namespace, r.ContentLength)
	if err == nil {
		defer done()
		err = request.ReadBody(w, r, s.mostOf(route))
	}
	if err != nil {
		s.Fail(w, r, err)
		return
	}
	r = r.WithContext(request.WithCaller(r.Context(), who))
	s.mux.ServeHTTP(w, r)
}

// maxSandbox bounds the bodies of requests about sandboxes: what they have becomes part of an object, which the server keeps in memory.
const maxSandbox = 64 << 10

// mostOf returns how large the body of a request may be.
func (s *Server) mostOf(route string) int64 {
	if strings.Contains(route, "/sandboxes") {
		return min(s.maxBody, maxSandbox)
	}
	return s.maxBody
}

// authenticate finds out who sends a request, and whether it may use the route.
func (s *Server) authenticate(r *http.Request, route string) (request.Caller, error) {
	secret := r.Header.Get("X-API-Key")
	if secret == "" {
		if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
			secret = strings.TrimSpace(token)
		}
	}
	if secret == "" {
		return request.Caller{}, errs.Public(errs.ErrUnauthenticated, "an API key is required: send it in the header X-API-Key")
	}
	c := request.Caller{Made: new([]string), Secret: secret, Domain: s.domainOf(r), Origin: request.Origin(r)}
	var err error
	c.Identity, err = s.keys.Authenticate(r.Context(), secret)
	switch {
	case err == nil:
		err = checkScope(c.Scope, route)
	case errors.Is(err, errs.ErrUnauthenticated) && s.tokens != nil && !strings.HasPrefix(secret, barchan.KeyPrefix):
		err = s.authorize(r.Context(), &c, route)
	}
	return c, err
}

// domainOf returns the text after "<port>-<id>." with which a client reaches a sandbox over TLS: the
// domain of the API request, with its port, or else the server's. A port without TLS is not used.
func (s *Server) domainOf(r *http.Request) string {
	domain, is := strings.CutPrefix(strings.ToLower(r.Host), "api.")
	name := hostOf(domain)
	known := slices.ContainsFunc(s.domains, func(d string) bool { return hostOf(d) == name })
	if is && known && (r.TLS != nil || name == domain) { // without a port: TLS here or at a proxy
		return domain
	}
	return s.domain
}

// hostOf removes a port.
func hostOf(domain string) string {
	if host, _, err := net.SplitHostPort(domain); err == nil {
		return host
	}
	return domain
}

func allowOrigins(h http.Header) {
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Allow-Methods", "GET, POST, PUT, PATCH, DELETE, OPTIONS")
	h.Set("Access-Control-Allow-Headers", "*, Authorization")
	h.Set("Access-Control-Expose-Headers", "X-Next-Token, X-Total-Running")
}

// panicked responds for a handler that panicked.
func (s *Server) panicked(w *telemetry.StatusRecorder, r *http.Request, p any) {
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(p)
	}
	s.Log.ErrorContext(r.Context(), "panic in a handler", telemetry.Method, r.Method, telemetry.Path, r.URL.Path,
		telemetry.Error, fmt.Sprint(p), "stack", string(debug.Stack()))
	if w.Status == 0 {
		request.WriteError(w, http.StatusInternalServerError, request.InternalText)
	}
}
