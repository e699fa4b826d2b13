// Package requestbody has the body of a client's request as a transport reads it on the way to a sandbox. A transport reads
// from several goroutines, tries connections one after the other, and may read after the response has ended; the client's
// connection allows none of this. It interprets no body.
package requestbody

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

// errSent keeps a transport from sending a body twice.
var errSent = errors.New("request body was read already")

// Body is a client's body. The transport may read it after the response has ended. A nil Body is of a request without one.
type Body struct {
	r       *http.Request
	rc      *http.ResponseController
	trailer http.Header
	read    func(n int)

	whole     atomic.Bool // all of it was read
	failed    atomic.Bool // the client did not send all of it
	aborted   atomic.Bool // by the gateway
	responded atomic.Bool
	attempt   atomic.Pointer[Attempt]

	mu    sync.Mutex
	begun bool // +checklocks:mu
	over  bool // +checklocks:mu

	// lingers is true if the client's connection will be closed before the rest of the body; used by
	// the handler only.
	lingers bool
}

// New returns the body of a request that a handler serves with rc. trailer is filled at the body's end; read is called with the number of bytes
// of each read.
func New(r *http.Request, rc *http.ResponseController, trailer http.Header, read func(n int)) *Body {
	return &Body{r: r, rc: rc, trailer: trailer, read: read}
}

// Attempt is the body for one connection to the sandbox.
type Attempt struct {
	*Body
	closed bool // the connection is closed; guarded by Body.mu
}

// Next returns the body for the next connection. It is the GetBody of a request: an unread body may be
// sent over another connection.
func (b *Body) Next() (io.ReadCloser, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.begun {
		return nil, errSent
	}
	a := &Attempt{Body: b}
	b.attempt.Store(a)
	return a, nil
}

// Read implements io.Reader.
func (a *Attempt) Read(p []byte) (int, error) {
	if !a.begin() {
		return 0, net.ErrClosed
	}
	b := a.Body
	n, err := b.r.Body.Read(p)
	b.read(n)
	switch {
	case err == nil:
	case errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF):
		for name, values := range b.r.Trailer {
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
func (a *Attempt) begin() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.begun = a.begun || !a.closed
	return !a.closed
}

// Close implements io.Closer. The server closes the client's body itself.
func (*Attempt) Close() error { return nil }

// Abort ends a read of the client's body when the connection to the sandbox closed before the
// response: the transport waits for that read. It may come from any goroutine, and at any time; once the handler has
// returned, the response controller must not be used.
func (a *Attempt) Abort() {
	if a == nil || a.whole.Load() || a.responded.Load() {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	if a.begun && !a.over {
		a.aborted.Store(true)
		_ = a.rc.SetReadDeadline(time.Unix(1, 0))
	}
}

// Current returns the body of the connection in use. Nil: there is no body.
func (b *Body) Current() *Attempt {
	if b == nil {
		return nil
	}
	return b.attempt.Load()
}

// Finish is called by the handler when the response has ended. HTTP/2 resets the rest of a body itself.
func (b *Body) Finish() {
	if b == nil {
		return
	}
	b.mu.Lock()
	b.over = true
	b.mu.Unlock()
	if b.r.ProtoMajor != 1 || b.whole.Load() {
		return
	}
	// The server reads the rest of the body after the handler has returned, and clears earlier
	// deadlines. It then closes the connection: see EndsEarly.
	b.lingers = true
	rc := b.rc
	time.AfterFunc(linger, func() { _ = rc.SetReadDeadline(time.Unix(1, 0)) })
}

// Responded records that the head of the final response was read, or will not be.
func (b *Body) Responded() {
	if b != nil {
		b.responded.Store(true)
	}
}

// IsWhole reports whether all of the body was read.
func (b *Body) IsWhole() bool { return b == nil || b.whole.Load() }

// HasFailed reports whether the client did not send all of the body.
func (b *Body) HasFailed() bool { return b != nil && b.failed.Load() }

// EndsEarly reports whether the client's connection must be closed because a response precedes the request's end. The server would
// continue reading in the middle of a body, which must never be parsed as a request.
func (b *Body) EndsEarly() bool {
	return b != nil && b.r.ProtoMajor == 1 && (b.lingers || !b.whole.Load())
}
