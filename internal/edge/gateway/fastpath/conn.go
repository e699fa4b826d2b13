package fastpath

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// pageSize bounds a request and a response, each of which is buffered whole.
	pageSize = 16 << 10
	// bodyTime bounds the wait for the rest of a small body; the main path streams it.
	bodyTime = 10 * time.Millisecond
)

// pages are buffers; a connection has one only while it holds data.
var pages = sync.Pool{New: func() any { return new([pageSize]byte) }}

// conn is a client's connection on the fast path. One goroutine uses it.
type conn struct {
	p      *Path
	nc     net.Conn
	in     *source
	remote string               // the client's address
	ip     string               // the same without port
	secure *tls.ConnectionState // nil: no TLS
	page   *[pageSize]byte      // data read; nil while there is none
	r, w   int                  // page[r:w] was read and not used
	bound  bound
	// fallbacks counts how often the client's connection fell back.
	fallbacks int

	request  requestHead
	response responseHead
	current  Exchange

	idle     atomic.Bool // it waits for a request
	lastUsed time.Duration
	expires  time.Duration // deadline for the next request, by Path.clock; 0: none is set
}

// bound is the target of a host and headers.
type bound struct {
	host, sandboxID, sandboxPort string
	target                       Target
	ok                           bool
}

// bind finds the target of a request, and caches it for the next one.
func (l *conn) bind(h *requestHead) bool {
	b := &l.bound
	if b.ok && string(h.host) == b.host && string(h.sandboxID) == b.sandboxID && string(h.sandboxPort) == b.sandboxPort {
		return true
	}
	*b = bound{host: string(h.host), sandboxID: string(h.sandboxID), sandboxPort: string(h.sandboxPort)}
	b.target, b.ok = l.p.cfg.Gateway.Bind(b.host, b.sandboxID, b.sandboxPort)
	return b.ok
}

// appendRequest appends a request without a body, unchanged.
func appendRequest(b []byte, r *http.Request) []byte {
	b = append(b, r.Method...)
	b = append(b, ' ')
	b = append(b, r.RequestURI...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, r.Host...)
	b = append(b, "\r\n"...)
	for name, values := range r.Header {
		for _, v := range values {
			b = append(b, name...)
			b = append(b, ": "...)
			b = append(b, v...)
			b = append(b, "\r\n"...)
		}
	}
	return append(b, "\r\n"...)
}

// run proxies requests until the connection ends or falls back.
func (l *conn) run(ctx context.Context) {
	defer func() {
		if cause := recover(); cause != nil {
			l.p.cfg.Log.ErrorContext(ctx, "fast path panicked", telemetry.Sandbox, l.bound.target.ID, telemetry.Reason, cause, "stack", string(debug.Stack()))
			l.end()
		}
	}()
	for {
		if l.r == l.w && !l.await() {
			l.end()
			return
		}
		switch l.head() {
		case complete:
		case incomplete:
			l.end()
			return
		case unsupported:
			l.fallbacks++
			l.fallBack(l.page[l.r:l.w], nil)
			return
		}
		switch l.carry(ctx) {
		case carried:
			l.r += l.request.size + l.request.length
		case fellBack:
			return
		case broken:
			l.end()
			return
		}
	}
}

// end closes the connection.
func (l *conn) end() {
	_ = l.nc.Close()
	if l.page != nil {
		pages.Put(l.page)
	}
	l.p.remove(l)
}

