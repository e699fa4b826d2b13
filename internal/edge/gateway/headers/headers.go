// Package headers has the rules for HTTP headers that both paths of the gateway follow. It parses
// nothing.
package headers

import "github.com/barchan-dev/barchan/internal/guest/envd"

// Headers of agent-sandbox's router, and a cookie of ours.
const (
	Name      = "X-Sandbox-Id"
	Namespace = "X-Sandbox-Namespace"
	Port      = "X-Sandbox-Port"
	// PodIP is never read: a client does not choose an address.
	PodIP = "X-Sandbox-Pod-Ip"
	// CookieAccess carries the signature of later requests: <expires>.<signature>. The sandbox does not
	// get it.
	CookieAccess = "barchan_access"
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
