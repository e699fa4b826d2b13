package gateway

import (
	"net"
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// mayTrail reports whether a field may be a trailer. Fields for framing, routing and authentication
// may not: they took effect when the head was read.
func mayTrail(name string) bool {
	return !headers.IsHop(name) && !headers.IsGateways(name) && httpguts.ValidTrailerHeader(name)
}

// listed returns the headers that Connection declares hop-by-hop.
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

// passed yields the client's headers that are forwarded to the sandbox.
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
			continue // the gateway sets its own
		}
		yield(name, values)
	}
}

// forwarded yields the gateway's headers about the client.
func (x *exchange) forwarded(yield func(name, value string)) {
	for name := range x.traced {
		if name != "Baggage" { // which was forwarded as the client's own
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
	if x.Prefix != "" {
		yield("X-Forwarded-Prefix", x.Prefix)
	}
}

// upgradeOf returns the protocol of the client's upgrade request that the sandbox may accept. HTTP/2
// is excluded: the gateway would not see the requests within it. The agent supports none.
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

// copyResponseHeader moves the end-to-end headers. from must not be used afterwards.
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
