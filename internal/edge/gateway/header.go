package gateway

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// isHop reports whether a header is for one hop alone. The name is canonical.
func isHop(name string) bool {
	switch name {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Http2-Settings":
		return true
	default:
		return false
	}
}

// isOurs reports whether a request header is the gateway's to set or to keep.
func isOurs(name string) bool {
	switch name {
	case "Host", "Content-Length", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto",
		"X-Forwarded-Port", "X-Forwarded-Prefix", "X-Real-Ip", headerPodIP, envd.HeaderTrafficToken:
		return true
	default:
		return false
	}
}

// mayTrail reports whether a field may come after a body. What frames a message or says where it
// goes or who sent it may not: it was decided upon when the head was read.
func mayTrail(name string) bool {
	return !isHop(name) && !isOurs(name) && httpguts.ValidTrailerHeader(name)
}

// trailersOf are the fields that may follow a request's body. Its end must have been read.
func trailersOf(r *http.Request) http.Header {
	out := http.Header{}
	for name, values := range r.Trailer {
		if mayTrail(name) {
			out[name] = values
		}
	}
	return out
}

const headerPodIP = "X-Sandbox-Pod-Ip"

// listed are the headers that Connection declares to be for one hop.
func listed(h http.Header) []string {
	var names []string
	for _, line := range h["Connection"] {
		for token := range strings.SplitSeq(line, ",") {
			switch name := textproto.CanonicalMIMEHeaderKey(textproto.TrimString(token)); name {
			case "", "Close", "Keep-Alive", "Upgrade":
			default:
				names = append(names, name)
			}
		}
	}
	return names
}

// passed yields the client's headers that go on to the sandbox.
func (x *exchange) passed(yield func(name string, values []string)) {
	drop := listed(x.r.Header)
	for name, values := range x.r.Header {
		if isHop(name) || isOurs(name) || (drop != nil && slices.Contains(drop, name)) || slices.Contains(x.keyed, name) {
			continue
		}
		if x.cookies != nil && name == "Cookie" {
			values = x.cookies
		}
		if x.traced != nil && (name == "Traceparent" || name == "Tracestate") {
			continue // ours come instead
		}
		yield(name, values)
	}
}

// forwarded yields what the gateway tells about the client.
func (x *exchange) forwarded(yield func(name, value string)) {
	for name := range x.traced {
		if name != "Baggage" { // which passed as the client's own
			yield(name, x.traced.Get(name))
		}
	}
	ip, _, err := net.SplitHostPort(x.r.RemoteAddr)
	if err == nil {
		yield("X-Forwarded-For", ip)
	}
	yield("X-Forwarded-Host", x.r.Host)
	proto := "http"
	if x.r.TLS != nil {
		proto = "https"
	}
	yield("X-Forwarded-Proto", proto)
	if x.prefix != "" {
		yield("X-Forwarded-Prefix", x.prefix)
	}
}

// upgradeOf is the protocol that the client asks for and the sandbox may grant. HTTP/2 by
// upgrade is not: within it, requests would pass unseen. The agent has none at all.
func upgradeOf(r *http.Request, port uint16) string {
	if r.ProtoMajor != 1 || port == envd.Port || !httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade") {
		return ""
	}
	upgrade := r.Header.Get("Upgrade")
	if strings.HasPrefix(strings.ToLower(strings.TrimSpace(upgrade)), "h2") || strings.Contains(upgrade, ",") {
		return ""
	}
	return upgrade
}

// writeHead sends the request line and headers.
func (x *exchange) writeHead(w *bufio.Writer) error {
	line := func(parts ...string) {
		for _, p := range parts {
			_, _ = w.WriteString(p) // Flush has the error
		}
		_, _ = w.WriteString("\r\n")
	}
	line(x.r.Method, " ", x.uri, " HTTP/1.1")
	line("Host: ", x.host)
	x.passed(func(name string, values []string) {
		for _, v := range values {
			line(name, ": ", v)
		}
	})
	x.forwarded(func(name, value string) { line(name, ": ", value) })
	if upgrade := upgradeOf(x.r, x.port); upgrade != "" {
		line("Connection: Upgrade")
		line("Upgrade: ", upgrade)
	}
	if httpguts.HeaderValuesContainsToken(x.r.Header["Te"], "trailers") {
		line("Te: trailers")
	}
	switch length := x.r.ContentLength; {
	case length > 0:
		line("Content-Length: ", strconv.FormatInt(length, 10))
	case length < 0:
		line("Transfer-Encoding: chunked")
		for name := range x.r.Trailer {
			if mayTrail(name) {
				line("Trailer: ", name)
			}
		}
	case x.r.Method != http.MethodGet && x.r.Method != http.MethodHead && x.r.Method != http.MethodOptions:
		line("Content-Length: 0")
	}
	line()
	if err := w.Flush(); err != nil {
		return fmt.Errorf("write request head: %w", err)
	}
	return nil
}

// copyResponseHeader takes over what is not for one hop. from must not be used any more.
func copyResponseHeader(to, from http.Header) {
	drop := listed(from)
	for name, values := range from {
		if isHop(name) || (drop != nil && slices.Contains(drop, name)) {
			continue
		}
		if had, ok := to[name]; ok {
			values = append(slices.Clip(had), values...)
		}
		to[name] = values
	}
}

func portText(port uint16) string { return strconv.Itoa(int(port)) }
