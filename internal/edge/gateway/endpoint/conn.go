package endpoint

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/barchan-dev/barchan/internal/edge/gateway/framing"
)

// Conn is a connection to a sandbox. It adds to a socket what http.Transport lacks: its epoch
// closes it; a dead idle connection fails before a request is written; a failed write does not hide
// the response; and a response with two lengths is rejected.
type Conn struct {
	net.Conn
	e   *Endpoint
	raw syscall.RawConn // nil: not a socket

	// fresh is set when a request gets the connection, reused when it had one before.
	fresh    atomic.Bool
	reused   atomic.Bool
	checking atomic.Bool

	// sent is true if the fast path has sent the request, and ahead is the part of the response that
	// it read. Reads then wait until http.Transport has written the request too: it drops a response
	// that comes before.
	sent    atomic.Bool
	ahead   []byte
	written chan struct{}
	once    sync.Once // closes written

	// head and heading are used by the reader only.
	head    framing.Parser
	heading bool

	mu      sync.Mutex
	closed  bool   // +checklocks:mu
	onClose func() // +checklocks:mu
}

func newUpstreamConn(nc net.Conn, e *Endpoint) *Conn {
	c := &Conn{Conn: nc, e: e, written: make(chan struct{})}
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			c.raw = raw
		}
	}
	return c
}

// Begin prepares the connection for a request. onClose runs once when the connection is closed.
func (c *Conn) Begin(reused bool, onClose func()) {
	c.reused.Store(reused)
	c.fresh.Store(true)
	c.checking.Store(true)
	c.mu.Lock()
	closed := c.closed
	c.onClose = onClose
	c.mu.Unlock()
	if closed {
		onClose()
	}
}

// Resume has the connection read the response of a request that was sent on it; ahead is what was read of it.
func (c *Conn) Resume(ahead []byte) {
	c.ahead = ahead
	c.sent.Store(true)
}

// Read implements net.Conn and checks the heads of a response.
func (c *Conn) Read(b []byte) (int, error) {
	n, err := c.read(b)
	if n == 0 {
		return n, err
	}
	if c.checking.Swap(false) {
		c.head, c.heading = framing.NewResponses(), true
	}
	for rest := b[:n]; c.heading && len(rest) > 0; {
		k, ok := c.head.Take(rest)
		if !ok {
			return 0, framing.ErrAmbiguous
		}
		rest = rest[k:]
		c.heading = !c.head.Fresh() || c.head.IsInterim()
	}
	return n, err
}

func (c *Conn) read(b []byte) (int, error) {
	if c.sent.Load() {
		<-c.written
	}
	if len(c.ahead) > 0 {
		n := copy(b, c.ahead)
		c.ahead = c.ahead[n:]
		return n, nil
	}
	return c.Conn.Read(b)
}

// Write implements net.Conn. It returns no error of the peer: the response, or the error of the next
// read, is more precise.
func (c *Conn) Write(b []byte) (int, error) {
	if c.sent.Load() {
		c.release()
		return len(b), nil
	}
	if c.fresh.Swap(false) && c.reused.Load() && !c.Alive() {
		return 0, net.ErrClosed
	}
	n, err := c.Conn.Write(b)
	if err == nil || c.isClosed() {
		return n, err
	}
	return len(b), nil
}

// release unblocks reads.
func (c *Conn) release() { c.once.Do(func() { close(c.written) }) }

// ReadFrom implements io.ReaderFrom with large blocks for large bodies.
func (c *Conn) ReadFrom(r io.Reader) (total int64, err error) {
	b := NewBuffer(-1)
	defer b.Free()
	for {
		n, err := r.Read(b.Buf)
		if n > 0 {
			if _, err := c.Write(b.Buf[:n]); err != nil {
				return total, err
			}
			total += int64(n)
			b.Adapt(n)
		}
		if errors.Is(err, io.EOF) {
			return total, nil
		}
		if err != nil {
			return total, err
		}
	}
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	err := c.shut()
	c.e.forget(c)
	return err
}

// shut closes the connection without a change to its upstream.
func (c *Conn) shut() error {
	c.mu.Lock()
	c.closed = true
	onClose := c.onClose
	c.onClose = nil
	c.mu.Unlock()
	err := c.Conn.Close()
	c.release()
	if onClose != nil {
		onClose()
	}
	return err
}

func (c *Conn) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// CloseWrite closes the sending side of the connection.
func (c *Conn) CloseWrite() error { return framing.CloseWrite(c.Conn) }

// EpochEnded reports whether the epoch of the connection has ended.
func (c *Conn) EpochEnded() bool { return c.e.Epoch.Ended() }

// Alive reports whether the peer of an idle connection has neither closed it nor sent anything.
func (c *Conn) Alive() bool {
	if c.raw == nil {
		return true
	}
	silent := false
	err := c.raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		silent = errors.Is(err, syscall.EAGAIN)
	})
	return err == nil && silent
}
