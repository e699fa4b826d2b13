package gateway

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/edge/gateway/framing"
)

// TestPlainHTTPToTLS: who speaks plain HTTP at a port for TLS is led to HTTPS.
func TestPlainHTTPToTLS(t *testing.T) {
	w := newFixture(t)
	_, addr := w.secure(t)
	host := w.box("a").host(80)
	for name, c := range map[string]struct {
		send, want string // what the answer begins with
		contains   string
	}{
		"GET":         {"GET /a?b=c HTTP/1.1\r\nHost: HOST:7743\r\n\r\n", "HTTP/1.1 307 ", "Location: https://HOST:7743/a?b=c\r\n"},
		"HEAD":        {"HEAD / HTTP/1.1\r\nHost: HOST\r\n\r\n", "HTTP/1.1 307 ", "Location: https://HOST/\r\n"},
		"POST":        {"POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 3\r\n\r\nabc", "HTTP/1.1 400 ", "https://HOST"},
		"no host":     {"GET / HTTP/1.0\r\n\r\n", "HTTP/1.0 400 ", "HTTPS"},
		"absolute":    {"GET http://evil.test/ HTTP/1.1\r\nHost: HOST\r\n\r\n", "HTTP/1.1 400 ", "HTTPS"},
		"HTTP/2":      {framing.Preface + "\r\n\r\nSM\r\n\r\n", "HTTP/1.1 400 ", ""},
		"no protocol": {"hello, port of a sandbox\r\n\r\n", "HTTP/1.1 400 ", ""},
	} {
		t.Run(name, func(t *testing.T) {
			conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = conn.Close() }()
			if _, err := io.WriteString(conn, strings.ReplaceAll(c.send, "HOST", host)); err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(conn) // it is closed
			if want := strings.ReplaceAll(c.contains, "HOST", host); err != nil || !strings.HasPrefix(string(text), c.want) || !strings.Contains(string(text), want) {
				t.Errorf("got %q, %v; want %q and %q", text, err, c.want, want)
			}
		})
	}
}

// TestEarlyUpgrade: what a client sends after a request for an Upgrade is not looked at for another
// request, whether or not it could be one.
func TestEarlyUpgrade(t *testing.T) {
	for name, early := range map[string]string{"bytes": "\n\x81\x00", "line feed": "\n", "a request": "GET / HTTP/1.1\nX: y\n\n", "a byte": "\x81"} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t)
			got := make(chan string, 1)
			port := rawService(t, func(c net.Conn) {
				in := bufio.NewReader(c)
				if _, err := http.ReadRequest(in); err != nil {
					t.Error(err)
				}
				_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: mine\r\n\r\nhi")
				text := make([]byte, len(early))
				if _, err := io.ReadFull(in, text); err != nil && !errors.Is(err, io.EOF) {
					t.Error(err)
				}
				got <- string(text)
			})
			conn := w.connect(t)
			if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: "+w.box("a").host(port)+"\r\nConnection: Upgrade\r\nUpgrade: mine\r\n\r\n"+early); err != nil {
				t.Fatal(err)
			}
			if text := <-got; text != early {
				t.Errorf("the service got %q, want %q", text, early)
			}
			const want = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: mine\r\n\r\nhi"
			text := make([]byte, len(want))
			if _, err := io.ReadFull(conn, text); err != nil || string(text) != want {
				t.Errorf("the client got %q, %v", text, err)
			}
		})
	}
}
