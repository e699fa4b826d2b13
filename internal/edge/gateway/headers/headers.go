// Package headers has the rules for HTTP headers that both paths of the gateway follow. It reads
// no messages.
package headers

import (
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Headers of agent-sandbox's router, and cookies of ours.
const (
	Name      = "X-Sandbox-Id"
	Namespace = "X-Sandbox-Namespace"
	Port      = "X-Sandbox-Port"
	// PodIP is never read: a client does not choose an address.
	PodIP = "X-Sandbox-Pod-Ip"
	// CookieAccess carries the signature of later requests: <expires>.<signature>. The sandbox does not
	// get it.
	CookieAccess = "barchan_access"
	// CookieUI is the session of the dashboard, which has the API's host. No sandbox gets it.
	CookieUI = "barchan_ui"
	// MaxAuthorityLength bounds a request's Host.
	MaxAuthorityLength = 1024
)

// IsHop reports whether a header is for one hop only. The name is canonical.
func IsHop(name string) bool {
	switch name {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Http2-Settings":
		return true
	default:
		return false
	}
}

// IsGateways reports whether a request header is the gateway's to set or to keep.
func IsGateways(name string) bool {
	switch name {
	case "Host", "Content-Length", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto",
		"X-Forwarded-Port", "X-Forwarded-Prefix", "X-Real-Ip", PodIP, envd.HeaderTrafficToken:
		return true
	default:
		return false
	}
}

// MayTrail reports whether a field may be a trailer. Fields for framing, routing and authentication
// may not: they took effect when the head was read.
func MayTrail(name string) bool {
	return !IsHop(name) && !IsGateways(name) && httpguts.ValidTrailerHeader(name)
}

// Listed returns the headers that Connection declares hop-by-hop.
func Listed(h http.Header) []string {
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

// UpgradeOf returns the protocol of the client's upgrade request that the sandbox may accept. HTTP/2
// is excluded: the gateway would not see the requests within it. The agent supports none.
func UpgradeOf(r *http.Request, port uint16) string {
	if r.ProtoMajor != 1 || port == envd.Port || !httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade") {
		return ""
	}
	upgrade := r.Header.Get("Upgrade")
	if strings.HasPrefix(strings.ToLower(strings.TrimSpace(upgrade)), "h2") || strings.Contains(upgrade, ",") {
		return ""
	}
	return upgrade
}

// CopyResponse moves the end-to-end  from must not be used afterwards.
func CopyResponse(to, from http.Header) {
	drop := Listed(from)
	for name, values := range from {
		if IsHop(name) || (drop != nil && slices.Contains(drop, name)) {
			continue
		}
		if had, ok := to[name]; ok {
			values = append(slices.Clip(had), values...)
		}
		to[name] = values
	}
}
