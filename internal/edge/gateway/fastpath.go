package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// pageSize bounds what a lane carries: a request, and an answer, each of which is held whole.
	pageSize = 16 << 10
	// headTime bounds how long the rest of a head may take.
	headTime = 30 * time.Second
	// bodyTime is how long a lane waits for the rest of a small body, before it lets the server of
	// net/http wait, which passes on what has come.
	bodyTime = 10 * time.Millisecond
	// answerTime is how long a lane waits for the whole answer. It does not see meanwhile that its
	// client goes away.
	answerTime = 50 * time.Millisecond
	// maxStay bounds how many requests a connection stays with the server of net/http for.
	maxStay = 64
)

// pages are held by a lane only while there is something in them.
var pages = sync.Pool{New: func() any { return new([pageSize]byte) }}

// fastConn is a client's connection of HTTP/1.1 that the gateway reads itself, for as long as there is
// nothing but plain requests to sandboxes that run, with plain and quick answers, which are most.
// All else it hands to the server of net/http, together with what has been read, and with the
// connection to the sandbox if the request has gone there: no answer but a sandbox's is made here.
type fastConn struct {
	g      *Gateway
	nc     net.Conn
	in     *source
	remote string               // the client's address
	ip     string               // the same without port
	secure *tls.ConnectionState // nil: no TLS
	page   *[pageSize]byte      // of what is read; nil while nothing is
	r, w   int                  // what has been read and not used is page[r:w]
	bound  bound
	// fallbackConn counts how often the lane had to give the connection away.
	handed int

	request requestHead
	answer  responseHead

	idle     atomic.Bool // it waits for a request
	lastUsed time.Duration
	expires  time.Duration // when the deadline for requests is, by Gateway.clock; 0: none is set
}

// bound is the target that a host and headers mean.
type bound struct {
	host, sandboxID, sandboxPort string
	target                       target
	ok                           bool
}

// bind finds the target of a request, if its path has no part in it.
func (l *fastConn) bind(h *requestHead) bool {
	b := &l.bound
	if b.ok && string(h.host) == b.host && string(h.sandboxID) == b.sandboxID && string(h.sandboxPort) == b.sandboxPort {
		return true
	}
	*b = bound{host: string(h.host), sandboxID: string(h.sandboxID), sandboxPort: string(h.sandboxPort)}
	r := &http.Request{Host: b.host, Header: http.Header{}, URL: &url.URL{Path: "/"}}
	if b.sandboxID != "" {
		r.Header.Set(envd.HeaderSandboxID, b.sandboxID)
	}
	if b.sandboxPort != "" {
		r.Header.Set(envd.HeaderSandboxPort, b.sandboxPort)
	}
	t, kind, err := l.g.target(r)
	b.ok = err == nil && kind == forSandbox && t.name == "" && t.prefix == ""
	b.target = t
	if t.host == "" {
		b.target.host = b.host
	}
	return b.ok
}

// fastConns are all of a gateway's.
type fastConns struct {
	closed atomic.Bool
	given  atomic.Int64 // connections given away

	mu sync.Mutex
	// all has their connections to the clients; nil: the lane has none yet.
	all map[*fastConn]net.Conn // +checklocks:mu
	// none is closed when the last has ended and no more may begin.
	none chan struct{} // +checklocks:mu
}

// add reports false when no more may begin.
func (s *fastConns) add(l *fastConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.none != nil {
		return false
	}
	if s.all == nil {
		s.all = map[*fastConn]net.Conn{}
	}
	s.all[l] = nil
	return true
}

// connected tells of a lane's connection, which ends with drain from here on.
func (s *fastConns) connected(l *fastConn, nc net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[l] = nc
}

func (s *fastConns) remove(l *fastConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, l)
	if s.none != nil && len(s.all) == 0 {
		close(s.none)
	}
}

// drain ends the lanes that wait for a request, and has the others end after theirs. What it
// returns is closed when none is left. cut ends them all.
func (s *fastConns) drain(cut bool) <-chan struct{} {
	s.closed.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.none == nil {
		s.none = make(chan struct{})
		if len(s.all) == 0 {
			close(s.none)
		}
	}
	for l, nc := range s.all {
		if nc != nil && (cut || l.idle.Load()) {
			_ = nc.Close() // its reader learns of it
		}
	}
	return s.none
}

// startFastPath makes a lane of the connection that a request came on, if the request is one for a
// lane. The request is answered there then.
func (g *Gateway) startFastPath(w http.ResponseWriter, r *http.Request, t *target) bool {
	l, text := g.laneFor(r, t)
	if l == nil {
		return false
	}
	conn, ahead, err := hijack(http.NewResponseController(w), r)
	if err != nil {
		pages.Put(l.page)
		g.fastConns.remove(l)
		return false
	}
	l.nc, l.in = conn, newSource(conn, l.space, l.unspace)
	g.fastConns.connected(l, conn)
	if len(text)+len(ahead) > pageSize {
		l.fallBack(slices.Concat(text, ahead), nil)
		return true
	}
	l.w = len(text) + copy(l.page[len(text):], ahead)
	go l.run(context.WithoutCancel(r.Context())) // Drain waits for it
	return true
}

