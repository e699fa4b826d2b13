// Package identity verifies which sandbox is at an address, before a client sends there what no other sandbox may get: on
// a Kubernetes cluster the address of a deleted Pod may belong to another Pod at once. The protocol is that of
// envd.PathIdentity.
//
// The package dials nothing and has no state.
package identity

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// timeout bounds a verification.
	timeout = 2 * time.Second
	// maxResponse bounds a response with its head, in bytes.
	maxResponse = 4 << 10
)

// ErrUnproved means that the agent did not prove that it is the sandbox's.
var ErrUnproved = errors.New("the agent at this address did not prove that it is the sandbox's")

// Verifier verifies agents. It is safe for concurrent use.
type Verifier struct{ tokens *sandbox.Tokens }

// NewVerifier returns a verifier of the agents that have these tokens.
func NewVerifier(tokens *sandbox.Tokens) *Verifier { return &Verifier{tokens} }

// Verify returns nil if the other end of an HTTP/1.1 connection is the agent of a sandbox and knows its token; else an
// ErrUnproved. It takes at most two seconds and reads at most 4 KiB. The connection then carries requests as before;
// after an error it must be closed.
func (v *Verifier) Verify(ctx context.Context, agent net.Conn, id sandbox.ID) error {
	return v.verify(ctx, agent, id, func(p envd.IdentityProof) string { return p.Proof })
}

// VerifyHash is Verify for an agent that may know only the hash of its token. Anyone who may read the sandbox's Pod knows
// that hash too.
func (v *Verifier) VerifyHash(ctx context.Context, agent net.Conn, id sandbox.ID) error {
	return v.verify(ctx, agent, id, func(p envd.IdentityProof) string { return p.HashProof })
}

func (v *Verifier) verify(ctx context.Context, agent net.Conn, id sandbox.ID, field func(envd.IdentityProof) string) error {
	addr, err := envd.AddrOf(agent.RemoteAddr())
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnproved, err)
	}
	nonce := rand.Text()
	got, err := ask(ctx, agent, nonce)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnproved, err)
	}
	want := envd.ProveIdentity(v.tokens.Agent(id), "", nonce, string(id), addr)
	if !hmac.Equal([]byte(field(got)), []byte(field(want))) {
		return ErrUnproved
	}
	return nil
}

// ask sends a nonce and returns the response.
func ask(ctx context.Context, agent net.Conn, nonce string) (p envd.IdentityProof, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	if err := agent.SetDeadline(time.Time{}); err != nil {
		return p, err
	}
	stop := context.AfterFunc(ctx, func() { _ = agent.SetDeadline(time.Unix(1, 0)) })
	p, err = exchange(ctx, agent, nonce)
	if !stop() {
		err = context.Cause(ctx)
	}
	return p, err
}

func exchange(ctx context.Context, agent net.Conn, nonce string) (p envd.IdentityProof, err error) {
	u := url.URL{Scheme: "http", Host: agent.RemoteAddr().String(), Path: envd.PathIdentity, RawQuery: envd.QueryNonce + "=" + nonce}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return p, err
	}
	if err := req.Write(agent); err != nil {
		return p, err
	}
	br := bufio.NewReader(io.LimitReader(agent, maxResponse))
	res, err := http.ReadResponse(br, req)
	if err != nil {
		return p, err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	switch {
	case err != nil:
		return p, err
	case res.StatusCode != http.StatusOK:
		return p, fmt.Errorf("the agent answered %d", res.StatusCode)
	case res.Close || br.Buffered() > 0:
		return p, errors.New("the response does not end where the next one can begin")
	}
	return p, json.Unmarshal(body, &p)
}
