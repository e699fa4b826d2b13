package apiserver

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// A replica forwards a request of the REST API to the API server below forwardPath, which only the administrator may use. Its
// Authorization has the replica's credentials then, and authorizationHeader the client's.
const (
	forwardPath         = "/e2b"
	authorizationHeader = "Barchan-Forwarded-Authorization"
	// via is in the header Via of each response of the REST API. The API server's own responses do not have it.
	via = "1.1 barchan"
	// forwardTimeout bounds the wait for a response after all of a request was sent.
	forwardTimeout = 5 * time.Minute
)

// isForwarded reports whether a request comes from a replica. It may take as long as the REST API lets it.
func isForwarded(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, forwardPath+"/") }

// serveForwarded has h serve a replica's requests as their clients sent them to the replica.
func serveForwarded(h http.Handler) http.Handler {
	return http.StripPrefix(forwardPath, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		move(r.Header, authorizationHeader, "Authorization")
		if client := r.Header.Get("X-Forwarded-For"); client != "" {
			r.RemoteAddr = net.JoinHostPort(client, "0")
		}
		r.TLS = nil // the replica's; X-Forwarded-Proto is about the client's
		w.Header().Set("Via", via)
		h.ServeHTTP(w, r)
	}))
}

// forwarder is the replica's end.
type forwarder struct {
	base *url.URL
	next http.RoundTripper
}

// NewForwarder returns a transport that sends a request of the REST API to the server whose API server cfg reaches, whatever the host
// of its URL is. Its connections are its own and of HTTP/1.1: in HTTP/2 an upload that pauses would hold the window of the watches.
// A server that does not answer, or that does not serve a replica's requests, is an errs.ErrUnavailable.
func NewForwarder(cfg *rest.Config) (http.RoundTripper, error) {
	cfg = rest.CopyConfig(cfg)
	cfg.WrapTransport = nil // of watches
	secured, err := rest.TLSConfigFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("TLS to the API server: %w", err)
	}
	next, err := rest.HTTPWrappersForConfig(cfg, &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: cfg.Dial, TLSClientConfig: secured, TLSHandshakeTimeout: 10 * time.Second,
		MaxIdleConnsPerHost: 25, IdleConnTimeout: 90 * time.Second, ResponseHeaderTimeout: forwardTimeout,
	})
	if err != nil {
		return nil, fmt.Errorf("credentials for the API server: %w", err)
	}
	base, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("address of the API server: %w", err)
	}
	base.Path, base.RawPath = strings.TrimSuffix(base.Path, "/")+forwardPath, ""
	return &forwarder{base, next}, nil
}

// RoundTrip implements http.RoundTripper.
func (f *forwarder) RoundTrip(r *http.Request) (*http.Response, error) {
	out := r.Clone(r.Context())
	out.URL.Scheme, out.URL.Host, out.URL.Path = f.base.Scheme, f.base.Host, f.base.Path+r.URL.Path
	if r.URL.RawPath != "" {
		out.URL.RawPath = f.base.EscapedPath() + r.URL.RawPath
	}
	for name := range out.Header {
		if strings.HasPrefix(name, "Impersonate-") { // would be the API server's
			out.Header.Del(name)
		}
	}
	move(out.Header, "Authorization", authorizationHeader)
	resp, err := f.next.RoundTrip(out)
	if err != nil {
		return nil, errs.Public(fmt.Errorf("forward to the server: %w: %w", err, errs.ErrUnavailable),
			"the server that this replica belongs to does not answer; try again")
	}
	if !slices.Contains(resp.Header.Values("Via"), via) {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 200)) // for the log
		_ = resp.Body.Close()
		return nil, errs.Public(fmt.Errorf("forward to the server: the API server answers %s: %s: %w", resp.Status, text, errs.ErrUnavailable),
			fmt.Sprintf("the server that this replica belongs to does not serve its requests (status %d); it needs the same version, and the replica the administrator's kubeconfig", resp.StatusCode))
	}
	return resp, nil
}

// move renames a header, and removes what had the new name.
func move(h http.Header, from, to string) {
	h.Del(to)
	if values := h.Values(from); len(values) > 0 {
		h[to] = values
		h.Del(from)
	}
}
