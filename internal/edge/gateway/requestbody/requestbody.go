package gateway

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
)

// linger is how long a client may continue to send after it received the whole response.
const linger = time.Second

var (
	// errClient marks an exchange whose request body broke off.
	errClient = errors.New("client's body broke off")
	// errBodySent keeps a transport from sending a body twice.
	errBodySent = errors.New("request body was read already")
)

// requestBody is the client's body as the transport reads it. The transport may read it after the
// response has ended.
type requestBody struct {
	x       *exchange
	trailer http.Header // filled at the end
	whole   atomic.Bool // all of it was read
	failed  atomic.Bool // the client did not send all of it
	aborted atomic.Bool // by the gateway
	attempt atomic.Pointer[bodyAttempt]

	mu    sync.Mutex
	begun bool // +checklocks:mu
	over  bool // +checklocks:mu

	// lingers is true if the client's connection will be closed before the rest of the body; used by
	// the handler only.
	lingers bool
}

// bodyAttempt is the body for one connection to the sandbox.
type bodyAttempt struct {
	*requestBody
	closed bool // the connection is closed; guarded by requestBody.mu
}

// next returns the body for the next connection. It is the GetBody of a request: an unread body may be
// sent over another connection.
func (b *requestBody) next() (io.ReadCloser, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.begun {
		return nil, errBodySent
	}
	a := &bodyAttempt{requestBody: b}
	b.attempt.Store(a)
	return a, nil
}

// Read implements io.Reader.
func (a *bodyAttempt) Read(p []byte) (int, error) {
	if !a.begin() {
		return 0, net.ErrClosed
	}
	b := a.requestBody
	n, err := b.x.r.Body.Read(p)
	b.x.received.Add(int64(n))
	b.x.quiet.Touch()
	switch {
	case err == nil:
	case errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
		for name, values := range b.x.r.Trailer {
			if headers.MayTrail(name) {
				b.trailer[name] = values
			}
		}
		b.whole.Store(true)
	case !b.aborted.Load():
		b.failed.Store(true)
	}
	return n, err
}

// begin reports false after the connection was closed: another one may get the body.
func (a *bodyAttempt) begin() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.begun = a.begun || !a.closed
	return !a.closed
}

// Close implements io.Closer. The server closes the client's body itself.
func (*bodyAttempt) Close() error { return nil }

// abort ends a read of the client's body when the connection to the sandbox closed before the
// response: the transport waits for that read. It may come from any goroutine, and at any time; once the handler has
// returned, the response controller must not be used.
func (a *bodyAttempt) abort() {
	if a == nil || a.whole.Load() || a.x.responded.Load() {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	if a.begun && !a.over {
		a.aborted.Store(true)
		_ = a.x.rc.SetReadDeadline(time.Unix(1, 0))
	}
}

// current returns the body of the connection in use. Nil: there is no body.
func (b *requestBody) current() *bodyAttempt {
	if b == nil {
		return nil
	}
	return b.attempt.Load()
}

// finish is called by the handler when the response has ended. HTTP/2 resets the rest of a body itself.
func (b *requestBody) finish() {
	if b == nil {
		return
	}
	b.mu.Lock()
	b.over = true
	b.mu.Unlock()
	if b.x.r.ProtoMajor != 1 || b.whole.Load() {
		return
	}
	// The server reads the rest of the body after the handler has returned, and clears earlier
	// deadlines. It then closes the connection: see closeIfEarly.
	b.lingers = true
	rc := b.x.rc
	time.AfterFunc(linger, func() { _ = rc.SetReadDeadline(time.Unix(1, 0)) })
}
