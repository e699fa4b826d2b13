package request

import (
	"context"
	"net/http"
	"strings"

	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
)

// Caller identifies a request's client, its key and the domain by which it reaches sandboxes.
type Caller struct {
	apikeys.Identity
	Secret, Domain string
	// Origin is the scheme and the host by which the client reaches this API.
	Origin string
	// Made has the IDs of sandboxes that the request made, for the audit log.
	Made *[]string
	// ReadOnly: it gets no access token of a sandbox, with which it could change the sandbox.
	ReadOnly bool
}

type callerKey struct{}

// WithCaller returns a context for the handlers of a caller's request.
func WithCaller(ctx context.Context, who Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, who)
}

// CallerOf returns the caller of an authenticated request.
func CallerOf(ctx context.Context) Caller {
	who, _ := ctx.Value(callerKey{}).(Caller)
	return who
}

// Made records that a request made a sandbox.
func Made(ctx context.Context, id string) {
	if who := CallerOf(ctx); who.Made != nil {
		*who.Made = append(*who.Made, id)
	}
}

// Origin returns the scheme and the host by which a client reaches this API, maybe through a proxy.
func Origin(r *http.Request) string {
	first := func(header string) string {
		text, _, _ := strings.Cut(r.Header.Get(header), ",")
		return strings.TrimSpace(text)
	}
	scheme, host := "http", r.Host
	if r.TLS != nil || strings.EqualFold(first("X-Forwarded-Proto"), "https") {
		scheme = "https"
	}
	if forwarded := first("X-Forwarded-Host"); forwarded != "" {
		host = forwarded
	}
	return scheme + "://" + host
}
