package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/edge/gateway/confine"
	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/edge/gateway/framing"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/edge/gateway/requestbody"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
)

var (
	// errMalformed marks a response that is not valid HTTP.
	errMalformed = errors.New("malformed response")
	// errClient marks an exchange whose request body broke off.
	errClient = errors.New("client's body broke off")
)

// maxInterim bounds the 1xx responses before a final one.
const maxInterim = 16

// speaksGRPC reports whether the sandbox gets HTTP/2 without TLS: gRPC requires it end to end.
func speaksGRPC(r *http.Request) bool {
	if r.ProtoMajor != 2 {
		return false
	}
	rest, ok := strings.CutPrefix(r.Header.Get("Content-Type"), "application/grpc")
	return ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// forward sends the request over the epoch's transport and copies the response. An error before
// x.status is set means that the client was sent nothing.
func (x *exchange) forward(u *upstream) error {
	ctx, cancel := context.WithCancel(x.r.Context())
	defer cancel()
	x.quiet = traffic.NewIdleTimer(x.g.cfg.StreamIdle, x.g.clock, cancel)
	defer x.quiet.Stop()
	defer func() { x.body.Finish() }()
	grpc := speaksGRPC(x.r)
	t := &roundTrip{x: x}
	res, err := t.run(ctx, u, grpc)
	if err != nil {
		return t.cause(err)
	}
	defer func() { _ = res.Body.Close() }() // read to its end, or aborted
	u.MarkResponded(x.Port)
	if res.StatusCode == http.StatusSwitchingProtocols && t.conn != nil {
		stop := context.AfterFunc(ctx, func() { _ = t.conn.Close() }) // the transport no longer uses it
		defer stop()
		return x.tunnel(t.conn, res)
	}
	if res.StatusCode < 200 || res.StatusCode > 999 {
		return errMalformed
	}
	announced := len(res.Trailer)
	x.answer(res)
	if res.ContentLength != 0 && !bodiless(x.r.Method, res.StatusCode) {
		x.flush() // the body may come later
	}
	if err := x.copyBody(res.Body, res.ContentLength); err != nil {
		return t.cause(fmt.Errorf("copy response: %w", err))
	}
	x.trailers(res, announced)
	return nil
}

func bodiless(method string, status int) bool {
	return method == http.MethodHead || status == http.StatusNoContent || status == http.StatusNotModified
}

// outgoing returns the request as the sandbox gets it.
func (x *exchange) outgoing(ctx context.Context, u *upstream) *http.Request {
	out := (&http.Request{
		Method: x.r.Method,
		URL: &url.URL{
			Scheme: "http", Host: u.At(x.Port), Path: x.url.Path, RawPath: x.url.RawPath,
			RawQuery: x.url.RawQuery, ForceQuery: x.url.ForceQuery,
		},
		ProtoMajor: 1, ProtoMinor: 1,
		Host: x.Host, Header: http.Header{}, ContentLength: x.r.ContentLength,
	}).WithContext(ctx)
	x.passed(func(name string, values []string) { out.Header[name] = values })
	x.forwarded(out.Header.Set)
	if upgrade := headers.UpgradeOf(x.r, x.Port); upgrade != "" {
		out.Header.Set("Connection", "Upgrade")
		out.Header.Set("Upgrade", upgrade)
	}
	if httpguts.HeaderValuesContainsToken(x.r.Header["Te"], "trailers") {
		out.Header.Set("Te", "trailers")
	}
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header.Set("User-Agent", "") // else the transport adds one
	}
	x.attachBody(out)
	return out
}

// attachBody gives the outgoing request the client's body.
func (x *exchange) attachBody(out *http.Request) {
	if x.bodySent {
		out.ContentLength = 0
	}
	if out.ContentLength == 0 {
		return
	}
	if x.r.ProtoMajor == 1 {
		_ = x.rc.EnableFullDuplex() // HTTP/1.1 supports it
	}
	if x.r.ContentLength < 0 {
		out.TransferEncoding = []string{"chunked"} // else the transport waits for the first byte
	}
	out.Trailer = http.Header{}
	for name := range x.r.Trailer {
		if headers.MayTrail(name) {
			out.Trailer[name] = nil
		}
	}
	x.body = requestbody.New(x.r, x.rc, out.Trailer, func(n int) {
		x.received.Add(int64(n))
		x.quiet.Touch()
	})
	out.GetBody = x.body.Next
	out.Body, _ = x.body.Next() // it was not read yet
}

