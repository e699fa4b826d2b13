package gateway

import (
	"bufio"
	"errors"
	"math"
	"net"
	"sync"
	"syscall"
	"time"
)

const (
	// maxResponseHead bounds what a sandbox may make us keep before its answer begins.
	maxResponseHead = 1 << 20
	readBuffer      = 8 << 10
	writeBuffer     = 4 << 10
)

var errHeadTooLarge = errors.New("response head is too large")

// Buffers are held by a connection only while it is in use.
var (
	readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, readBuffer) }}
	writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, writeBuffer) }}
)

// conn is a connection to one port of a sandbox, used by one request at a time.
type conn struct {
	nc   net.Conn
	pool *pool
	port uint16
	br   *bufio.Reader
	bw   *bufio.Writer

	idleSince time.Time
	// rateLimiter is how many bytes may still be read.
	allowance int64
	// beforeWait runs before a read that may block, so that what was got so far is passed on.
	beforeWait func()
	// ahead is what was read and br has not got.
	ahead []byte
	// head is read along while a response's head is.
	head    messages
	heading bool
	closing sync.Once

	// hasDeadline is true where a deadline for reading was set.
	hasDeadline bool
	raw         syscall.RawConn // nil: not a socket
	peek        func(fd uintptr) bool
	silent      bool // what peek found
}

func newConn(nc net.Conn, p *pool, port uint16) *conn {
	c := &conn{nc: nc, pool: p, port: port}
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			c.raw, c.peek = raw, c.peekAt
		}
	}
	return c
}

// hurry sets a deadline for reading; the zero time takes it back. A failure shows when it is read.
func (c *conn) setReadDeadline(until time.Time) {
	if !until.IsZero() || c.hasDeadline {
		_ = c.nc.SetReadDeadline(until)
	}
	c.hasDeadline = !until.IsZero()
}

// arm gives the connection what it needs in use.
func (c *conn) arm() {
	c.br = readers.Get().(*bufio.Reader)
	c.br.Reset(c)
	c.bw = writers.Get().(*bufio.Writer)
	c.bw.Reset(c.nc)
}

// disarm gives it back. Nothing may use the connection's buffers any more.
func (c *conn) disarm() {
	c.br.Reset(nil)
	readers.Put(c.br)
	c.bw.Reset(nil)
	writers.Put(c.bw)
	c.br, c.bw, c.beforeWait, c.ahead = nil, nil, nil, nil
}

// Read feeds br. With a head it feeds no more than that.
func (c *conn) Read(b []byte) (n int, err error) {
	again := len(c.ahead) > 0
	if again {
		n = copy(b, c.ahead)
	} else {
		if c.beforeWait != nil {
			c.beforeWait()
		}
		if c.allowance <= 0 {
			return 0, errHeadTooLarge
		}
		if int64(len(b)) > c.allowance {
			b = b[:c.allowance]
		}
		n, err = c.nc.Read(b)
	}
	k := n
	if c.heading && n > 0 {
		if k, _ = c.head.take(b[:n]); k == 0 {
			return 0, errTwoReadings
		}
		c.heading = !c.head.fresh()
	}
	if again {
		c.ahead = c.ahead[k:]
	} else if k < n {
		c.ahead = append([]byte(nil), b[k:n]...)
	}
	c.allowance -= int64(k)
	return k, err
}

// limitHead is called before each head of a response.
func (c *conn) limitHead() { c.allowance, c.heading, c.head.response = maxResponseHead, true, true }
func (c *conn) unlimited() { c.allowance = math.MaxInt64 }

// close may be called from any goroutine, and more than once.
func (c *conn) close() {
	c.closing.Do(func() {
		_ = c.nc.Close() // whoever reads or writes it learns that
		c.pool.forget(c)
	})
}

// closeWrite tells the sandbox that nothing more comes.
func (c *conn) closeWrite() error {
	if half, ok := c.nc.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.nc.Close()
}

// alive looks whether an idle connection was closed by the other side, or sent what nobody asked
// for, without waiting.
func (c *conn) alive() bool {
	if time.Since(c.idleSince) >= c.pool.idleTimeout(c.port) {
		return false
	}
	if c.raw == nil {
		return true
	}
	return c.raw.Read(c.peek) == nil && c.silent
}

func (c *conn) peekAt(fd uintptr) bool {
	var b [1]byte
	_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	c.silent = errors.Is(err, syscall.EAGAIN)
	return true
}
