package acme

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"time"

	"golang.org/x/crypto/acme"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// Challenge types.
const (
	byDNS  = "dns-01"
	byTLS  = "tls-alpn-01"
	byHTTP = "http-01"
)

const (
	requestTime = time.Minute      // for one request to the authority
	cleanTime   = 30 * time.Second // for removing a record
	mostNonces  = 5                // attempts after badNonce
)

// order obtains a certificate, in PEM with its key. TLS and HTTP challenges alternate with the
// failures, because only one of both ports may lead here.
func (m *Manager) order(ctx context.Context, w certSpec, failures int) ([]byte, error) {
	key, err := m.accountKey()
	if err != nil {
		return nil, err
	}
	client, done := m.client(key)
	defer done()
	if err := m.register(ctx, client); err != nil {
		return nil, err
	}
	way := byDNS
	if m.cfg.DNS == nil {
		way = []string{byTLS, byHTTP}[failures%2]
	}
	o, err := client.AuthorizeOrder(ctx, acme.DomainIDs(w.names...))
	if err != nil {
		return nil, fmt.Errorf("order a certificate: %w", err)
	}
	for _, u := range o.AuthzURLs {
		if err := m.solveChallenge(ctx, client, u, way); err != nil {
			return nil, err
		}
	}
	if o, err = client.WaitOrder(ctx, o.URI); err != nil {
		return nil, fmt.Errorf("await the order: %w", err)
	}
	if key, err = newKey(); err != nil {
		return nil, err
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{DNSNames: w.names}, key)
	if err != nil {
		return nil, fmt.Errorf("make the request for a certificate: %w", err)
	}
	chain, _, err := client.CreateCertFromOrder(ctx, o, csr, true)
	if err != nil {
		return nil, fmt.Errorf("have the certificate issued: %w", err)
	}
	return encodeCert(key, chain)
}

// client returns a client of the authority, valid until done is called.
func (m *Manager) client(key crypto.Signer) (client *acme.Client, done func()) {
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: &tls.Config{RootCAs: m.cfg.Roots, MinVersion: tls.VersionTLS12},
		DialContext: (&net.Dialer{Timeout: requestTime}).DialContext, ForceAttemptHTTP2: true,
	}
	return &acme.Client{
		Key: key, DirectoryURL: m.cfg.Directory, UserAgent: "barchan", HTTPClient: &http.Client{Transport: transport, Timeout: requestTime},
		// Other failures are retried by Run, which counts them.
		RetryBackoff: func(n int, _ *http.Request, res *http.Response) time.Duration {
			if res.StatusCode == http.StatusBadRequest && n < mostNonces {
				return time.Duration(n+1) * 10 * time.Millisecond
			}
			return -1
		},
	}, transport.CloseIdleConnections
}

// register creates the account, or finds the one of the key.
func (m *Manager) register(ctx context.Context, client *acme.Client) error {
	account := &acme.Account{}
	if m.cfg.Email != "" {
		account.Contact = []string{"mailto:" + m.cfg.Email}
	}
	if _, err := client.Register(ctx, account, acme.AcceptTOS); err != nil && !errors.Is(err, acme.ErrAccountAlreadyExists) {
		return fmt.Errorf("account at %s: %w", m.cfg.Directory, err)
	}
	return nil
}

// solveChallenge proves control of a name to the authority.
func (m *Manager) solveChallenge(ctx context.Context, client *acme.Client, authorization, way string) error {
	a, err := client.GetAuthorization(ctx, authorization)
	if err != nil {
		return fmt.Errorf("read what is to be proven: %w", err)
	}
	if a.Status == acme.StatusValid { // from an earlier order
		return nil
	}
	name := a.Identifier.Value
	i := slices.IndexFunc(a.Challenges, func(c *acme.Challenge) bool { return c.Type == way })
	if i < 0 {
		return fmt.Errorf("%s: the authority does not take a proof by %s: %w", name, way, errs.ErrInvalid)
	}
	challenge := a.Challenges[i]
	withdraw, err := m.present(ctx, client, name, challenge)
	if err != nil {
		return fmt.Errorf("%s: prepare the proof by %s: %w", name, way, err)
	}
	defer withdraw()
	if _, err := client.Accept(ctx, challenge); err != nil {
		return fmt.Errorf("%s: have the proof by %s looked at: %w", name, way, err)
	}
	if _, err := client.WaitAuthorization(ctx, a.URI); err != nil {
		return fmt.Errorf("%s: proof by %s: %w", name, way, err)
	}
	return nil
}

// present publishes a challenge response, until withdraw is called.
func (m *Manager) present(ctx context.Context, client *acme.Client, name string, c *acme.Challenge) (withdraw func(), err error) {
	switch c.Type {
	case byDNS:
		return m.presentRecord(ctx, client, name, c)
	case byTLS:
		cert, err := client.TLSALPN01ChallengeCert(c.Token, name)
		if err != nil {
			return nil, err
		}
		return m.show(name, challengeResponse{cert: &cert}), nil
	default:
		answer, err := client.HTTP01ChallengeResponse(c.Token)
		if err != nil {
			return nil, err
		}
		return m.show(name+client.HTTP01ChallengePath(c.Token), challengeResponse{answer: answer}), nil
	}
}

// show publishes a response over TLS or HTTP until it is withdrawn.
func (m *Manager) show(key string, p challengeResponse) (withdraw func()) {
	m.mu.Lock()
	m.proofs[key] = p
	m.mu.Unlock()
	return func() {
		m.mu.Lock()
		delete(m.proofs, key)
		m.mu.Unlock()
	}
}

func (m *Manager) presentRecord(ctx context.Context, client *acme.Client, name string, c *acme.Challenge) (withdraw func(), err error) {
	value, err := client.DNS01ChallengeRecord(c.Token)
	if err != nil {
		return nil, err
	}
	record := "_acme-challenge." + name
	withdraw = func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTime)
		defer cancel()
		if err := m.cfg.DNS.Remove(undo, record, value); err != nil {
			m.log.WarnContext(undo, "a DNS record of a proof is left behind", telemetry.Name, record, telemetry.Error, err)
		}
	}
	if err := m.cfg.DNS.Add(ctx, record, value); err != nil {
		withdraw() // it may exist all the same
		return nil, err
	}
	return withdraw, nil
}