// roundTrip is one request to a sandbox up to the head of its final response.
type roundTrip struct {
	x    *exchange
	conn *endpoint.Conn // in use; nil: none, or HTTP/2

	mu      sync.Mutex
	over    bool  // +checklocks:mu
	first   bool  // +checklocks:mu
	invited bool  // +checklocks:mu
	interim int   // +checklocks:mu
	bad     error // +checklocks:mu
}

func (t *roundTrip) run(ctx context.Context, u *upstream, grpc bool) (*http.Response, error) {
	defer t.end()
	out := t.x.outgoing(ctx, u)
	if grpc {
		return u.Transport(t.x.Port, true).RoundTrip(out)
	}
	out = out.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn:              t.gotConn,
		GotFirstResponseByte: t.gotFirstByte,
		Got100Continue:       t.invite,
		Got1xxResponse:       t.passInterim,
	}))
	if b := t.x.begun; b != nil {
		t.x.begun = nil
		if b.Conn != nil {
			res, err := b.sentTransport().RoundTrip(out)
			if err == nil {
				return res, nil
			}
			b.closeConn() // the transport does not have it if the client was gone before
			if !t.mayRepeat(u) {
				return nil, err
			}
		}
	}
	return u.Transport(t.x.Port, false).RoundTrip(out)
}

// mayRepeat reports whether a request without a response may be sent over another connection, by the
// rules of http.Transport.
func (t *roundTrip) mayRepeat(u *upstream) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.x.r
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return r.ContentLength == 0 && !t.first && r.Context().Err() == nil && !u.Epoch.Ended()
	default:
		return false
	}
}

// end keeps hooks that run late from the response writer.
func (t *roundTrip) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.over = true
	t.x.body.Responded()
}

func (t *roundTrip) gotConn(info httptrace.GotConnInfo) {
	c, ok := info.Conn.(*endpoint.Conn)
	if !ok {
		return
	}
	t.conn = c
	c.Begin(info.Reused, t.x.body.Current().Abort)
}

func (t *roundTrip) gotFirstByte() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.first = true
}

// invite sends "100 Continue" if the client waits for it. The server would send it when the body is
// read, which may be while an interim response is written.
func (t *roundTrip) invite() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.inviteLocked()
}

// +checklocks:t.mu
func (t *roundTrip) inviteLocked() {
	x := t.x
	if !t.over && x.body != nil && !t.invited && x.r.ProtoAtLeast(1, 1) && x.r.Header.Get("Expect") != "" {
		t.invited = true
		x.w.WriteHeader(http.StatusContinue)
	}
}

// passInterim passes a 1xx response to the client.
func (t *roundTrip) passInterim(code int, header textproto.MIMEHeader) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.interim++; t.interim > maxInterim || t.over {
		t.bad = fmt.Errorf("%w: too many interim responses", errMalformed)
		return t.bad
	}
	t.inviteLocked()
	if code == http.StatusContinue {
		return nil
	}
	h := t.x.w.Header()
	headers.CopyResponse(h, http.Header(header))
	confine.Response(&t.x.Target, t.x.r.Header, h)
	t.x.w.WriteHeader(code)
	clear(h)
	return nil
}

// cause distinguishes a failure of the client, a lost connection and a malformed response.
func (t *roundTrip) cause(err error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.x.body.HasFailed() {
		return errors.Join(errClient, err)
	}
	switch {
	case errors.Is(err, framing.ErrAmbiguous):
		return fmt.Errorf("%w: %w", errMalformed, err)
	case !t.first || errors.Is(err, errMalformed):
		return err
	}
	if _, network := errors.AsType[net.Error](err); network || errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return fmt.Errorf("%w: %w", errMalformed, err)
}
