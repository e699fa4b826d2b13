package fastpath

import (
	"context"
	"time"
)

// outcome is the result of one request.
type outcome int

const (
	carried  outcome = iota // the next one may come
	fellBack                // the main path has the connection now
	broken                  // the connection must be closed
)

// Exchange is one request on the fast path and its response. It is valid during a call of Gateway.
type Exchange struct {
	Target   Target
	Upstream Upstream
	Remote   string
	Started  time.Time
	// Received is the length of the request's body.
	Received int
	// Status, Bytes and FirstByte are of the response.
	Status    int
	Bytes     int
	FirstByte time.Duration

	head *requestHead
}

// Method returns the request's method.
func (x *Exchange) Method() string { return string(x.head.method) }

// Host returns the request's host.
func (x *Exchange) Host() string { return string(x.head.host) }

// Path returns the request's path without the query. It has no escapes.
func (x *Exchange) Path() string { return string(x.head.path()) }

// HasPath compares the path and allocates nothing.
func (x *Exchange) HasPath(path string) bool { return string(x.head.path()) == path }

// UserAgent returns the header of that name, or empty.
func (x *Exchange) UserAgent() string { return x.head.userAgent() }

// TrafficToken returns the traffic token; false: there is none.
func (x *Exchange) TrafficToken() (string, bool) {
	return string(x.head.traffic), x.head.traffic != nil
}

// carry proxies the request that was read to its sandbox, if that can be done at once.
func (l *conn) carry(ctx context.Context) (end outcome) {
	l.idle.Store(false)
	if !l.bind(&l.request) {
		return l.giveUp(nil)
	}
	x := &l.current
	*x = Exchange{Target: l.bound.target, Remote: l.remote, Started: time.Now(), Received: l.request.length, head: &l.request}
	up, ok := l.p.cfg.Gateway.Admit(x)
	if !ok {
		return l.giveUp(nil)
	}
	x.Upstream = up
	end = broken
	defer func() {
		if end != fellBack {
			l.p.cfg.Gateway.Done(ctx, x)
		}
	}()
	c := l.connect(ctx, x)
	if c == nil {
		return l.giveUp(l.inflight(x, nil, nil))
	}
	return l.exchange(x, c)
}

// giveUp falls back with the request.
func (l *conn) giveUp(u *Inflight) outcome {
	l.fallbacks++
	l.fallBack(l.page[l.r:l.w], u)
	return fellBack
}

func (l *conn) inflight(x *Exchange, c UpstreamConn, ahead []byte) *Inflight {
	return &Inflight{Target: x.Target, Upstream: x.Upstream, Conn: c, Ahead: append([]byte(nil), ahead...), Started: x.Started}
}

// connect returns a connection to the sandbox with a deadline for the response, or nil.
func (l *conn) connect(ctx context.Context, x *Exchange) UpstreamConn {
	c := x.Upstream.Pool().Get(x.Target.Port)
	if c == nil {
		ctx, cancel := context.WithTimeout(ctx, l.p.cfg.ResponseTime)
		defer cancel()
		var err error
		if c, err = x.Upstream.Open(ctx, x.Target.Port); err != nil {
			return nil
		}
	}
	_ = c.SetReadDeadline(x.Started.Add(l.p.cfg.ResponseTime)) // a failure shows in the next read
	return c
}

// exchange sends the request and copies the response.
func (l *conn) exchange(x *Exchange, c UpstreamConn) outcome {
	out, back := pages.Get().(*[pageSize]byte), (*[pageSize]byte)(nil)
	defer func() {
		pages.Put(out)
		if back != nil {
			pages.Put(back)
		}
	}()
	h, n := &l.request, 0
	text := l.appendHead(out[:0]) // reallocated if it does not fit
	text = append(text, l.page[l.r+h.size:l.r+h.size+h.length]...)
	verdict := incomplete
	if _, err := c.Write(text); err == nil {
		back = pages.Get().(*[pageSize]byte)
		n, verdict = l.readResponse(c, back[:])
	}
	if verdict != complete {
		if n == 0 { // late, not unsupported
			l.fallbacks--
			return l.giveUp(l.inflight(x, c, nil))
		}
		return l.giveUp(l.inflight(x, c, back[:n]))
	}
	size := l.response.size + l.response.body
	if l.response.close || n > size {
		_ = c.Close()
	} else {
		x.Upstream.Pool().Put(x.Target.Port, c)
	}
	x.FirstByte, x.Status, x.Bytes = time.Since(x.Started), l.response.status, l.response.content
	closing := l.p.closed.Load()
	_, err := l.nc.Write(l.appendResponse(out[:0], back[l.response.size:size], closing))
	if err != nil || closing {
		return broken
	}
	return carried
}

// readResponse reads a response into b, as much of it as arrives in time. The rest of a body of known
// length has bodyTime only: the client may wait for its beginning.
func (l *conn) readResponse(c UpstreamConn, b []byte) (n int, v verdict) {
	a, short := &l.response, false
	for n < len(b) {
		m, err := c.Read(b[n:])
		n += m
		if v = a.parse(b[:n], l.request.method); v != incomplete || err != nil {
			return n, v
		}
		if a.size > 0 && (a.length < 0 || a.size+a.length > len(b)) {
			return n, v
		}
		if a.size > 0 && !short {
			short = true
			_ = c.SetReadDeadline(time.Now().Add(bodyTime))
		}
	}
	return n, incomplete
}
