package identity

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

var here = netip.MustParseAddr("10.1.2.3")

// agentConn is a connection to an agent at here. It counts what is read of it.
type agentConn struct {
	net.Conn
	read atomic.Int64
}

func (c *agentConn) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(netip.AddrFrom16(here.As16()), envd.Port)) // as sockets of both families have it
}

func (c *agentConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.read.Add(int64(n))
	return n, err
}

// respond writes a response with a body.
func respond(w io.Writer, r envd.IdentityProof) {
	body := fmt.Sprintf(`{"proof":%q,"hashProof":%q}`, r.Proof, r.HashProof)
	_, _ = fmt.Fprintf(w, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

// endless writes text until the connection is closed.
func endless(w io.Writer, text string) {
	for err := error(nil); err == nil; {
		_, err = io.WriteString(w, text)
	}
}

// TestVerify has agents respond in every way; ok and asHash are the verdicts by token and by hash.
func TestVerify(t *testing.T) {
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	id, other := sandbox.IDOf("a"), sandbox.IDOf("b")
	token := tokens.Agent(id)
	right := func(nonce string) envd.IdentityProof { return envd.ProveIdentity(token, "", nonce, string(id), here) }
	for name, tt := range map[string]struct {
		agent      func(c net.Conn, nonce string)
		ok, asHash bool
	}{
		"right": {agent: func(c net.Conn, nonce string) { respond(c, right(nonce)) }, ok: true, asHash: true},
		"hash only": {agent: func(c net.Conn, nonce string) {
			respond(c, envd.ProveIdentity("", envd.TokenSHA256(token), nonce, string(id), here))
		}, asHash: true},
		"other token": {agent: func(c net.Conn, nonce string) {
			respond(c, envd.ProveIdentity(tokens.Agent(other), "", nonce, string(id), here))
		}},
		"other sandbox": {agent: func(c net.Conn, nonce string) { respond(c, envd.ProveIdentity(token, "", nonce, string(other), here)) }},
		"relayed": {agent: func(c net.Conn, nonce string) {
			respond(c, envd.ProveIdentity(token, "", nonce, string(id), here.Next()))
		}},
		"replayed": {agent: func(c net.Conn, _ string) { respond(c, right("ABCDEFGHIJKLMNOPQRSTUVWXYZ")) }},
		"exchanged": {agent: func(c net.Conn, n string) {
			respond(c, envd.IdentityProof{Proof: right(n).HashProof, HashProof: right(n).Proof})
		}},
		"empty proofs": {agent: func(c net.Conn, _ string) { respond(c, envd.IdentityProof{}) }},
		"no such route": {agent: func(c net.Conn, _ string) {
			_, _ = io.WriteString(c, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
		}},
		"not HTTP":  {agent: func(c net.Conn, _ string) { _, _ = io.WriteString(c, "SSH-2.0-x\r\n"+strings.Repeat("x\r\n", 99)) }},
		"closes":    {agent: func(c net.Conn, _ string) { _ = c.Close() }},
		"silent":    {agent: func(net.Conn, string) {}},
		"redirects": {agent: func(c net.Conn, n string) { redirect(c, right(n)) }},
		"interim first": {agent: func(c net.Conn, n string) {
			_, _ = io.WriteString(c, "HTTP/1.1 103 Early Hints\r\n\r\n")
			respond(c, right(n))
		}},
		"two responses":   {agent: func(c net.Conn, n string) { twice(c, right(n)) }},
		"until its close": {agent: func(c net.Conn, n string) { untilClose(c, right(n)) }},
		"slow": {agent: func(c net.Conn, n string) {
			for _, b := range []byte("HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n" + right(n).Proof) {
				time.Sleep(300 * time.Millisecond)
				_, _ = c.Write([]byte{b})
			}
		}},
		"endless head":   {agent: func(c net.Conn, _ string) { _, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n"); endless(c, "A: b\r\n") }},
		"endless line":   {agent: func(c net.Conn, _ string) { endless(c, "x") }},
		"endless body":   {agent: func(c net.Conn, _ string) { _, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n"); endless(c, "{") }},
		"endless chunks": {agent: func(c net.Conn, _ string) { _, _ = io.WriteString(c, chunkedHead); endless(c, "1\r\n{\r\n") }},
	} {
		v := NewVerifier(tokens)
		for _, by := range []struct {
			what   string
			verify verifyFunc
			want   bool
		}{{"token", v.Verify, tt.ok}, {"hash", v.VerifyHash, tt.asHash}} {
			t.Run(name+"/"+by.what, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					err := try(t, by.verify, id, tt.agent)
					if (err == nil) != by.want || err != nil && !errors.Is(err, ErrUnproved) {
						t.Errorf("verified: %v, want %v", err, by.want)
					}
				})
			})
		}
	}
}

const chunkedHead = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

func redirect(c net.Conn, r envd.IdentityProof) {
	body := fmt.Sprintf(`{"proof":%q,"hashProof":%q}`, r.Proof, r.HashProof)
	_, _ = fmt.Fprintf(c, "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://10.1.2.4/\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

func twice(c net.Conn, r envd.IdentityProof) {
	var b strings.Builder
	respond(&b, r)
	_, _ = io.WriteString(c, b.String()+b.String())
}

func untilClose(c net.Conn, r envd.IdentityProof) {
	_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\n\r\n"+`{"proof":%q,"hashProof":%q}`, r.Proof, r.HashProof)
	_ = c.Close()
}

type verifyFunc func(ctx context.Context, agent net.Conn, id sandbox.ID) error

// try verifies an agent over a connection, and then uses the connection, if it was right.
func try(t *testing.T, verify verifyFunc, id sandbox.ID, agent func(c net.Conn, nonce string)) error {
	t.Helper()
	here, there := net.Pipe()
	var serving sync.WaitGroup
	defer serving.Wait()
	defer func() { _, _ = here.Close(), there.Close() }()
	serving.Go(func() {
		in := bufio.NewReader(there)
		req, err := http.ReadRequest(in)
		if err != nil || req.URL.Path != envd.PathIdentity || len(req.Header[envd.HeaderAccessToken]) > 0 {
			t.Errorf("request %v, %v", req, err)
			return
		}
		agent(there, req.URL.Query().Get(envd.QueryNonce))
		if line, err := in.ReadString('\n'); err == nil {
			_, _ = io.WriteString(there, line)
		}
	})
	conn, began := &agentConn{Conn: here}, time.Now()
	err := verify(t.Context(), conn, id)
	if took := time.Since(began); took > timeout || conn.read.Load() > maxResponse {
		t.Errorf("it took %s and read %d bytes", took, conn.read.Load())
	}
	if err != nil {
		return err
	}
	time.Sleep(time.Minute) // no deadline is left
	echo := make([]byte, 6)
	_, err = io.WriteString(conn, "hello\n")
	if err = cmp.Or(err, second(io.ReadFull(conn, echo))); err != nil || string(echo) != "hello\n" {
		t.Errorf("afterwards the connection carries %q, %v", echo, err)
	}
	return nil
}

func second(_ int, err error) error { return err }
