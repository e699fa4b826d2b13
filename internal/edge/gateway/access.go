package gateway

import (
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// mayWake checks what the agent would check, for it cannot while it sleeps. Nil: it may.
func (x *exchange) mayWake(e *route.Entry) *localReply {
	if x.port != envd.Port || !e.Access.Secure {
		return nil
	}
	token := x.g.cfg.Tokens.Agent(x.id)
	if got := x.r.Header.Get(envd.HeaderAccessToken); got != "" {
		if sandbox.EqualToken(got, token) {
			return nil
		}
		return noWake
	}
	switch err := verify(x.r, x.url, token); {
	case errors.Is(err, envd.ErrSignatureExpired):
		return &localReply{status: http.StatusUnauthorized, message: err.Error()}
	case err != nil:
		return noWake
	}
	return nil
}

// asksWhetherItRuns reports whether a request only wants to know that, of the agent. E2B's SDKs ask so when
// a stream broke, which it does when its sandbox falls asleep; the answer must not be to wake it.
func (x *exchange) asksWhetherItRuns() bool {
	return x.port == envd.Port && x.url.Path == envd.PathHealth
}

// signatureLength is that of a signature: its version, and a SHA-256 in base 64.
const signatureLength = len("v1_") + 43

// bySignature finds the sandbox that a signed file URL is for where nothing else says so: with
// one base URL for all sandboxes, E2B's SDKs make URLs without a sandbox ID. The signature is
// made with the token of one sandbox and fits no other, so it is looked for: some microseconds
// for each secure sandbox. Anything that cannot be a signature is not looked for. The error is
// envd.ErrSignatureInvalid or envd.ErrSignatureExpired.
func (g *Gateway) bySignature(r *http.Request) (target, error) {
	if len(r.URL.Query().Get(envd.QuerySignature)) != signatureLength {
		return target{}, envd.ErrSignatureInvalid
	}
	for e := range g.cfg.Routes.All() {
		if !e.Access.Secure {
			continue
		}
		switch err := verify(r, r.URL, g.cfg.Tokens.Agent(e.ID)); {
		case err == nil:
			return target{id: e.ID, port: envd.Port}, nil
		case errors.Is(err, envd.ErrSignatureExpired):
			return target{}, err
		}
	}
	return target{}, envd.ErrSignatureInvalid
}

// verify checks that the request is for a file by a valid signature. The error is one of envd's.
func verify(r *http.Request, u *url.URL, token string) error {
	op := envd.OpRead
	switch r.Method {
	case http.MethodPost:
		op = envd.OpWrite
	case http.MethodGet, http.MethodHead:
	default:
		return envd.ErrSignatureInvalid
	}
	if u.Path != envd.PathFiles {
		return envd.ErrSignatureInvalid
	}
	q := u.Query()
	var expiry *time.Time
	if text := q.Get(envd.QueryExpiration); text != "" {
		seconds, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return envd.ErrSignatureInvalid
		}
		at := time.Unix(seconds, 0)
		expiry = &at
	}
	return envd.Verify(q.Get(envd.QuerySignature), q.Get(envd.QueryPath), op, q.Get(envd.QueryUsername), token, expiry, time.Now())
}
