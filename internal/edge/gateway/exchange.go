package gateway

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway/accesslog"
	"github.com/barchan-dev/barchan/internal/edge/gateway/confine"
	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
	"github.com/barchan-dev/barchan/internal/edge/gateway/endpoint"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/gateway/requestbody"
	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// exchange is one request to a sandbox and its response.
type exchange struct {
	target.Target
	g       *Gateway
	w       http.ResponseWriter
	r       *http.Request
	rc      *http.ResponseController
	url     *url.URL // as the sandbox should see it
	uri     string   // the same, in the form of a request line
	started time.Time

	// body is the request's body. Nil: there is none, or nothing was sent.
	body *requestbody.Body

	signature credentials.Signature
	grant     string   // a cookie to set with the response, if not empty
	cookies   []string // the client's cookies that the sandbox gets; nil: all
	keyed     []string // headers with API keys, which are not forwarded
	traced    http.Header
	traceID   string
	quiet     *traffic.IdleTimer // of the connection in use
	begun     *inflight          // admitted by the fast path; nil: not admitted, or already used
	// bodySent is true if the fast path has sent the body.
	bodySent bool
	byKey    bool   // it has an API key of the sandbox's namespace, beside agent-sandbox's headers
	owner    bool   // it was authorized before, see Visit
	counted  bool   // against the sandbox's rate
	woken    bool   // it started a wake, or waited for one
	reason   string // of a local reply
	status   int
	bytes    int64        // of the response's body
	received atomic.Int64 // of the request's body
	// firstByte is how long the head of the response took; 0 without one.
	firstByte time.Duration
	dirty     bool // written data is not flushed yet
}

// run serves the request. It panics with http.ErrAbortHandler when the response broke off.
func (x *exchange) run() {
	if f := x.prepare(); f != nil {
		x.refuse(f)
		return
	}
	for try := 0; ; try++ {
		entry, u, err := x.enter(x.r.Context())
		if err != nil {
			x.refuseError(err)
			return
		}
		err = x.carry(entry, u)
		if errors.Is(err, endpoint.ErrOver) && x.status == 0 && try < maxLives {
			continue // the epoch ended before anything was sent: look up the route again
		}
		if err != nil {
			x.fail(err, entry)
		}
		return
	}
}

// maxLives bounds how many epochs a request is tried in.
const maxLives = 3

// carry sends the request over connections of the epoch that counts it.
func (x *exchange) carry(entry *route.Entry, u *upstream) error {
	defer func() { u.traffic.End(x.g.clock()) }()
	if x.Host == "" {
		x.Host = x.r.Host
	}
	if mask := entry.Access.MaskRequestHost; mask != "" && x.begun == nil && x.Port != envd.Port {
		if host := strings.ReplaceAll(mask, "${PORT}", target.PortText(x.Port)); httpguts.ValidHostHeader(host) {
			x.Host = host
		}
	}
	return x.forward(u)
}

// prepare makes the checks that need no route.
func (x *exchange) prepare() *reply.Reply {
	u := *x.r.URL
	x.url = &u
	if confine.Refuses(&x.Target, x.r.Header) {
		return reply.NoWorker
	}
	if x.Prefix != "" {
		u.Path = u.Path[len(x.Prefix):]
		u.RawPath = strings.TrimPrefix(u.RawPath, x.Prefix)
		if u.Path == "" {
			u.Path = "/"
		}
	}
	if x.Port != envd.Port {
		x.signature, x.cookies = credentials.TakeSignature(x.r, x.url)
	} else {
		x.cookies = credentials.ForwardedCookies(x.r.Header["Cookie"])
	}
	x.uri = u.RequestURI()
	if x.r.Method == http.MethodConnect || !httpguts.ValidHeaderFieldName(x.r.Method) {
		return &reply.Reply{Status: http.StatusMethodNotAllowed, Message: "The method is not supported"}
	}
	if (x.uri[0] != '/' && (x.uri != "*" || x.r.Method != http.MethodOptions)) || !plain(x.uri) {
		return &reply.Reply{Status: http.StatusBadRequest, Message: "The request path is not valid"}
	}
	if x.Port == envd.Port && envd.IsInternal(u.Path) {
		return &reply.Reply{Status: http.StatusNotFound, Message: "The path does not exist", Path: u.Path}
	}
	if x.Name != "" {
		return x.resolve()
	}
	return nil
}

