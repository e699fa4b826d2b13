package e2b

import (
	"log/slog"
	"net/http"
	"net/http/httputil"
	"strings"

	"go.opentelemetry.io/otel/propagation"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/edge/e2b/templates"
	"github.com/barchan-dev/barchan/internal/edge/e2b/volumes"
)

// uploadRoute is the route of uploads of builds, whose URLs are signed.
const uploadRoute = "PUT " + templates.UploadPath

// newForward returns what passes requests on to a replica's server as they are. The server authenticates them, bounds their bodies and
// records them in its audit log.
func (s *Server) newForward(server http.RoundTripper) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.SetXForwarded()
			scheme, host, _ := strings.Cut(request.Origin(p.In), "://") // by which clients upload to this replica
			p.Out.Header.Set("X-Forwarded-Proto", scheme)
			p.Out.Header.Set("X-Forwarded-Host", host)
			telemetry.Propagator().Inject(p.In.Context(), propagation.HeaderCarrier(p.Out.Header))
		},
		Transport: server,
		ErrorLog:  slog.NewLogLogger(s.Log.Handler(), slog.LevelInfo),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			allowOrigins(w.Header())
			s.Fail(w, r, err)
		},
	}
}

// isServers reports whether the server answers a request, and this replica does not.
func (s *Server) isServers(r *http.Request, route string) bool {
	return s.forward != nil && (rightsOf[route].server || route == uploadRoute || isContent(r, route))
}

// isContent reports whether a request is for the files of a volume.
func isContent(r *http.Request, route string) bool {
	return route != "" && strings.HasPrefix(r.URL.Path, volumes.ContentPath)
}
