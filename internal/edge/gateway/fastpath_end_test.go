package gateway

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
)

// TestFastPathAndKill: a request that waits on the fast path ends with its sandbox.
func TestFastPathAndKill(t *testing.T) {
	w := fastPathFixture(t)
	arrived := make(chan struct{}, 1)
	port := raw(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		for {
			r, err := http.ReadRequest(in)
			if err != nil {
				return
			}
			if r.URL.Path == "/never" {
				arrived <- struct{}{}
				continue
			}
			_, _ = io.WriteString(c, okAnswer)
		}
	})
	for _, request := range []string{"GET /never HTTP/1.1\r\nHost: HOST\r\n\r\n", "POST /never HTTP/1.1\r\nHost: HOST\r\nContent-Length: 1\r\n\r\nx"} {
		b := w.box("a" + request[:1])
		c := w.fastConn(t, b, port)
		go func() {
			<-arrived
			b.kill()
		}()
		if status, body := ask(t, c, strings.ReplaceAll(request, "HOST", b.host(port))); status != http.StatusBadGateway || !strings.Contains(body, reply.MessageNotFound) {
			t.Errorf("got %d %s", status, body)
		}
		w.idle()
	}
}

// TestFastPathRetries: a service that closes its connections after each answer, without a word, loses
// no request that may be repeated; others get an error.
func TestFastPathRetries(t *testing.T) {
	w := fastPathFixture(t)
	var count atomic.Int64
	port := raw(t, func(c net.Conn) {
		in := bufio.NewReader(c)
		for range 2 {
			if _, err := http.ReadRequest(in); err != nil {
				return
			}
			if count.Add(1)%3 == 0 {
				return // without an answer
			}
			_, _ = io.WriteString(c, okAnswer)
		}
	})
	b := w.box("a")
	c := w.fastConn(t, b, port)
	for range 30 {
		if status, body := ask(t, c, "GET / HTTP/1.1\r\nHost: "+b.host(port)+"\r\n\r\n"); status != http.StatusOK && status != http.StatusBadGateway || status == http.StatusOK && body != "ok" {
			t.Fatalf("got %d %s", status, body)
		}
	}
	w.idle()
}

// TestFastPathClientGone: a client that goes away while its request waits is missed by the service.
func TestFastPathClientGone(t *testing.T) {
	w := fastPathFixture(t, func(c *Config) { c.responseTime = 200 * time.Millisecond })
	arrived, gone := make(chan struct{}, 1), make(chan struct{}, 1)
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			arrived <- struct{}{}
			<-r.Context().Done()
			gone <- struct{}{}
			return
		}
		hello(w, r)
	})
	b := w.box("a")
	c := w.fastConn(t, b, port)
	_, _ = io.WriteString(c, "GET /wait HTTP/1.1\r\nHost: "+b.host(port)+"\r\n\r\n")
	<-arrived
	_ = c.Close()
	<-gone
	w.idle()
}

// TestFastPathDrains: a drain closes fast connections that wait, lets a request end, and leaves none.
func TestFastPathDrains(t *testing.T) {
	w := fastPathFixture(t)
	arrived, finish := make(chan struct{}, 1), make(chan struct{})
	port := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/wait" {
			arrived <- struct{}{}
			<-finish
		}
		hello(w, r)
	})
	b := w.box("a")
	waiting := w.fastConn(t, b, port)
	busy := w.fastConn(t, b, port)
	answered := make(chan string, 1)
	go func() {
		_, body, err := tryAsk(busy, "GET /wait HTTP/1.1\r\nHost: "+b.host(port)+"\r\n\r\n")
		if err != nil {
			body = err.Error()
		}
		answered <- body
	}()
	<-arrived
	drained := make(chan error, 1)
	go func() { drained <- w.gateway.Drain(t.Context()) }()
	if _, err := waiting.Read(make([]byte, 1)); err == nil {
		t.Error("an idle fast connection received data")
	}
	close(finish)
	if body := <-answered; body != "hello" {
		t.Errorf("the request under way got %q", body)
	}
	if err := <-drained; err != nil {
		t.Error(err)
	}
	if n := w.fastConnCount(); n != 0 {
		t.Errorf("%d fast connections are left", n)
	}
}
