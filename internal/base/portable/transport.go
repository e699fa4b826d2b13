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

// Access says how a registry is spoken to, besides what Docker's configuration of the user says of
// passwords. The zero value is TLS with the authorities that the system trusts, which SSL_CERT_FILE names.
type Access struct {
	// PlainHTTP allows a registry without TLS, which those on loopback addresses may be in any case.
	PlainHTTP bool
	// CAFile has certificates of authorities that are trusted too, in PEM; empty for none.
	CAFile string
	// Username and Password, where there is a name, stand for what Docker's configuration says.
	Username, Password string
	// Patience is how long a registry may move no byte while it is waited for; zero is 5 minutes.
	Patience time.Duration
}

// defaultPatience leaves a registry time to bring a large blob to where it keeps it before it answers.
const defaultPatience = 5 * time.Minute

// transport makes what requests go by. Its errors are errs.ErrInvalid.
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

// errPlain refuses what would carry a password where all can read it: the library that speaks to
// registries tries private addresses without TLS when TLS fails.
var errPlain = fmt.Errorf("it would be spoken to without TLS: %w", errs.ErrForbidden)

// wire refuses requests without TLS where nobody asked for them, and ends those whose answer stands still.
type wire struct {
	inner    http.RoundTripper
	plain    bool
	patience time.Duration
}

// silent is a registry that is there and does nothing.
type silent struct{ time.Duration }

func (s silent) Error() string {
	return fmt.Sprintf("the registry has moved no byte for %s", s.Duration)
}

// Is makes it a kind.
func (silent) Is(target error) bool { return target == errs.ErrUnavailable }

// RoundTrip implements http.RoundTripper. The time in which the request's body is made, or the answer's
// is not read, is not the registry's.
func (w *wire) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme != "https" && !w.plain {
		return nil, errPlain
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	clock := time.AfterFunc(w.patience, func() { cancel(silent{w.patience}) })
	told := func(err error) error {
		if why, ok := errors.AsType[silent](context.Cause(ctx)); ok && err != nil && !errors.Is(err, io.EOF) {
			return why
		}
		return err
	}
	req = req.Clone(ctx)
	if req.Body != nil && req.Body != http.NoBody {
		req.Body = &watched{ReadCloser: req.Body, before: clock.Stop, after: func() { clock.Reset(w.patience) }, told: told}
	}
	res, err := w.inner.RoundTrip(req)
	clock.Stop()
	if err != nil {
		err = told(err)
		cancel(nil)
		return nil, err
	}
	res.Body = &watched{
		ReadCloser: res.Body, before: func() bool { return clock.Reset(w.patience) }, after: func() { clock.Stop() },
		told: told, end: func() { clock.Stop(); cancel(nil) },
	}
	return res, nil
}

// watched is a body of which each read has a before and an after.
type watched struct {
	io.ReadCloser
	before func() bool
	after  func()
	told   func(error) error
	end    func()
}

func (w *watched) Read(b []byte) (int, error) {
	w.before()
	n, err := w.ReadCloser.Read(b)
	w.after()
	return n, w.told(err)
}

func (w *watched) Close() error {
	if w.end != nil {
		defer w.end()
	}
	return w.ReadCloser.Close()
}
