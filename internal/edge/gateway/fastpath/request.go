package fastpath

import (
	"bytes"
	"net/http"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// verdict is the result of parsing a head.
type verdict int

const (
	complete    verdict = iota
	incomplete          // simple so far, and more must come
	unsupported         // not for the fast path; it may be legal, or may not
)

// requestHead is the head of a simple request, as slices of the bytes that it was read from.
type requestHead struct {
	method, uri, host               []byte
	sandboxID, sandboxPort, traffic []byte
	browser                         bool // it has an Origin
	// lines are forwarded unchanged, each with its end.
	lines  [][]byte
	length int // of the body
	size   int // of the head itself
}

// parse reads a head from the beginning of b, and makes header names there canonical. It takes only
// the simplest requests: anything else, valid by RFC 9112 or not, is unsupported.
func (h *requestHead) parse(b []byte) verdict {
	*h = requestHead{lines: h.lines[:0], length: -1}
	line, rest, v := cutLine(b)
	if v != complete {
		return v
	}
	if !h.requestLine(line) {
		return unsupported
	}
	if rest, v = cutFields(rest, h.field); v != complete {
		return v
	}
	if h.browser && h.sandboxID != nil { // the response is confined
		return unsupported
	}
	h.size = len(b) - len(rest)
	h.length = max(h.length, 0)
	if len(h.host) > headers.MaxAuthorityLength || !httpguts.ValidHostHeader(string(h.host)) {
		return unsupported
	}
	return complete
}

// field handles a header, whose name is canonical, and reports false if it makes the request
// unsupported. line is all of it. Headers named by isHop and isOurs are not forwarded.
func (h *requestHead) field(name, value, line []byte) bool {
	switch string(name) {
	case "Host":
		return once(&h.host, value)
	case envd.HeaderTrafficToken:
		return once(&h.traffic, value)
	case "Content-Length":
		n, ok := decimal(value)
		ok = ok && h.length < 0
		h.length = n
		return ok
	case "Connection":
		return foldedEqual(value, "keep-alive")
	case "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Forwarded", "X-Forwarded-For",
		"X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Port", "X-Forwarded-Prefix", "X-Real-Ip", headers.PodIP:
		return true
	case "Transfer-Encoding", "Expect", "Te", "Trailer", "Upgrade", "Http2-Settings", headers.Name, headers.Namespace, headers.Port:
		return false // the fast path does not implement it
	case "Cookie":
		if ours(value) {
			return false
		}
	case "Origin":
		h.browser = true
	case envd.HeaderSandboxID:
		if !once(&h.sandboxID, value) {
			return false
		}
	case envd.HeaderSandboxPort:
		if !once(&h.sandboxPort, value) {
			return false
		}
	}
	h.lines = append(h.lines, line)
	return true
}

// ours reports whether cookies have one of the gateway's own, which sandboxes do not get.
func ours(cookies []byte) bool {
	return bytes.Contains(cookies, []byte(headers.CookieAccess)) || bytes.Contains(cookies, []byte(headers.CookieUI))
}

// once stores the value of a header that occurs once and is not empty.
func once(to *[]byte, value []byte) bool {
	if *to != nil || len(value) == 0 {
		return false
	}
	*to = value
	return true
}

func (h *requestHead) requestLine(line []byte) bool {
	var version []byte
	var ok bool
	if h.method, line, ok = bytes.Cut(line, []byte(" ")); !ok {
		return false
	}
	if h.uri, version, ok = bytes.Cut(line, []byte(" ")); !ok || string(version) != "HTTP/1.1" {
		return false
	}
	switch string(h.method) {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return plainURI(h.uri)
	default:
		return false
	}
}

// path returns the URI without the query.
func (h *requestHead) path() []byte {
	path, _, _ := bytes.Cut(h.uri, []byte("?"))
	return path
}

// plainURI reports whether a path and query are unambiguous as they stand.
func plainURI(uri []byte) bool {
	if len(uri) == 0 || uri[0] != '/' || (len(uri) > 1 && uri[1] == '/') {
		return false
	}
	for i, c := range uri {
		switch {
		case c == '?':
			return plainQuery(uri[i+1:])
		case c >= 0x80 || !pathByte[c]:
			return false
		}
	}
	return true
}

func plainQuery(query []byte) bool {
	for _, c := range query {
		if c <= ' ' || c >= 0x7f || c == '#' {
			return false
		}
	}
	return !bytes.Contains(query, []byte(signedurl.QuerySignature))
}

// pathByte has the bytes that stand for themselves in a path. Escapes are excluded: one can be written
// in two ways.
var pathByte = bytesOf("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~!$&'()*+,;=:@/")

// nameByte has the bytes of a header's name (RFC 9110, token).
var nameByte = bytesOf("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+-.^_`|~")

func bytesOf(all string) (set [0x80]bool) {
	for _, c := range []byte(all) {
		set[c] = true
	}
	return set
}

// cutLine cuts a line that ends with CR LF off b.
func cutLine(b []byte) (line, rest []byte, v verdict) {
	i := bytes.IndexByte(b, '\n')
	switch {
	case i < 0:
		return nil, b, incomplete
	case i == 0 || b[i-1] != '\r':
		return nil, b, unsupported
	}
	return b[:i-1], b[i+1:], complete
}

// cutFields cuts header lines off b, and the empty line after them. It calls field for each, whose
// line includes its end; if that returns false, the head is unsupported.
func cutFields(b []byte, field func(name, value, line []byte) bool) (rest []byte, v verdict) {
	for rest = b; ; {
		raw := rest
		var line []byte
		if line, rest, v = cutLine(rest); v != complete || len(line) == 0 {
			return rest, v
		}
		if name, value, ok := cutField(line); !ok || !field(name, value, raw[:len(line)+2]) {
			return rest, unsupported
		}
	}
}

// cutField splits a header line of the form "Name: value", where the value neither begins nor ends
// with a space. The name is made canonical in place.
func cutField(line []byte) (name, value []byte, ok bool) {
	name, value, ok = bytes.Cut(line, []byte(": "))
	if !ok || !canonical(name) {
		return nil, nil, false
	}
	if n := len(value); n > 0 && (value[0] == ' ' || value[n-1] == ' ') {
		return nil, nil, false
	}
	for _, c := range value {
		if c < ' ' || c == 0x7f {
			return nil, nil, false
		}
	}
	return name, value, true
}

// canonical makes a header's name canonical in place, and reports false if it is invalid.
func canonical(name []byte) bool {
	upper := true
	for i, c := range name {
		switch {
		case c >= 0x80 || !nameByte[c]:
			return false
		case upper && 'a' <= c && c <= 'z':
			name[i] = c - 'a' + 'A'
		case !upper && 'A' <= c && c <= 'Z':
			name[i] = c - 'A' + 'a'
		}
		upper = c == '-'
	}
	return len(name) > 0
}

// decimal parses an unambiguous length below 10⁹.
func decimal(text []byte) (n int, ok bool) {
	if len(text) == 0 || len(text) > 9 || (text[0] == '0' && len(text) > 1) {
		return 0, false
	}
	for _, c := range text {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int(c-'0')
	}
	return n, true
}

// foldedEqual compares, ignoring case, with a text in lower case.
func foldedEqual(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// userAgent returns the header of that name, or empty.
func (h *requestHead) userAgent() string {
	const name = "User-Agent: "
	for _, line := range h.lines {
		if rest, ok := bytes.CutPrefix(line, []byte(name)); ok {
			return string(rest[:len(rest)-2])
		}
	}
	return ""
}
