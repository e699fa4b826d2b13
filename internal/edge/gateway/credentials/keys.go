// Package credentials checks what requests to sandboxes show: API keys, tokens, signed URLs of files and
// ports, and the cookie of the latter. It knows no routes, and no policy of a sandbox.
//
// It holds no locks.
package credentials

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/ratelimit"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// HeaderKey has an API key.
	HeaderKey           = "X-Api-Key"
	headerAuthorization = "Authorization"

	// Failed attempts from one address: the burst, and then the rate per second.
	failureBurst = 20
	failureRate  = 1
	// The same for signatures of no sandbox. Those of one sandbox that has ended are usual, so more are allowed.
	signatureBurst = 100
	signatureRate  = 20
)

// Tokens returns the secrets that requests must present; sandbox.Tokens implements it.
type Tokens interface {
	Agent(id sandbox.ID) string
	Traffic(id sandbox.ID) string
}

// KeyNamespace returns the namespace of an API key, and false for an unknown key.
type KeyNamespace func(ctx context.Context, key string) (namespace string, ok bool)

// Keys finds all API keys of a request. headers are those that hold one, which must not be forwarded;
// owner reports whether one is of the namespace. Unknown keys may be the service's, and are forwarded.
// of nil: there are no keys.
func Keys(r *http.Request, namespace string, of KeyNamespace) (headers []string, owner bool) {
	if of == nil {
		return nil, false
	}
	authorization := bearerOf(r)
	if _, password, ok := r.BasicAuth(); ok { // for clients that can only set a URL
		authorization = password
	}
	for name, key := range map[string]string{HeaderKey: r.Header.Get(HeaderKey), headerAuthorization: authorization} {
		if key == "" {
			continue
		}
		if ns, ok := of(r.Context(), key); ok {
			headers = append(headers, name)
			owner = owner || ns == namespace
		}
	}
	return headers, owner
}

// HasTokenOf reports whether a request carries a token of the sandbox. The tokens of the empty ID
// were given to no client.
func HasTokenOf(r *http.Request, tokens Tokens, id sandbox.ID) bool {
	traffic := sandbox.EqualToken(r.Header.Get(envd.HeaderTrafficToken), tokens.Traffic(id))
	agent := sandbox.EqualToken(r.Header.Get(envd.HeaderAccessToken), tokens.Agent(id))
	return traffic || agent
}

// Failures limits unauthenticated requests by client address. The zero value is ready.
type Failures struct {
	limiters, signatures ratelimit.Limiters[netip.Prefix]
}

// Signature runs an attempt to find the sandbox of a signature, which takes time for each sandbox, unless too many failed
// from the address.
func (f *Failures) Signature(r *http.Request, find func() (sandbox.ID, error)) (sandbox.ID, error) {
	l := f.signatures.Get(ClientPrefix(r.RemoteAddr), func() *rate.Limiter { return rate.NewLimiter(signatureRate, signatureBurst) })
	if l.Tokens() < 1 {
		return "", reply.TooMany("with an invalid signature from this address", time.Second)
	}
	id, err := find()
	if err != nil {
		ratelimit.Wait(l)
	}
	return id, err
}

// Count counts a failed attempt and returns the local reply to it. Valid keys are not counted, because
// the address may be shared.
func (f *Failures) Count(r *http.Request) *reply.Reply {
	if after := f.CountFrom(r.RemoteAddr); after > 0 {
		return reply.TooMany("without a valid key from this address", after)
	}
	return reply.NoKey
}

// CountFrom counts a failed attempt from an address, host and port. It returns 0, or how long to wait if there were too many.
func (f *Failures) CountFrom(remote string) time.Duration {
	return ratelimit.Wait(f.limiters.Get(ClientPrefix(remote), func() *rate.Limiter { return rate.NewLimiter(failureRate, failureBurst) }))
}

// ClientPrefix returns a client's address, given with a port, or for IPv6 its network.
func ClientPrefix(remote string) netip.Prefix {
	host, _, _ := net.SplitHostPort(remote)
	addr, _ := netip.ParseAddr(host) // the zero value counts as a client, too
	addr = addr.Unmap().WithZone("")
	bits := addr.BitLen()
	if addr.Is6() {
		bits = 64
	}
	prefix, _ := addr.Prefix(bits)
	return prefix
}

// APIKey returns the key of a request to the API, or empty.
func APIKey(r *http.Request) string {
	if key := r.Header.Get(HeaderKey); key != "" {
		return key
	}
	return bearerOf(r)
}

// bearerOf returns the token of an Authorization header of that scheme, or empty.
func bearerOf(r *http.Request) string {
	scheme, key, _ := strings.Cut(r.Header.Get(headerAuthorization), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(key)
}
