package gateway

import (
	"net"
	"slices"

	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// passed yields the client's headers that are forwarded to the sandbox.
func (x *exchange) passed(yield func(name string, values []string)) {
	drop := headers.Listed(x.r.Header)
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
	if x.byKey && x.Port == envd.Port && x.r.Header.Get(envd.HeaderAccessToken) == "" { // agent-sandbox's clients have no token
		yield(envd.HeaderAccessToken, x.g.cfg.Tokens.Agent(x.ID))
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
