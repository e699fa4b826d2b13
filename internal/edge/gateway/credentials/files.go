package credentials

import (
	"errors"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/reply"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Agent makes the agent's checks of a request to it at u, because the agent of a paused sandbox cannot.
// Nil: allowed.
func Agent(r *http.Request, u *url.URL, token string) *reply.Reply {
	if got := r.Header.Get(envd.HeaderAccessToken); got != "" {
		if sandbox.EqualToken(got, token) {
			return nil
		}
		return reply.NoWake
	}
	switch err := verify(r, u, token); {
	case errors.Is(err, envd.ErrSignatureExpired):
		return &reply.Reply{Status: http.StatusUnauthorized, Message: err.Error()}
	case err != nil:
		return reply.NoWake
	}
	return nil
}

const (
	// signatureLength is the length of a signature: its version, and a SHA-256 in base 64.
	signatureLength = len("v1_") + 43
	// maxSignedQuery bounds the query of a signed file URL, in bytes: a path has up to 4 KiB, before it is escaped. It has four
	// parameters; a map of thousands would cost more than all else.
	maxSignedQuery, maxSignedParameters = 16 << 10, 16
)

// SignedFile finds the sandbox of a signed file URL that does not name it: with one base URL for all
// sandboxes, E2B's SDKs make URLs without a sandbox ID. The signature is made with one sandbox's token
// and fits no other, so all secure sandboxes are tried, a microsecond each, whatever the URL has. Text that cannot be a
// signature is not tried. The error is envd.ErrSignatureInvalid or envd.ErrSignatureExpired.
func SignedFile(r *http.Request, all iter.Seq[route.Route], tokens Tokens) (sandbox.ID, error) {
	if query := r.URL.RawQuery; len(query) > maxSignedQuery || strings.Count(query, "&") >= maxSignedParameters || len(r.URL.Query().Get(envd.QuerySignature)) != signatureLength {
		return "", envd.ErrSignatureInvalid
	}
	signature, err := signatureOf(r, r.URL)
	if err != nil {
		return "", err
	}
	now := time.Now()
	for e := range all {
		if !e.Access.Secure {
			continue
		}
		switch err := signature.Verify(tokens.Agent(e.ID), now); {
		case err == nil:
			return e.ID, nil
		case errors.Is(err, envd.ErrSignatureExpired):
			return "", err
		}
	}
	return "", envd.ErrSignatureInvalid
}

// verify checks a file request's signature. The error is one of envd's.
func verify(r *http.Request, u *url.URL, token string) error {
	s, err := signatureOf(r, u)
	if err != nil {
		return err
	}
	return s.Verify(token, time.Now())
}

// signatureOf reads the signature of a file request. The error is one of envd's.
func signatureOf(r *http.Request, u *url.URL) (*envd.Signature, error) {
	op := envd.OpRead
	switch r.Method {
	case http.MethodPost:
		op = envd.OpWrite
	case http.MethodGet, http.MethodHead:
	default:
		return nil, envd.ErrSignatureInvalid
	}
	q := u.Query()
	if u.Path != envd.PathFiles {
		return nil, envd.ErrSignatureInvalid
	}
	text := q.Get(envd.QuerySignature)
	if text == "" {
		return nil, envd.ErrSignatureMissing
	}
	var expiry *time.Time
	if end := q.Get(envd.QueryExpiration); end != "" {
		seconds, err := strconv.ParseInt(end, 10, 64)
		if err != nil {
			return nil, envd.ErrSignatureInvalid
		}
		at := time.Unix(seconds, 0)
		expiry = &at
	}
	return envd.NewSignature(text, q.Get(envd.QueryPath), op, q.Get(envd.QueryUsername), expiry), nil
}
