package resolver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/miekg/dns"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// forward queries the operator's servers and returns the response as one to q. It begins with the
// last server that responded, and tries the others until one has a good response.
func (r *Resolver) forward(ctx context.Context, q *dns.Msg) (*dns.Msg, error) {
	ask := new(dns.Msg).SetQuestion(q.Question[0].Name, q.Question[0].Qtype)
	ask.CheckingDisabled, ask.RecursionDesired = q.CheckingDisabled, true
	opt := q.IsEdns0()
	ask.SetEdns0(messageSize, opt != nil && opt.Do())
	var failures []error
	var poor *dns.Msg
	first := int(r.good.Load())
	for i := range r.cfg.Upstreams {
		at := (first + i) % len(r.cfg.Upstreams)
		began := time.Now()
		a, err := r.exchange(ctx, ask, r.cfg.Upstreams[at])
		if err != nil {
			failures = append(failures, err)
			continue
		}
		r.duration.Observe(time.Since(began).Seconds())
		if a.Rcode != dns.RcodeSuccess && a.Rcode != dns.RcodeNameError {
			poor = a // another may have a better one
			continue
		}
		r.good.Store(int32(at)) //nolint:gosec // a handful
		return reply(q, a), nil
	}
	if poor != nil {
		return reply(q, poor), nil
	}
	return nil, fmt.Errorf("resolve %s: %w: %w", q.Question[0].Name, errors.Join(failures...), errs.ErrUnavailable)
}

// forwardPublic is forward without what sandboxes may not learn; nothing else is an errs.ErrForbidden.
func (r *Resolver) forwardPublic(ctx context.Context, q *dns.Msg) (*dns.Msg, error) {
	if r.cfg.Internal.refuses(q.Question[0]) {
		return nil, fmt.Errorf("resolve %s: an internal name: %w", q.Question[0].Name, errs.ErrForbidden)
	}
	a, err := r.forward(ctx, q)
	if err == nil && !r.cfg.Internal.conceal(a) {
		return nil, fmt.Errorf("resolve %s: private addresses only: %w", q.Question[0].Name, errs.ErrForbidden)
	}
	return a, err
}

// exchange queries one server, over TCP if the response is too large for UDP.
func (r *Resolver) exchange(ctx context.Context, ask *dns.Msg, server netip.AddrPort) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.upstreamTime)
	defer cancel()
	for _, network := range []string{"udp", "tcp"} {
		client := dns.Client{Net: network, UDPSize: messageSize, Timeout: r.cfg.upstreamTime}
		ask.Id = dns.Id()
		a, _, err := client.ExchangeContext(ctx, ask, server.String())
		if err != nil {
			return nil, fmt.Errorf("%s over %s: %w", server, network, err)
		}
		if !a.Response || len(a.Question) != 1 || key(a.Question[0].Name) != key(ask.Question[0].Name) || a.Question[0].Qtype != ask.Question[0].Qtype {
			return nil, fmt.Errorf("%s over %s: response to another question", server, network)
		}
		if !a.Truncated || network == "tcp" {
			return a, nil
		}
	}
	return nil, fmt.Errorf("%s: no response", server)
}

// reply turns another server's response into one to q.
func reply(q, a *dns.Msg) *dns.Msg {
	out := new(dns.Msg).SetRcode(q, a.Rcode&0xf)
	out.RecursionAvailable, out.AuthenticatedData, out.Truncated = true, a.AuthenticatedData, a.Truncated
	out.Answer, out.Ns = a.Answer, a.Ns
	for _, rr := range a.Extra {
		if rr.Header().Rrtype != dns.TypeOPT { // OPT is hop-by-hop
			out.Extra = append(out.Extra, rr)
		}
	}
	return out
}

// Lookup resolves the addresses of a name, as for a sandbox. None is an errs.ErrNotFound, an internal name an
// errs.ErrForbidden.
func (r *Resolver) Lookup(ctx context.Context, name string) (addrs []netip.Addr, err error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.questionTime)
	defer cancel()
	for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA} {
		a, err := r.forwardPublic(ctx, new(dns.Msg).SetQuestion(dns.Fqdn(name), kind))
		if err != nil {
			return nil, err
		}
		own := chain(name, a.Answer)
		for _, rr := range a.Answer {
			if at, ok := addressIn(rr); ok && own[key(rr.Header().Name)] {
				addrs = append(addrs, at)
			}
		}
	}
	if len(addrs) == 0 {
		return nil, fmt.Errorf("name %s has no addresses: %w", name, errs.ErrNotFound)
	}
	return addrs, nil
}