// fail ends an exchange whose connection broke.
func (x *exchange) fail(err error, entry *route.Entry) {
	if x.status != 0 || x.r.Context().Err() != nil {
		x.g.log.DebugContext(x.r.Context(), "exchange broke off", telemetry.Sandbox, x.ID, telemetry.Port, x.Port, telemetry.Error, err)
		panic(http.ErrAbortHandler)
	}
	f := reply.Silent
	switch {
	case x.quiet.Fired():
		f = reply.StreamIdleReply
	case entry.Epoch.Ended() || errors.Is(err, endpoint.ErrOver):
		f = reply.NotFound
	case errors.Is(err, syscall.ECONNREFUSED):
		f = &reply.Reply{Status: http.StatusBadGateway, Message: reply.MessagePort, Port: x.Port}
	case errors.Is(err, errClient):
		f = &reply.Reply{Status: http.StatusBadRequest, Message: "The request body broke off"}
	case errors.Is(err, errMalformed):
		f = reply.Malformed
	case isDial(err):
	default:
		f = reply.Lost
	}
	x.g.log.DebugContext(x.r.Context(), "exchange failed", telemetry.Sandbox, x.ID, telemetry.Port, x.Port, telemetry.Error, err)
	x.refuse(f)
}

func isDial(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial" || errors.Is(err, context.DeadlineExceeded)
}

// plain reports whether a text is valid in a request line.
func plain(uri string) bool {
	for i := range len(uri) {
		if uri[i] <= ' ' || uri[i] == 0x7f {
			return false
		}
	}
	return true
}

// answer sends the head of the sandbox's response.
func (x *exchange) answer(res *http.Response) {
	x.firstByte = time.Since(x.started)
	took := x.firstByte.Seconds()
	x.g.metrics.firstByte.Observe(took)
	if x.Port == envd.Port && x.url.Path == processpb.ProcessStartProcedure {
		x.g.metrics.exec.Observe(took)
	}
	h := x.w.Header()
	headers.CopyResponse(h, res.Header)
	confine.Response(&x.Target, x.r.Header, h)
	if _, typed := h["Content-Type"]; !typed {
		h["Content-Type"] = nil // prevents the server's content sniffing
	}
	for name := range res.Trailer {
		if headers.MayTrail(name) {
			h.Add("Trailer", name)
		}
	}
	if x.grant != "" {
		h.Add("Set-Cookie", x.grant)
	}
	x.closeIfEarly()
	x.status = res.StatusCode
	x.w.WriteHeader(res.StatusCode)
	x.dirty = true
}

// closeIfEarly has the server close the client's connection after a response that precedes the request's end.
func (x *exchange) closeIfEarly() {
	if x.body.EndsEarly() {
		x.w.Header().Set("Connection", "close")
	}
}

// trailers sends the trailers, announced or not.
func (x *exchange) trailers(res *http.Response, announced int) {
	if len(res.Trailer) == 0 {
		return
	}
	x.dirty = true
	x.flush() // makes the response chunked, which trailers require
	prefix := ""
	if len(res.Trailer) != announced {
		prefix = http.TrailerPrefix
	}
	h := x.w.Header()
	for name, values := range res.Trailer {
		if !headers.MayTrail(name) {
			continue
		}
		for _, v := range values {
			h.Add(prefix+name, v)
		}
	}
}

// flush sends the data written so far.
func (x *exchange) flush() {
	if x.dirty {
		x.dirty = false
		_ = x.rc.Flush() // a closed client connection shows at the next write
	}
}

// copyBody copies a response's body; length is negative if unknown. It flushes when no more data is
// available at once.
func (x *exchange) copyBody(body io.Reader, length int64) error {
	if length == 0 {
		return nil
	}
	b := endpoint.NewBuffer(length)
	defer b.Free()
	for {
		n, err := body.Read(b.Buf)
		if n > 0 {
			x.quiet.Touch()
			if _, err := x.w.Write(b.Buf[:n]); err != nil {
				return err
			}
			x.bytes += int64(n)
			x.dirty = true
			if n < len(b.Buf) && x.bytes != length {
				x.flush()
			}
			b.Adapt(n)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// report counts and logs the exchange.
func (x *exchange) report(ctx context.Context) {
	x.g.metrics.answered(x.status)
	path := ""
	if x.url != nil {
		path = x.url.Path
	}
	if !x.g.access.Enabled(ctx, x.Port, x.r.Method, path) {
		return
	}
	x.g.access.Write(ctx, &accesslog.Record{
		Sandbox: x.ID, Port: x.Port, Method: x.r.Method, Host: x.r.Host, Path: path, Proto: x.r.Proto, Remote: x.r.RemoteAddr,
		Status: x.status, Bytes: x.bytes, Received: x.received.Load(), FirstByte: x.firstByte, Started: x.started,
		Woken: x.woken, Reason: x.reason, Trace: x.traceID, UserAgent: x.r.UserAgent(),
	})
}
