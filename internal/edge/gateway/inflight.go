package gateway

import (
	"context"
	"io"
	"net/http"
	"time"

	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// outcome is what became of one request on a lane.
type outcome int

const (
	carried outcome = iota // and the next may come
	given                  // somebody else has the connection now
	broken                 // the connection is to be closed
)

// inflightRequest is a request that has begun on a lane and ends elsewhere.
type inflightRequest struct {
	g        *Gateway
	entry    *route.Entry
	pool     *pool
	conn     *conn  // to the sandbox; the request has been sent there
	ahead    []byte // of the answer
	port     uint16
	received int64
	started  time.Time
}

// drop ends what nobody takes up.
func (u *inflightRequest) drop() {
	u.conn.close()
	u.pool.traffic.end(u.g.clock())
	u.g.metrics.inFlight.Dec()
	u.g.metrics.answered(0)
	u.g.flights.end()
}

// carry takes the request that has been read to its sandbox, if that can be done at once.
func (l *fastConn) carry(ctx context.Context) outcome {
	l.idle.Store(false)
	started := time.Now()
	if !l.bind(&l.request) {
		l.handed++
		l.fallBack(l.page[l.r:l.w], nil)
		return given
	}
	entry, ok := l.g.cfg.Routes.Lookup(l.bound.target.id)
	if !ok || !l.passable(entry) || !l.g.flights.begin() {
		l.handed++
		l.fallBack(l.page[l.r:l.w], nil)
		return given
	}
	p := l.g.poolOf(entry)
	if c := l.enter(entry, p, started); c != nil {
		l.g.metrics.inFlight.Inc()
		return l.exchange(ctx, entry, p, c, started)
	}
	l.g.flights.end()
	l.fallBack(l.page[l.r:l.w], nil)
	return given
}

// enter counts the request at its sandbox and finds a connection for it. Nil: there is none, or
// the request has to wait, or is to be refused; then it is not counted.
func (l *fastConn) enter(entry *route.Entry, p *pool, started time.Time) *conn {
	if !p.traffic.begin() {
		return nil
	}
	c := p.unused(l.bound.target.port, started.Add(l.g.cfg.answerTime))
	if c == nil || p.allowance.take(l.g.rateOf(entry)) > 0 {
		if c != nil {
			p.release(c)
		}
		p.traffic.under.Add(-1)
		return nil
	}
	return c
}

// exchange sends the request and passes on the answer.
func (l *fastConn) exchange(ctx context.Context, entry *route.Entry, p *pool, c *conn, started time.Time) (end outcome) {
	out, back := pages.Get().(*[pageSize]byte), (*[pageSize]byte)(nil)
	end = broken
	defer func() {
		if end != given {
			p.traffic.end(l.g.clock())
			l.g.metrics.inFlight.Dec()
			l.g.flights.end()
		}
		pages.Put(out)
		if back != nil {
			pages.Put(back)
		}
	}()
	h, n := &l.request, 0
	text := l.appendHead(out[:0]) // a new one where it does not fit
	text = append(text, l.page[l.r+h.size:l.r+h.size+h.length]...)
	verdict := incomplete
	if _, err := c.nc.Write(text); err == nil {
		back = pages.Get().(*[pageSize]byte)
		n, verdict = l.readResponse(c, back[:])
	}
	if verdict != complete {
		u := &inflightRequest{g: l.g, entry: entry, pool: p, conn: c, port: l.bound.target.port, received: int64(h.length), started: started}
		if n > 0 {
			u.ahead = append(u.ahead, back[:n]...)
			l.handed++
		}
		l.fallBack(l.page[l.r:l.w], u)
		return given
	}
	size := l.answer.size + l.answer.body
	if l.answer.close || n > size {
		c.close()
	} else {
		p.release(c)
	}
	took := time.Since(started)
	l.g.metrics.firstByte.Observe(took.Seconds())
	if l.bound.target.port == envd.Port && string(h.path()) == processpb.ProcessStartProcedure {
		l.g.metrics.exec.Observe(took.Seconds())
	}
	closing := l.g.fastConns.closed.Load()
	_, err := l.nc.Write(l.appendResponse(out[:0], back[l.answer.size:size], closing))
	l.report(ctx, started, took)
	if err != nil || closing {
		return broken
	}
	return carried
}

// readResponse reads a whole answer to b, or as much of it as there is in time. The rest of a body
// whose length is known has a moment only: somebody may wait for its beginning.
func (l *fastConn) readResponse(c *conn, b []byte) (n int, v verdict) {
	a, short := &l.answer, false
	for n < len(b) {
		m, err := c.nc.Read(b[n:])
		n += m
		if v = a.parse(b[:n], l.request.method); v != incomplete || err != nil {
			return n, v
		}
		if a.size > 0 && (a.length < 0 || a.size+a.length > len(b)) {
			return n, v
		}
		if a.size > 0 && !short {
			short = true
			c.setReadDeadline(time.Now().Add(bodyTime))
		}
	}
	return n, incomplete
}

// report counts and logs the request.
func (l *fastConn) report(ctx context.Context, started time.Time, firstByte time.Duration) {
	l.g.metrics.answered(l.answer.status)
	level, wanted := l.g.logged(ctx)
	if !wanted {
		return
	}
	t, h := &l.bound.target, &l.request
	l.g.logRequest(ctx, level, &accessRecord{
		sandbox: t.id, port: t.port, method: string(h.method), host: string(h.host), path: string(h.path()), proto: "HTTP/1.1",
		remote: l.remote, status: l.answer.status, bytes: int64(l.answer.content), received: int64(h.length),
		firstByte: firstByte, started: started, agent: h.userAgent(),
	})
}

// takeUp returns what a request has begun with on a lane; nil: it begins here.
func takeUp(r *http.Request, t *target) *inflightRequest {
	c := connOf(r)
	if c == nil {
		return nil
	}
	u := c.underway.Swap(nil)
	if u != nil && (u.entry.ID != t.id || u.port != t.port) {
		u.drop()
		panic(http.ErrAbortHandler) // it was read in two ways: that must not be
	}
	return u
}

// resume goes on with a request that has begun on a lane.
func (x *exchange) resume(u *inflightRequest) {
	x.begun, x.started, x.counted = u, u.started, true
	x.received.Store(u.received)
	_, _ = io.Copy(io.Discard, x.r.Body) // which is there as a whole
}