// await waits for the first bytes of a request, and reports false if the connection ends.
func (l *conn) await() bool {
	l.r, l.w = 0, 0
	l.lastUsed = l.p.clock()
	l.idle.Store(true)
	for {
		if l.p.closed.Load() {
			return false
		}
		// The deadline is set again when it has passed, not with each request.
		if l.expires == 0 {
			l.expires = l.lastUsed + l.p.cfg.ClientIdle
			_ = l.nc.SetReadDeadline(l.p.born.Add(l.expires))
		}
		n, err := l.in.read()
		if n > 0 {
			l.w = n
			return true
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || l.p.clock() >= l.lastUsed+l.p.cfg.ClientIdle {
			return false
		}
		l.expires = 0
	}
}

// space returns the buffer to read into. It is called when there is data to read.
func (l *conn) space() []byte {
	if l.page == nil {
		l.page = pages.Get().(*[pageSize]byte)
	}
	return l.page[l.w:]
}

// unspace returns the buffer of space to the pool if nothing has been read.
func (l *conn) unspace() {
	if l.w == 0 {
		pages.Put(l.page)
		l.page = nil
	}
}

// head reads until a request is complete with its body. It returns incomplete if no more of it comes,
// and unsupported if the main path must take it.
func (l *conn) head() verdict {
	if l.r > 0 {
		l.w = copy(l.page[:], l.page[l.r:l.w])
		l.r = 0
	}
	for {
		v := l.request.parse(l.page[:l.w])
		patience := l.p.cfg.HeadTime
		if v == complete {
			missing := l.request.size + l.request.length - l.w
			if missing <= 0 {
				return complete
			}
			v, patience = incomplete, bodyTime
			if l.w+missing > pageSize {
				return unsupported
			}
		}
		if v == unsupported || l.w == pageSize {
			return unsupported
		}
		l.expires = 0
		_ = l.nc.SetReadDeadline(time.Now().Add(patience))
		n, err := l.in.read()
		l.w += n
		if n > 0 {
			continue
		}
		if patience == l.p.cfg.HeadTime && errors.Is(err, os.ErrDeadlineExceeded) {
			return incomplete
		}
		return unsupported
	}
}

// appendHead appends the request's head as it is sent to the sandbox.
func (l *conn) appendHead(b []byte) []byte {
	h := &l.request
	b = append(b, h.method...)
	b = append(b, ' ')
	b = append(b, h.uri...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, l.bound.target.Host...)
	b = append(b, "\r\n"...)
	for _, line := range h.lines {
		b = append(b, line...)
	}
	b = append(b, "X-Forwarded-For: "...)
	b = append(b, l.ip...)
	b = append(b, "\r\nX-Forwarded-Host: "...)
	b = append(b, h.host...)
	if l.secure != nil {
		b = append(b, "\r\nX-Forwarded-Proto: https\r\n"...)
	} else {
		b = append(b, "\r\nX-Forwarded-Proto: http\r\n"...)
	}
	if h.length > 0 || !mayLackLength(h.method) {
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, int64(h.length), 10)
		b = append(b, "\r\n"...)
	}
	return append(b, "\r\n"...)
}

func mayLackLength(method []byte) bool {
	switch string(method) {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return true
	default:
		return false
	}
}

var dateHeader = []byte("Date: ")

// appendResponse appends the response as it is sent to the client. closing announces the connection's
// end.
func (l *conn) appendResponse(b, body []byte, closing bool) []byte {
	h := &l.response
	b = append(b, h.line...)
	b = append(b, "\r\n"...)
	for _, line := range h.lines {
		b = append(b, line...)
	}
	if !h.dated {
		b = append(b, dateHeader...)
		b = time.Now().UTC().AppendFormat(b, http.TimeFormat)
		b = append(b, "\r\n"...)
	}
	if h.chunked {
		b = append(b, "Transfer-Encoding: chunked\r\n"...)
	}
	if closing {
		b = append(b, "Connection: close\r\n"...)
	}
	b = append(b, "\r\n"...)
	return append(b, body...)
}

// fallBack passes the connection to the main path. text is what was read from the beginning of a
// request; u is that request, if it was admitted.
func (l *conn) fallBack(text []byte, u *Inflight) {
	l.p.fallbacks.Add(1)
	_ = l.nc.SetReadDeadline(time.Time{})
	if u != nil && u.Conn != nil {
		_ = u.Conn.SetReadDeadline(time.Time{})
	}
	c := &Connection{Conn: l.nc, Text: append([]byte(nil), text...), TLS: l.secure, Remote: l.remote, Fallbacks: l.fallbacks, Inflight: u}
	pages.Put(l.page)
	l.page = nil
	l.p.cfg.Gateway.Fallback(c)
	l.p.remove(l)
}
