// Package hostileagent is an agent that a tenant has replaced: it answers every request with an attack on the caller.
// It counts what it could send, so that a test can bound what a caller reads.
package hostileagent

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Attack answers one request on its connection.
type Attack func(conn *Counted, req *http.Request)

// Counted is a connection that counts what was written to it.
type Counted struct {
	net.Conn
	sent *atomic.Int64
}

// Write counts.
func (c *Counted) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.sent.Add(int64(n))
	return n, err
}

// Agent is a running one.
type Agent struct {
	// Address is where it listens.
	Address string
	// Requests counts what it was asked.
	Requests atomic.Int64
	sent     atomic.Int64
}

// Sent returns how many bytes it could send, in all.
func (a *Agent) Sent() int64 { return a.sent.Load() }

// Start runs an agent until the test ends.
func Start(t *testing.T, attack Attack) *Agent {
	t.Helper()
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := &Agent{Address: ln.Addr().String()}
	var serving sync.WaitGroup
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	serving.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open[conn] = true
			mu.Unlock()
			serving.Go(func() { a.serve(conn, attack) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		mu.Lock()
		for conn := range open {
			_ = conn.Close()
		}
		mu.Unlock()
		serving.Wait()
	})
	return a
}

// serve answers the first request of a connection.
func (a *Agent) serve(conn net.Conn, attack Attack) {
	defer func() { _ = conn.Close() }()
	req, err := http.ReadRequest(bufio.NewReader(conn))
	if err != nil {
		return
	}
	a.Requests.Add(1)
	answer(&Counted{Conn: conn, sent: &a.sent}, req, attack)
}

// Answer answers one request, as an agent outside a test.
func Answer(conn net.Conn, req *http.Request, attack Attack) {
	answer(&Counted{Conn: conn, sent: new(atomic.Int64)}, req, attack)
}

func answer(conn *Counted, req *http.Request, attack Attack) {
	go func() { _, _ = io.Copy(io.Discard, req.Body) }() // a client sends before it reads
	attack(conn, req)
}

// Attacks are those that a client must survive, by name.
func Attacks() map[string]Attack {
	return map[string]Attack{
		"endless JSON string":  endless("application/json", `{"error":"`, "x"),
		"endless JSON array":   endless("application/json", "[", "{},"),
		"small JSON items":     respond("200 OK", "application/json", "["+strings.Repeat("{},", (2<<20)/3-1)+"{}]"),
		"many JSON names":      respond("200 OK", "application/json", manyNames()),
		"endless JSON map":     endless("application/json", "{", `"a":"",`),
		"endless log lines":    endless("application/x-ndjson", "", `{"source":"agent","line":"x"}`+"\n"),
		"endless empty lines":  endless("application/x-ndjson", "", "{}\n"),
		"endless header":       endlessHeader,
		"endless hints":        endlessHints,
		"switch of protocol":   switchProtocol,
		"a byte a second":      drip,
		"terminal escapes":     respond("500 Internal Server Error", "application/json", `{"message":"\u001b]0;owned\u0007\n2026 level=ERROR msg=fake"}`),
		"many headers":         manyHeaders,
		"silence":              func(conn *Counted, _ *http.Request) { _, _ = io.Copy(io.Discard, conn) },
		"head without a body":  headWithoutBody,
		"short body":           shortBody,
		"web page":             respond("200 OK", "text/html", "<p>not an agent"),
		"long error":           respond("500 Internal Server Error", "application/json", `{"message":"`+strings.Repeat("x", 1<<20)+`"}`),
		"huge frame":           frames(envelope(0, 1<<31, bytes.Repeat([]byte("x"), 1<<20))),
		"frame of a gigabyte":  frames(envelope(0, 1<<30, nil), bytes.Repeat([]byte("x"), 1<<20)),
		"huge end of a stream": frames(envelope(2, 1<<30, nil), bytes.Repeat([]byte("x"), 1<<20)),
		"endless starts":       frames(envelope(0, 6, []byte{0x0a, 0x04, 0x0a, 0x02, 0x08, 0x01})),
		"endless empty frames": frames(envelope(0, 0, nil)),
	}
}

// manyNames is a map of two megabytes.
func manyNames() string {
	var b strings.Builder
	for i := 0; b.Len() < 2<<20-20; i++ {
		_, _ = fmt.Fprintf(&b, `,"%x":""`, i)
	}
	return "{" + b.String()[1:] + "}"
}

// Redirect sends callers elsewhere.
func Redirect(to string) Attack {
	return func(conn *Counted, _ *http.Request) {
		_, _ = fmt.Fprintf(conn, "HTTP/1.1 307 Temporary Redirect\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n", to)
	}
}

// endless repeats a text for as long as the caller reads.
func endless(contentType, first, again string) Attack {
	block := []byte(strings.Repeat(again, 1+(64<<10)/len(again)))
	return func(conn *Counted, _ *http.Request) {
		if _, err := fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n%s", contentType, first); err != nil {
			return
		}
		repeat(conn, block)
	}
}

func repeat(conn *Counted, block []byte) {
	for {
		if _, err := conn.Write(block); err != nil {
			return
		}
	}
}

func endlessHeader(conn *Counted, _ *http.Request) {
	if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nX-Long: "); err == nil {
		repeat(conn, bytes.Repeat([]byte("x"), 64<<10))
	}
}

func endlessHints(conn *Counted, _ *http.Request) {
	repeat(conn, bytes.Repeat([]byte("HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"), 1<<10))
}

func switchProtocol(conn *Counted, _ *http.Request) {
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"); err == nil {
		repeat(conn, bytes.Repeat([]byte("x"), 64<<10))
	}
}

// drip sends a body for as long as its caller waits.
func drip(conn *Counted, _ *http.Request) {
	_, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n[")
	for err == nil {
		time.Sleep(time.Second)
		_, err = io.WriteString(conn, " ")
	}
}

func manyHeaders(conn *Counted, _ *http.Request) {
	if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\n"); err == nil {
		repeat(conn, bytes.Repeat([]byte("X-Many: x\r\n"), 6<<10))
	}
}

func headWithoutBody(conn *Counted, _ *http.Request) {
	_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n")
	_, _ = io.Copy(io.Discard, conn)
}

// shortBody closes its direction before what it has announced.
func shortBody(conn *Counted, _ *http.Request) {
	_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n{}")
	if half, ok := conn.Conn.(*net.TCPConn); ok {
		_ = half.CloseWrite()
		_, _ = io.Copy(io.Discard, conn)
	}
}

func respond(status, contentType, body string) Attack {
	return func(conn *Counted, _ *http.Request) {
		_, _ = fmt.Fprintf(conn, "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", status, contentType, len(body), body)
	}
}

// envelope is a message of a stream in Connect's protocol, which may announce more than it has.
func envelope(flags byte, announced uint32, message []byte) []byte {
	head := binary.BigEndian.AppendUint32([]byte{flags}, announced)
	return append(head, message...)
}

// frames sends the first block, and then the last one for as long as the caller reads.
func frames(blocks ...[]byte) Attack {
	return func(conn *Counted, req *http.Request) {
		contentType := req.Header.Get("Content-Type")
		if !strings.HasPrefix(contentType, "application/connect") {
			contentType = "application/json"
		}
		if _, err := fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n%s", contentType, blocks[0]); err != nil {
			return
		}
		again := blocks[len(blocks)-1]
		repeat(conn, bytes.Repeat(again, 1+(64<<10)/len(again)))
	}
}
