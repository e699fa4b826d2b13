package fastpath

import (
	"bytes"
	"net/http"
)

// responseHead is the head of a simple response, as slices of the bytes that it was read from.
type responseHead struct {
	status int
	// line is the first, without its end.
	line []byte
	// lines are forwarded unchanged, each with its end.
	lines   [][]byte
	length  int  // of the body, -1 if unknown
	chunked bool // the body
	close   bool // the sandbox closes the connection after it
	dated   bool
	size    int // of the head itself
	body    int // length after the head, framing included
	content int // the same without framing
}

// parse reads a response from b: its head, and where its body ends. A response whose framing is not of
// the simplest form is unsupported, and so is one that is not final.
func (h *responseHead) parse(b []byte, method []byte) verdict {
	*h = responseHead{lines: h.lines[:0], length: -1}
	line, rest, v := cutLine(b)
	if v != complete {
		return v
	}
	if !h.statusLine(line) {
		return unsupported
	}
	if rest, v = cutFields(rest, h.field); v != complete {
		return v
	}
	h.size = len(b) - len(rest)
	return h.frame(rest, string(method) == http.MethodHead)
}

// field handles a header, whose name is canonical, and reports false if it makes the response
// unsupported. line is all of it. Headers named by isHop are not forwarded.
func (h *responseHead) field(name, value, line []byte) (ok bool) {
	switch string(name) {
	case "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Http2-Settings":
		return true
	case "Trailer", "Upgrade", "Te":
		return false
	case "Connection":
		h.close = foldedEqual(value, "close")
		return h.close || foldedEqual(value, "keep-alive")
	case "Transfer-Encoding":
		ok = !h.chunked && string(value) == "chunked"
		h.chunked = true
		return ok
	case "Content-Length":
		if h.length >= 0 {
			return false
		}
		if h.length, ok = decimal(value); !ok {
			return false
		}
	case "Date":
		h.dated = true
	}
	h.lines = append(h.lines, line)
	return true
}

func (h *responseHead) statusLine(line []byte) bool {
	const version = "HTTP/1.1 "
	if len(line) < len(version)+3 || string(line[:len(version)]) != version {
		return false
	}
	for _, c := range line {
		if c < ' ' || c >= 0x7f {
			return false
		}
	}
	code := line[len(version):]
	n, ok := decimal(code[:3])
	if !ok || (len(code) > 3 && code[3] != ' ') {
		return false
	}
	h.status, h.line = n, line
	return n >= 200 && n <= 599
}

// frame finds the end of the body, of which b is the beginning.
func (h *responseHead) frame(b []byte, head bool) verdict {
	switch {
	case h.chunked && (head || h.length >= 0):
		return unsupported
	case head && h.status != http.StatusNotModified && h.status != http.StatusNoContent:
		return complete
	case h.status == http.StatusNoContent || h.status == http.StatusNotModified:
		if h.chunked || h.length >= 0 {
			return unsupported
		}
		return complete
	case h.chunked:
		return h.chunks(b)
	case h.length < 0:
		return unsupported
	}
	h.body, h.content = h.length, h.length
	if len(b) < h.length {
		return incomplete
	}
	return complete
}

// chunks finds the end of a chunked body that has neither extensions nor trailers.
func (h *responseHead) chunks(b []byte) verdict {
	rest := b
	for {
		line, after, v := cutLine(rest)
		if v != complete {
			return v
		}
		n, ok := hexadecimal(line)
		if !ok {
			return unsupported
		}
		if len(after) < n+2 {
			return incomplete
		}
		if after[n] != '\r' || after[n+1] != '\n' {
			return unsupported // or a trailer
		}
		h.content += n
		rest = after[n+2:]
		if n == 0 {
			h.body = len(b) - len(rest)
			return complete
		}
	}
}

// hexadecimal parses the size of a chunk, below 2²⁴.
func hexadecimal(text []byte) (n int, ok bool) {
	if len(text) == 0 || len(text) > 6 {
		return 0, false
	}
	for _, c := range text {
		i := bytes.IndexByte([]byte("0123456789abcdef"), c|0x20)
		if i < 0 || c < '0' {
			return 0, false
		}
		n = n<<4 | i
	}
	return n, true
}
