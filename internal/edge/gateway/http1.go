package gateway

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// errMalformed says that a sandbox did not answer in HTTP.
var errMalformed = errors.New("malformed response")

// errClient says that the client's body broke off.
var errClient = errors.New("client's body broke off")

const (
	// maxInterim bounds the 1xx answers before a final one.
	maxInterim = 16
	// continueWait is the default of Config's.
	continueWait = time.Second
)

// overHTTP1 carries the exchange over a connection of HTTP/1.1. An error before x.status is set
// means that the client has been told nothing.
func (x *exchange) overHTTP1(p *pool) error {
	if u := x.begun; u != nil {
		x.begun = nil
		u.conn.arm()
		u.conn.ahead = u.ahead
		if again, err := x.attempt(u.conn, true, true); !again {
			return err
		}
	}
	for {
		c, reused, err := p.acquire(x.r.Context(), x.port)
		if err != nil {
			return err
		}
		again, err := x.attempt(c, reused, false)
		if !again {
			return err
		}
	}
}

// attempt uses one connection. again is true when a connection that had been idle turned out to
// be dead, and the request may be sent anew. With sent, the request is there already.
func (x *exchange) attempt(c *conn, reused, sent bool) (again bool, err error) {
	stopWatch := context.AfterFunc(x.r.Context(), c.close)
	s := &sender{x: x, c: c, proceed: make(chan struct{})}
	keep := false
	x.quiet = x.g.watch(c.close)
	defer func() {
		cut := x.quiet.stop()
		s.finish(stopWatch() && keep && !cut)
	}()
	if !sent {
		err = x.writeHead(c.bw)
	}
	if err == nil {
		s.start(sent)
		c.limitHead()
		_, err = c.br.Peek(1)
	}
	if err != nil {
		again = reused && x.repeatable() && x.r.Context().Err() == nil && !c.pool.life.Ended()
		return again, fmt.Errorf("await response: %w", s.cause(err))
	}
	res, err := x.readHead(c, s) //nolint:bodyclose // the connection is kept or closed as a whole
	if err != nil {
		return false, s.cause(err)
	}
	if res.StatusCode == http.StatusSwitchingProtocols {
		return false, x.tunnel(c, res)
	}
	keep, err = x.relay(c, res)
	return false, s.cause(err)
}

// relay carries a final response. keep is true when the connection may be used again.
func (x *exchange) relay(c *conn, res *http.Response) (keep bool, err error) {
	c.unlimited()
	announced := len(res.Trailer)
	x.answer(res)
	c.beforeWait = x.flush
	if err := x.copyBody(res.Body, res.ContentLength, false); err != nil {
		return false, fmt.Errorf("carry response: %w", err)
	}
	x.trailers(res, announced)
	framed := res.ContentLength >= 0 || len(res.TransferEncoding) > 0 || bodiless(x.r.Method, res.StatusCode)
	return framed && !res.Close && c.br.Buffered() == 0 && len(c.ahead) == 0, nil
}

// repeatable reports whether the request may be sent twice.
func (x *exchange) repeatable() bool {
	if x.r.ContentLength != 0 {
		return false
	}
	switch x.r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	default:
		return false
	}
}

func bodiless(method string, status int) bool {
	return method == http.MethodHead || status == http.StatusNoContent || status == http.StatusNotModified
}

// readHead reads up to the head of the final response, passing interim ones on.
func (x *exchange) readHead(c *conn, s *sender) (*http.Response, error) {
	for range maxInterim {
		res, err := http.ReadResponse(c.br, x.r)
		if err != nil {
			if _, network := errors.AsType[net.Error](err); network || errors.Is(err, io.ErrUnexpectedEOF) {
				return nil, fmt.Errorf("read response: %w", err)
			}
			return nil, fmt.Errorf("read response: %w: %w", errMalformed, err)
		}
		switch {
		case res.StatusCode < 100 || res.StatusCode > 999:
			return nil, errMalformed
		case res.StatusCode == http.StatusContinue:
			x.invite()
			s.goAhead()
		case res.StatusCode < 200 && res.StatusCode != http.StatusSwitchingProtocols:
			x.invite()
			h := x.w.Header()
			copyResponseHeader(h, res.Header)
			x.w.WriteHeader(res.StatusCode)
			clear(h)
		default:
			return res, nil
		}
		c.limitHead()
	}
	return nil, fmt.Errorf("%w: too many interim responses", errMalformed)
}

// invite tells the client to send a body that it holds back. Our server does so by itself when the
// body is read, and that may be while an interim answer is written, which it keeps apart from no other
// than this one.
func (x *exchange) invite() {
	if x.body != nil && !x.invited && x.r.ProtoAtLeast(1, 1) && x.r.Header.Get("Expect") != "" {
		x.invited = true
		x.w.WriteHeader(http.StatusContinue)
	}
}

// sender carries a request's body beside the response: either may end first, and whoever ends
// last gives the connection back.
type sender struct {
	x       *exchange
	c       *conn
	proceed chan struct{} // closed when the body may be sent
	once    sync.Once
	state   atomic.Int32 // sending and what follows
	broken  atomic.Bool  // the client did not send all of it
	read    atomic.Bool  // all of it has come from the client
	// lingers is true where the client's connection will be closed under the rest of the body; the
	// handler's alone.
	lingers bool
}