// laneFor returns a lane for a request, which is in its page then and in text, or nil. What panics
// here does so again where the request is served otherwise.
func (g *Gateway) laneFor(r *http.Request, t *target) (l *fastConn, text []byte) {
	defer func() {
		if recover() != nil {
			l = nil
		}
	}()
	before := connOf(r)
	if before == nil || !g.mayTakeOver(r, t) || before.mustStay() {
		return nil, nil
	}
	ip, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return nil, nil
	}
	l = &fastConn{g: g, remote: r.RemoteAddr, ip: ip, secure: r.TLS, page: pages.Get().(*[pageSize]byte), handed: before.times}
	text = appendRequest(l.page[:0], r)
	plain := len(text) <= pageSize/2 && l.request.parse(text) == complete && l.bind(&l.request)
	if to := &l.bound.target; !plain || to.id != t.id || to.port != t.port || !g.fastConns.add(l) {
		pages.Put(l.page)
		return nil, nil
	}
	return l, text
}

// mayTakeOver reports whether a request looks like one for a lane, and its sandbox like one that
// answers.
func (g *Gateway) mayTakeOver(r *http.Request, t *target) bool {
	if !r.ProtoAtLeast(1, 1) || r.ProtoMajor != 1 || r.Close || r.ContentLength != 0 || g.tracer != nil || t.name != "" || t.prefix != "" {
		return false
	}
	entry, ok := g.cfg.Routes.Lookup(t.id)
	return ok && entry.Reachable() && g.poolOf(entry).ready(t.port)
}

// appendRequest writes a request without a body as it came.
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

// run carries requests until the connection has ended or is given away.
func (l *fastConn) run(ctx context.Context) {
	defer func() {
		if cause := recover(); cause != nil {
			l.g.log.ErrorContext(ctx, "lane panicked", telemetry.Sandbox, l.bound.target.id, telemetry.Reason, cause, "stack", string(debug.Stack()))
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
			l.handed++
			l.fallBack(l.page[l.r:l.w], nil)
			return
		}
		switch l.carry(ctx) {
		case carried:
			l.r += l.request.size + l.request.length
		case given:
			return
		case broken:
			l.end()
			return
		}
	}
}

// end closes the connection.
func (l *fastConn) end() {
	_ = l.nc.Close()
	if l.page != nil {
		pages.Put(l.page)
	}
	l.g.fastConns.remove(l)
}

// await waits for the first bytes of a request, and reports false when there will be none.
func (l *fastConn) await() bool {
	l.r, l.w = 0, 0
	l.lastUsed = l.g.clock()
	l.idle.Store(true)
	for {
		if l.g.fastConns.closed.Load() {
			return false
		}
		// The deadline is set anew when it has passed, not with each request.
		if l.expires == 0 {
			l.expires = l.lastUsed + l.g.cfg.ClientIdle
			_ = l.nc.SetReadDeadline(l.g.born.Add(l.expires))
		}
		n, err := l.in.read()
		if n > 0 {
			l.w = n
			return true
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) || l.g.clock() >= l.lastUsed+l.g.cfg.ClientIdle {
			return false
		}
		l.expires = 0
	}
}

// space is where to read to. It is asked for when there is something to read.
func (l *fastConn) space() []byte {
	if l.page == nil {
		l.page = pages.Get().(*[pageSize]byte)
	}
	return l.page[l.w:]
}

// unspace gives back what space got, if nothing has been read.
func (l *fastConn) unspace() {
	if l.w == 0 {
		pages.Put(l.page)
		l.page = nil
	}
}

// head reads on until a request is there with its body. The verdict is partial when there is no
// more of it to come, and odd when somebody else should take it from here.
func (l *fastConn) head() verdict {
	if l.r > 0 {
		l.w = copy(l.page[:], l.page[l.r:l.w])
		l.r = 0
	}
	for {
		v := l.request.parse(l.page[:l.w])
		patience := headTime
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
		if patience == headTime && errors.Is(err, os.ErrDeadlineExceeded) {
			return incomplete
		}
		return unsupported
	}
}

// passable reports whether a request may go on to a sandbox without waiting for anything.
func (l *fastConn) passable(entry *route.Entry) bool {
	t, h := &l.bound.target, &l.request
	if !entry.Reachable() || entry.Access.MaskRequestHost != "" {
		return false
	}
	if t.port == envd.Port {
		return !envd.IsInternal(string(h.path()))
	}
	return entry.Access.PublicTraffic || (h.traffic != nil && sandbox.EqualToken(string(h.traffic), l.g.cfg.Tokens.Traffic(t.id)))
}

// appendHead writes the request's head as the sandbox gets it.
func (l *fastConn) appendHead(b []byte) []byte {
	h := &l.request
	b = append(b, h.method...)
	b = append(b, ' ')
	b = append(b, h.uri...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, l.bound.target.host...)
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

// appendResponse writes the answer as the client gets it. closing tells it that nothing follows.
func (l *fastConn) appendResponse(b, body []byte, closing bool) []byte {
	h := &l.answer
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
