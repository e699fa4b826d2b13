package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"
)

// h2Upstream carries gRPC to one port: its streams need HTTP/2 all the way.
type h2Upstream struct{ transport *http.Transport }

// speaksH2 reports whether the sandbox should be spoken to in HTTP/2 without TLS.
func speaksH2(r *http.Request) bool {
	if r.ProtoMajor != 2 {
		return false
	}
	rest, ok := strings.CutPrefix(r.Header.Get("Content-Type"), "application/grpc")
	return ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

func (p *pool) h2Of(port uint16) (*h2Upstream, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errOver
	}
	if u, ok := p.h2[port]; ok {
		return u, nil
	}
	protocols := &http.Protocols{}
	protocols.SetUnencryptedHTTP2(true)
	u := &h2Upstream{transport: &http.Transport{
		Protocols:              protocols,
		DisableCompression:     true,
		IdleConnTimeout:        p.idleTimeout(port),
		MaxResponseHeaderBytes: maxResponseHead,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: time.Minute},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := p.open(ctx, port)
			if err != nil {
				return nil, err
			}
			c.disarm()
			return pooled{c.nc, c}, nil
		},
	}}
	if p.h2 == nil {
		p.h2 = map[uint16]*h2Upstream{}
	}
	p.h2[port] = u
	return u, nil
}

// pooled is a connection that its pool closes when the life ends.
type pooled struct {
	net.Conn
	c *conn
}

// Close implements net.Conn.
func (p pooled) Close() error {
	p.c.close()
	return nil
}

// countedBody counts what is read of a request's body.
type countedBody struct {
	io.ReadCloser
	x *exchange
}

// Read implements io.Reader.
func (b countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.x.received.Add(int64(n))
	b.x.quiet.touch()
	return n, err
}

// overHTTP2 carries the exchange over HTTP/2 without TLS.
func (x *exchange) overHTTP2(p *pool) error {
	u, err := p.h2Of(x.port)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(x.r.Context())
	defer cancel()
	x.quiet = x.g.watch(cancel)
	defer x.quiet.stop()
	out := (&http.Request{
		Method: x.r.Method,
		URL:    &url.URL{Scheme: "http", Host: p.at(x.port), Path: x.url.Path, RawPath: x.url.RawPath, RawQuery: x.url.RawQuery},
		Host:   x.host,
		Header: http.Header{},
		Body:   x.r.Body, ContentLength: x.r.ContentLength, Trailer: x.r.Trailer,
	}).WithContext(ctx)
	if x.r.ContentLength != 0 {
		out.Body = countedBody{x.r.Body, x}
	}
	x.passed(func(name string, values []string) { out.Header[name] = values })
	x.forwarded(out.Header.Set)
	if httpguts.HeaderValuesContainsToken(x.r.Header["Te"], "trailers") {
		out.Header.Set("Te", "trailers")
	}
	if _, ok := out.Header["User-Agent"]; !ok {
		out.Header.Set("User-Agent", "") // else one is added
	}
	res, err := u.transport.RoundTrip(out)
	if err != nil {
		return fmt.Errorf("carry request: %w", err)
	}
	defer func() { _ = res.Body.Close() }() // read to its end, or given up
	announced := len(res.Trailer)
	x.answer(res)
	x.flush()
	if err := x.copyBody(res.Body, -1, true); err != nil {
		return fmt.Errorf("carry response: %w", err)
	}
	x.trailers(res, announced)
	return nil
}