// States of a sender.
const (
	unsent  int32 = iota // nothing has been begun
	sending              // the body is under way
	left                 // the response has ended, the body has not
	sent                 // all of the request has been sent
	failed               // some of it never will
)

func (s *sender) goAhead() { s.once.Do(func() { close(s.proceed) }) }

// start begins to send the body, if that has not been sent.
func (s *sender) start(done bool) {
	if done || s.x.r.ContentLength == 0 {
		s.state.Store(sent)
		return
	}
	if s.x.r.ProtoMajor == 1 {
		_ = s.x.rc.EnableFullDuplex() // HTTP/1.1 has it; nothing else comes here
	}
	s.state.Store(sending)
	s.x.body = s
	s.x.g.flights.join()
	go s.run() // flights wait for it
}

// finish is called when the response has ended. With keep, the connection may be used again once
// the whole request has been sent: that may take a moment more, which the client gets.
func (s *sender) finish(keep bool) {
	if !keep {
		s.c.close()
	}
	s.goAhead()
	if s.state.CompareAndSwap(sending, left) {
		// HTTP/2 ends it by itself. Where all of it has come, only its last bytes are on their way to
		// the sandbox: the connection goes on then, and a deadline would meet the next request.
		if rc := s.x.rc; s.x.r.ProtoMajor == 1 && !s.read.Load() {
			// The server reads on in the body when the handler has returned, and lifts a deadline
			// that was set before. It closes the connection after that: see closeIfEarly.
			s.lingers = true
			time.AfterFunc(linger, func() { _ = rc.SetReadDeadline(time.Unix(1, 0)) })
		}
		return
	}
	s.settle(keep && s.state.Load() == sent)
}

func (s *sender) settle(whole bool) {
	if whole {
		s.c.pool.release(s.c)
	} else {
		s.c.close()
	}
}

// cause tells a failure of the client from one of the sandbox.
func (s *sender) cause(err error) error {
	if err != nil && s.broken.Load() {
		return errors.Join(errClient, err)
	}
	return err
}

func (s *sender) run() {
	defer s.x.g.flights.end()
	if s.x.r.Header.Get("Expect") != "" {
		select {
		case <-s.proceed:
		case <-time.After(s.x.g.cfg.continueWait):
		}
	}
	body := &clientBody{r: s.x.r.Body, whole: &s.read, count: &s.x.received, quiet: s.x.quiet}
	var err error
	if s.x.r.ContentLength > 0 {
		err = sendPlain(s.c.nc, body, s.x.r.ContentLength)
	} else {
		err = sendChunked(s.c.nc, body, s.x.r)
	}
	if body.failed {
		s.broken.Store(true)
		s.c.close()
	}
	// What the sandbox did not take it need not: its answer tells more.
	end := sent
	if err != nil {
		end = failed
	}
	if !s.state.CompareAndSwap(sending, end) {
		s.settle(err == nil)
	}
}

// clientBody remembers whether it was the reading that failed.
type clientBody struct {
	r      io.Reader
	count  *atomic.Int64
	quiet  *idleTimer
	whole  *atomic.Bool // set at the end, before the last of it is passed on
	failed bool
}

func (b *clientBody) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	b.count.Add(int64(n))
	b.quiet.touch()
	if errors.Is(err, io.EOF) {
		b.whole.Store(true)
	}
	if err != nil && !errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		b.failed = true
	}
	return n, err
}

func sendPlain(to io.Writer, body *clientBody, length int64) error {
	b := newBlock(length)
	defer b.free()
	var sent int64
	for {
		n, err := body.Read(b.buf)
		if n > 0 {
			if _, err := to.Write(b.buf[:n]); err != nil {
				return err
			}
			sent += int64(n)
			b.adapt(n)
		}
		switch {
		case errors.Is(err, io.EOF) && sent == length:
			return nil
		case errors.Is(err, io.EOF):
			body.failed = true
			return io.ErrUnexpectedEOF
		case err != nil:
			return err
		}
	}
}

// sendChunked frames each read as a chunk of its own, in one write.
func sendChunked(to io.Writer, body *clientBody, r *http.Request) error {
	b := newBlock(-1)
	defer b.free()
	const head, tail = 7, 2 // five hexadecimal digits, enough for a block, and two line ends
	for {
		n, err := body.Read(b.buf[head : len(b.buf)-tail])
		if n > 0 {
			copy(b.buf, fmt.Appendf(nil, "%05x\r\n", n))
			copy(b.buf[head+n:], "\r\n")
			if _, err := to.Write(b.buf[:head+n+tail]); err != nil {
				return err
			}
			b.adapt(head + n + tail)
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	end := bufio.NewWriterSize(to, 512)
	_, _ = end.WriteString("0\r\n")
	_ = trailersOf(r).Write(end)
	_, _ = end.WriteString("\r\n")
	return end.Flush() // which has the errors of the writes before
}
