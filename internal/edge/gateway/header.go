package gateway

import (
	"net"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// mayTrail reports whether a field may come after a body. What frames a message or says where it
// goes or who sent it may not: it was decided upon when the head was read.
func mayTrail(name string) bool {
	return !headers.IsHop(name) && !headers.IsGateways(name) && httpguts.ValidTrailerHeader(name)
}

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
		if headers.IsHop(name) || headers.IsGateways(name) || (drop != nil && slices.Contains(drop, name)) || slices.Contains(x.keyed, name) {
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

// copyResponseHeader takes over what is not for one hop. from must not be used any more.
func copyResponseHeader(to, from http.Header) {
	drop := listed(from)
	for name, values := range from {
		if headers.IsHop(name) || (drop != nil && slices.Contains(drop, name)) {
			continue
		}
		if had, ok := to[name]; ok {
			values = append(slices.Clip(had), values...)
		}
		to[name] = values
	}
}

func portText(port uint16) string { return strconv.Itoa(int(port)) }
