package gateway

import (
	"net"
	"net/http"
	"net/netip"
	"strings"

	"golang.org/x/time/rate"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/ratelimit"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	headerKey           = "X-Api-Key"
	headerAuthorization = "Authorization"

	// Failed attempts from one address: the burst, and then the rate per second.
	failureBurst = 20
	failureRate  = 1
)

// resolve finds the sandbox of agent-sandbox's headers. An ID suffices, as in a host. A name can be
// guessed: it requires an API key of its namespace, or a token of the sandbox. Without one the
// response does not depend on whether the name exists.
func (x *exchange) resolve() *reply.Reply {
	owner := x.takeKeys()
	id, err := sandbox.ParseID(x.Name)
	isID := err == nil && string(id) == x.Name
	if isID {
		if _, ok := x.g.cfg.Routes.Lookup(id); ok {
			x.ID = id
			return nil
		}
	}
	if x.g.cfg.Names == nil || (isID && !owner) {
		return x.g.unknown()
	}
	id, found := x.g.cfg.Names(x.r.Context(), x.Namespace, x.Name)
	if !owner && !x.hasTokenOf(id) {
		return x.g.unauthenticated(x.r)
	}
	if !found {
		return x.g.unknown()
	}
	x.ID = id
	return nil
}

// takeKeys removes all API keys from the forwarded request. It reports whether one is of the namespace
// that the request names. Unknown keys may be the service's, and are forwarded.
func (x *exchange) takeKeys() (owner bool) {
	authorization := bearerOf(x.r)
	if _, password, ok := x.r.BasicAuth(); ok { // for clients that can only set a URL
		authorization = password
	}
	for name, key := range map[string]string{headerKey: x.r.Header.Get(headerKey), headerAuthorization: authorization} {
		if key == "" || x.g.cfg.KeyNamespace == nil {
			continue
		}
		if namespace, ok := x.g.cfg.KeyNamespace(x.r.Context(), key); ok {
			x.keyed = append(x.keyed, name)
			owner = owner || namespace == x.Namespace
		}
	}
	return owner
}

// hasTokenOf reports whether the request carries a token of the sandbox. The tokens of the empty ID
// were given to no client.
func (x *exchange) hasTokenOf(id sandbox.ID) bool {
	traffic := sandbox.EqualToken(x.r.Header.Get(envd.HeaderTrafficToken), x.g.cfg.Tokens.Traffic(id))
	agent := sandbox.EqualToken(x.r.Header.Get(envd.HeaderAccessToken), x.g.cfg.Tokens.Agent(id))
	return traffic || agent
}

// unauthenticated counts a failed attempt of a client's address. Valid keys are not limited, because
// the address may be shared.
func (g *Gateway) unauthenticated(r *http.Request) *reply.Reply {
	l := g.failures.Get(clientPrefix(r), func() *rate.Limiter { return rate.NewLimiter(failureRate, failureBurst) })
	if after := ratelimit.Wait(l); after > 0 {
		return reply.TooMany("without a valid key from this address", after)
	}
	return reply.NoKey
}

// clientPrefix returns the client's address, or for IPv6 its network.
func clientPrefix(r *http.Request) netip.Prefix {
	host, _, _ := net.SplitHostPort(r.RemoteAddr)
	addr, _ := netip.ParseAddr(host) // the zero value counts as a client, too
	addr = addr.Unmap().WithZone("")
	bits := addr.BitLen()
	if addr.Is6() {
		bits = 64
	}
	prefix, _ := addr.Prefix(bits)
	return prefix
}

// apiKeyOf returns the key of a request to the API, or empty.
func apiKeyOf(r *http.Request) string {
	if key := r.Header.Get(headerKey); key != "" {
		return key
	}
	return bearerOf(r)
}

// bearerOf returns the token of an Authorization header of that scheme, or empty.
func bearerOf(r *http.Request) string {
	scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(key)
}
