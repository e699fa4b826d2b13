package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
)

// Defaults of the wire format.
const (
	defaultTimeoutV1 = 15 * time.Second
	defaultTimeoutV2 = 300 * time.Second
	defaultMaxBody   = 1 << 20
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
	SSH *SSHAccess
	// Tokens accepts tokens of a Kubernetes cluster as keys; nil: there are API keys alone.
	Tokens Tokens
	// Metrics, if set, gets the request histogram.
	Metrics prometheus.Registerer
}

// Server serves the control plane's requests. It is safe for concurrent use.
type Server struct {
	manager        *manager.Manager
	tokens         Tokens // nil: there are none
	ssh            *SSHAccess
	log            *slog.Logger
	domains        []string
	domain         string
	maxBody        int64
	defaultTimeout time.Duration
	mux            *http.ServeMux // generated routes
	later          *http.ServeMux // E2B's routes that are not available yet
	seconds        *prometheus.HistogramVec
}

// New checks the configuration.
func New(cfg Config) (*Server, error) {
	if cfg.Manager == nil || cfg.Log == nil {
		return nil, fmt.Errorf("e2b: Manager and Log are required: %w", errs.ErrInvalid)
	}
	if cfg.MaxBody < 0 || cfg.DefaultTimeout < 0 {
		return nil, fmt.Errorf("e2b: MaxBody and DefaultTimeout must be positive: %w", errs.ErrInvalid)
	}
	s := &Server{
		manager: cfg.Manager, tokens: cfg.Tokens, ssh: cfg.SSH, log: cfg.Log.With(telemetry.Component, "e2b"),
		domains: cfg.Domains, domain: cfg.Domain,
		maxBody: cfg.MaxBody, defaultTimeout: cfg.DefaultTimeout,
		mux: http.NewServeMux(), later: laterRoutes(),
		seconds: prometheus.NewHistogramVec(telemetry.DurationOpts("api", "request", "Time to answer a request of the E2B API."), []string{"route", "status"}),
	}
	if s.maxBody == 0 {
		s.maxBody = defaultMaxBody
	}
	if s.defaultTimeout == 0 {
		s.defaultTimeout = defaultTimeoutV2
	}
	if cfg.Metrics != nil {
		if err := cfg.Metrics.Register(s.seconds); err != nil {
			return nil, fmt.Errorf("register the API's metrics: %w", err)
		}
	}
	strict := NewStrictHandlerWithOptions(&handlers{s}, nil, StrictHTTPServerOptions{
		RequestErrorHandlerFunc:  func(w http.ResponseWriter, r *http.Request, err error) { s.fail(w, r, badBody(err)) },
		ResponseErrorHandlerFunc: s.fail,
	})
	HandlerWithOptions(strict, StdHTTPServerOptions{
		BaseRouter:       router{s.mux},
		ErrorHandlerFunc: func(w http.ResponseWriter, r *http.Request, err error) { s.fail(w, r, badParameter(err)) },
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
			writeError(w, http.StatusNotFound, fmt.Sprintf("no such route: %s %s", req.Method, req.URL.Path))
			return
		}
		serve(w, req)
	})
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	out := &recorder{ResponseWriter: w}
	_, route := s.mux.Handler(r)
	if route == tagsInMux {
		route = tagsRoute
	}
	defer func() {
		if p := recover(); p != nil {
			s.panicked(out, r, p)
		}
		if route == "" {
			route = "none"
		}
		s.seconds.WithLabelValues(route, strconv.Itoa(out.status)).Observe(time.Since(start).Seconds())
	}()
	allowOrigins(w.Header())
	upload, uploads := strings.CutPrefix(r.URL.Path, uploadPath)
	switch {
	case uploads && r.Method == http.MethodPut:
		route = "PUT " + uploadPath
		s.serveUpload(out, r, upload)
	case r.Method == http.MethodOptions:
		out.WriteHeader(http.StatusNoContent)
	case route != "" && strings.HasPrefix(r.URL.Path, contentPath):
		s.serveContent(out, r)
	case route == "":
		s.noRoute(out, r)
	default:
		s.serveRoute(out, r, route)
	}
}

func (s *Server) serveRoute(w http.ResponseWriter, r *http.Request, route string) {
	who, err := s.authenticate(r, route)
	if err != nil {
		s.fail(w, r, err)
		return
	}
	if err := s.readBody(w, r); err != nil {
		s.fail(w, r, err)
		return
	}
	s.mux.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, who)))
}

// caller identifies a request's client, its key and the domain by which it reaches sandboxes.
type caller struct {
	apikeys.Identity
	secret, domain string
	// origin is the scheme and the host by which the client reaches this API.
	origin string
	// readOnly: it gets no access token of a sandbox, with which it could change the sandbox.
	readOnly bool
}

type callerKey struct{}

// callerOf must be called behind serveRoute.
func callerOf(ctx context.Context) caller {
	who, _ := ctx.Value(callerKey{}).(caller)
	return who
}

// authenticate finds out who sends a request, and whether it may use the route.
func (s *Server) authenticate(r *http.Request, route string) (caller, error) {
	secret := r.Header.Get("X-API-Key")
	if secret == "" {
		if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
			secret = strings.TrimSpace(token)
		}
	}
	if secret == "" {
		return caller{}, errs.Public(errs.ErrUnauthenticated, "an API key is required: send it in the header X-API-Key")
	}
	c := caller{secret: secret, domain: s.domainOf(r), origin: originOf(r)}
	var err error
	if c.Identity, err = s.manager.Keys.Authenticate(r.Context(), secret); errors.Is(err, errs.ErrUnauthenticated) && s.tokens != nil && !strings.HasPrefix(secret, barchan.KeyPrefix) {
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

// readBody reads the whole body first, so that its errors are reported before any change is made.
func (s *Server) readBody(w http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.maxBody))
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		return errs.Public(errs.ErrTooLarge, fmt.Sprintf("the body is larger than %d bytes", s.maxBody))
	}
	if err != nil {
		return errs.Public(fmt.Errorf("%w: %w", errs.ErrInvalid, err), "the body could not be read")
	}
	body = bytes.TrimSpace(body)
	if len(body) > 0 {
		var raw json.RawMessage
		if err := json.Unmarshal(body, &raw); err != nil {
			return badBody(err)
		}
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	return nil
}

func allowOrigins(h http.Header) {
	h.Set("Access-Control-Allow-Origin", "*")
	h.Set("Access-Control-Allow-Methods", "GET, POST, PUT, PATCH, DELETE, OPTIONS")
	h.Set("Access-Control-Allow-Headers", "*, Authorization")
	h.Set("Access-Control-Expose-Headers", "X-Next-Token, X-Total-Running")
}

// panicked responds for a handler that panicked.
func (s *Server) panicked(w *recorder, r *http.Request, p any) {
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(p)
	}
	s.log.ErrorContext(r.Context(), "panic in a handler", telemetry.Method, r.Method, telemetry.Path, r.URL.Path,
		telemetry.Error, fmt.Sprint(p), "stack", string(debug.Stack()))
	if w.status == 0 {
		writeError(w, http.StatusInternalServerError, internalText)
	}
}

// recorder records the status.
type recorder struct {
	http.ResponseWriter
	status int
}

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (r *recorder) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	return r.ResponseWriter.Write(b)
}

// Unwrap serves http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
