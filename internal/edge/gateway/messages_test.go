package gateway

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// split feeds m with pieces of text of the given size, and returns where each message ends, and what
// may be passed on in all.
func split(m *messages, text []byte, size int) (ends []int, passed int, ok bool) {
	for passed < len(text) {
		n, ok := m.take(text[passed:min(passed+size, len(text))])
		passed += n
		if n > 0 && m.fresh() {
			ends = append(ends, passed)
		}
		if !ok {
			return ends, passed, false
		}
	}
	return ends, passed, true
}

// FuzzMessages: a message ends where net/http has it end, what is passed on can be read in one way, and
// the pieces in which it comes make no difference.
func FuzzMessages(f *testing.F) {
	const get, chunked = "GET / HTTP/1.1\r\nHost: a\r\n", "Transfer-Encoding: chunked\r\n"
	for _, text := range []string{
		get + "\r\n" + get + "Content-Length: 3\r\n\r\nabc", get + chunked + "\r\n3;a=b\r\nabc\r\n0\r\nT: x\r\n\r\n" + get + "\r\n",
		get + chunked + "Content-Length: 3\r\n\r\n", get + "X: a\r\n b\r\n\r\n", get + "X: a\n\r\n", "\r\n" + get + "\r\n", "\n" + get + "\r\n",
		get + chunked + "\r\n0\r\nT: a\n\r\n", get + chunked + "\r\n1\na\r\n0\r\n\r\n", "POST / HTTP/1.0\r\n" + chunked + "\r\n0\r\n\r\n",
		preface + "\r\n\r\nSM\r\n\r\n\x00\x00\x00", preface + "\r\nContent-Length: 3\r\n\r\n", get + "Content-Length: 03\r\nContent-Length: 3\r\n\r\nabc",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m := messages{h2: true}
		ends, passed, ok := split(&m, text, len(text)+1)
		bytewise := messages{h2: true}
		if _, again, okAgain := split(&bytewise, text, 1); again != passed || okAgain != ok {
			t.Fatalf("in one piece %d bytes pass, %v; one by one %d, %v", passed, ok, again, okAgain)
		}
		start := 0
		for _, end := range ends {
			checkMessage(t, text[start:end])
			start = end
		}
		if rest := text[start:passed]; m.at < afterPreface {
			if r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(rest))); err == nil {
				if _, err := io.ReadAll(r.Body); err == nil {
					t.Errorf("net/http reads all of %q, which has not ended", rest)
				}
			}
		}
	})
}

func checkMessage(t *testing.T, text []byte) {
	t.Helper()
	in := bufio.NewReader(bytes.NewReader(text))
	r, err := http.ReadRequest(in)
	if err != nil {
		return
	}
	_, err = io.ReadAll(r.Body)
	if rest, _ := io.ReadAll(in); err == nil && len(rest) > 0 {
		t.Errorf("net/http leaves %q of %q", rest, text)
	}
	head, _, _ := bytes.Cut(text, []byte("\r\n\r\n"))
	lengths := 0
	for line := range strings.SplitSeq(string(head), "\r\n") {
		if strings.ContainsAny(line, "\r\n\x00") || strings.HasPrefix(line, " ") || strings.HasPrefix(line, "\t") {
			t.Errorf("line %q", line)
		}
		if name, _, _ := strings.Cut(strings.ToLower(line), ":"); name == "transfer-encoding" || name == "content-length" && len(r.TransferEncoding) > 0 {
			lengths++
		}
	}
	if lengths > 1 || (lengths == 1 && !r.ProtoAtLeast(1, 1)) {
		t.Errorf("two lengths in %q", head)
	}
}

// FuzzResponseMessages: a response's head ends where net/http has it end, and has one length.
func FuzzResponseMessages(f *testing.F) {
	for _, text := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", "HTTP/1.0 200 OK\nA: b\n c\n\nabc", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
		"HTTP/1.1 200\r\nContent-Length: 3\nContent-Length: 4\n\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding:\r\n chunked\r\ncontent-length : 3\r\n\r\n",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m := messages{response: true}
		n, ok := m.take(text)
		if !ok || !m.fresh() || n == 0 {
			return
		}
		in := bufio.NewReader(bytes.NewReader(text))
		res, err := http.ReadResponse(in, &http.Request{Method: http.MethodHead})
		if err != nil {
			return
		}
		_ = res.Body.Close()
		if rest, _ := io.ReadAll(in); !bytes.Equal(rest, text[n:]) {
			t.Errorf("net/http sees %q after the head of %q, not %q", rest, text, text[n:])
		}
	})
}

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
		"HTTP/2":      {preface + "\r\n\r\nSM\r\n\r\n", "HTTP/1.1 400 ", ""},
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
