package portable

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Access configures access to a registry, beside the passwords in the user's Docker configuration. The
// zero value is TLS with the system's CAs, or those of SSL_CERT_FILE.
type Access struct {
	// PlainHTTP allows a registry without TLS; loopback addresses are always allowed.
	PlainHTTP bool
	// CAFile has additional CA certificates in PEM; empty for none.
	CAFile string
	// Username and Password, if there is a name, override Docker's configuration.
	Username, Password string
	// Patience is how long a registry may transfer no byte; zero is 5 minutes.
	Patience time.Duration
}

// defaultPatience leaves a registry time to store a large blob before it responds.
const defaultPatience = 5 * time.Minute

// transport returns the transport for requests. Its errors are errs.ErrInvalid.
func (a Access) transport(host string) (http.RoundTripper, error) {
	base, ok := remote.DefaultTransport.(*http.Transport)
	if !ok {
		return nil, fmt.Errorf("the registry's transport is a %T: %w", remote.DefaultTransport, errs.ErrInvalid)
	}
	base = base.Clone()
	if a.CAFile != "" {
		trusted, err := x509.SystemCertPool()
		if err != nil {
			trusted = x509.NewCertPool()
		}
		text, err := os.ReadFile(a.CAFile)
		if err != nil {
			return nil, fmt.Errorf("read the registry's CA: %w: %w", err, errs.ErrInvalid)
		}
		if !trusted.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("read the registry's CA: %s has no certificate in PEM: %w", a.CAFile, errs.ErrInvalid)
		}
		base.TLSClientConfig = &tls.Config{RootCAs: trusted, MinVersion: tls.VersionTLS12}
	}
	w := &wire{inner: base, plain: a.PlainHTTP || isLoopback(host), patience: a.Patience}
	if w.patience == 0 {
		w.patience = defaultPatience
	}
	return w, nil
}

// isLoopback reports whether a registry's host, with or without port, is this machine.
func isLoopback(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	addr, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || (err == nil && addr.IsLoopback())
}

// errPlain rejects requests that would send a password unencrypted: the registry library tries private
// addresses without TLS when TLS fails.
var errPlain = fmt.Errorf("it would be spoken to without TLS: %w", errs.ErrForbidden)

// wire rejects requests without TLS unless allowed, and aborts those whose response stalls.
type wire struct {
	inner    http.RoundTripper
	plain    bool
	patience time.Duration
}

// silent is the error for a registry that accepts connections but does not respond.
type silent struct{ time.Duration }

func (s silent) Error() string {
	return fmt.Sprintf("the registry has moved no byte for %s", s.Duration)
}

// Is matches errs.ErrUnavailable.
func (silent) Is(target error) bool { return target == errs.ErrUnavailable }

// RoundTrip implements http.RoundTripper. Time in which the caller produces the request body or does
// not read the response is not counted.
func (w *wire) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !w.plain {
		return nil, errPlain
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	clock := time.AfterFunc(w.patience, func() { cancel(silent{w.patience}) })
	explain := func(err error) error {
		if why, ok := errors.AsType[silent](context.Cause(ctx)); ok && err != nil && !errors.Is(err, io.EOF) {
			return why
		}
		return err
	}
	req = req.Clone(ctx)
	if req.Body != nil && req.Body != http.NoBody {
		req.Body = &watched{ReadCloser: req.Body, before: clock.Stop, after: func() { clock.Reset(w.patience) }, explain: explain}
	}
	res, err := w.inner.RoundTrip(req)
	clock.Stop()
	if err != nil {
		err = explain(err)
		cancel(nil)
		return nil, err
	}
	res.Body = &watched{
		ReadCloser: res.Body, before: func() bool { return clock.Reset(w.patience) }, after: func() { clock.Stop() },
		explain: explain, end: func() { clock.Stop(); cancel(nil) },
	}
	return res, nil
}

// watched is a body with hooks before and after each read.
type watched struct {
	io.ReadCloser
	before  func() bool
	after   func()
	explain func(error) error
	end     func()
}

func (w *watched) Read(b []byte) (int, error) {
	w.before()
	n, err := w.ReadCloser.Read(b)
	w.after()
	return n, w.explain(err)
}

func (w *watched) Close() error {
	if w.end != nil {
		defer w.end()
	}
	return w.ReadCloser.Close()
}
