package agent

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"syscall"

	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// newContainers passes requests on to the agents of the sandbox's other containers. The guard of this agent has checked the
// token, and that of the other checks it again.
func newContainers(log *slog.Logger) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		FlushInterval: -1, // streams
		ErrorLog:      slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		Rewrite: func(r *httputil.ProxyRequest) {
			container := r.In.PathValue("container")
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", container, ""
			r.Out.URL.Path, r.Out.URL.RawPath = strings.TrimPrefix(r.In.URL.Path, envd.PathContainers+container), ""
		},
		ModifyResponse: func(res *http.Response) error {
			for name := range res.Header { // this agent's own headers allow browsers
				if strings.HasPrefix(name, "Access-Control-") {
					delete(res.Header, name)
				}
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			reply.WriteError(w, http.StatusBadGateway, err)
		},
		Transport: &http.Transport{
			DisableCompression: true, DisableKeepAlives: true, // local connections cost little
			DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
				container, _, err := net.SplitHostPort(address)
				if err != nil {
					return nil, err
				}
				return (&net.Dialer{}).DialContext(ctx, "unix", envd.ContainerSocket(container))
			},
		},
	}
}

func (a *Agent) toContainer(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor == 1 {
		_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/1.1 supports it
	}
	a.containers.ServeHTTP(w, r)
}

// postRestart ends the entrypoint. It is started again as after any other end.
func (a *Agent) postRestart(w http.ResponseWriter, r *http.Request) error {
	if a.cfg.Restart == "" {
		return reply.Refuse(http.StatusConflict, "the entrypoint of this container is not started again")
	}
	if state := a.entrypoint.status(); state.Running {
		if err := a.reaper.Signal(state.PID, syscall.SIGKILL); err != nil {
			return err
		}
	}
	return reply.NoContent(w, r)
}
