package framing

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
)

// split feeds m with pieces of text of the given size, and returns where each message ends, and what
// may be passed on in all.
func split(m *Parser, text []byte, size int) (ends []int, passed int, ok bool) {
	for passed < len(text) {
		n, ok := m.Take(text[passed:min(passed+size, len(text))])
		passed += n
		if n > 0 && m.Fresh() {
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
		Preface + "\r\n\r\nSM\r\n\r\n\x00\x00\x00", Preface + "\r\nContent-Length: 3\r\n\r\n", get + "Content-Length: 03\r\nContent-Length: 3\r\n\r\nabc",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		m := Parser{h2: true}
		ends, passed, ok := split(&m, text, len(text)+1)
		bytewise := Parser{h2: true}
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
		m := Parser{response: true}
		n, ok := m.Take(text)
		if !ok || !m.Fresh() || n == 0 {
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
