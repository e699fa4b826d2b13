package resolver

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/egress"
)

func (r *Resolver) handle(ctx context.Context, w dns.ResponseWriter, q *dns.Msg) {
	client := addressOf(w.RemoteAddr())
	ours := slices.ContainsFunc(r.cfg.Clients, func(p netip.Prefix) bool { return p.Contains(client) })
	if !ours || !r.admit(client) {
		r.results.WithLabelValues(dropped).Inc()
		return // other hosts get no response; clients over their limit retry
	}
	defer r.done(client)
	ctx, cancel := context.WithTimeout(ctx, r.cfg.questionTime)
	defer cancel()
	a, result := r.answer(ctx, client, q)
	r.results.WithLabelValues(result).Inc()
	size := dns.MaxMsgSize
	if w.LocalAddr().Network() == "udp" {
		size = dns.MinMsgSize
	}
	if opt := q.IsEdns0(); opt != nil {
		size = max(size, min(int(opt.UDPSize()), messageSize))
		if a.IsEdns0() == nil {
			a.SetEdns0(messageSize, opt.Do())
		}
	}
	a.Compress = true
	a.Truncate(size)
	_ = w.WriteMsg(a) // the client may have closed
}

// answer returns the response to a message and its result for the metric.
func (r *Resolver) answer(ctx context.Context, client netip.Addr, q *dns.Msg) (*dns.Msg, string) {
	switch {
	case q.Opcode != dns.OpcodeQuery, len(q.Question) == 1 && q.Question[0].Qtype == dns.TypeANY:
		return new(dns.Msg).SetRcode(q, dns.RcodeNotImplemented), refused
	case len(q.Question) != 1:
		return new(dns.Msg).SetRcode(q, dns.RcodeFormatError), refused
	}
	question := q.Question[0]
	if question.Qclass != dns.ClassINET || question.Qtype == dns.TypeAXFR || question.Qtype == dns.TypeIXFR {
		return new(dns.Msg).SetRcode(q, dns.RcodeRefused), refused
	}
	policy := r.cfg.Sandboxes.EgressOf(client)
	if policy.UsesResolver() {
		return r.answerAllowed(ctx, client, q, policy)
	}
	a, err := r.forwardPublic(ctx, q)
	if errors.Is(err, errs.ErrForbidden) {
		return prohibited(q), blocked
	}
	if err != nil {
		r.log.DebugContext(ctx, "cannot answer DNS question", "name", question.Name, telemetry.Error, err)
		return new(dns.Msg).SetRcode(q, dns.RcodeServerFailure), failed
	}
	return a, answered
}

// answerAllowed answers a sandbox that may resolve some names only.
func (r *Resolver) answerAllowed(ctx context.Context, client netip.Addr, q *dns.Msg, policy egress.Policy) (*dns.Msg, string) {
	question := q.Question[0]
	if _, ok := policy.Match(question.Name); !ok {
		return prohibited(q), blocked
	}
	if question.Qtype == dns.TypeHTTPS || question.Qtype == dns.TypeSVCB { // their hints cannot be pinned in time
		return new(dns.Msg).SetReply(q), answered
	}
	a, err := r.forwardPublic(ctx, q)
	if err == nil {
		err = r.pin(ctx, client, a)
	}
	switch {
	case errors.Is(err, errs.ErrForbidden): // an internal name, or the policy has changed
		return prohibited(q), blocked
	case err != nil:
		r.log.WarnContext(ctx, "cannot answer sandbox's DNS question", telemetry.Address, client, "name", question.Name, telemetry.Error, err)
		return new(dns.Msg).SetRcode(q, dns.RcodeServerFailure), failed
	}
	return a, answered
}

// prohibited responds that the name does not exist: the refusal that every client accepts at once.
// The reason is included for clients that request it.
func prohibited(q *dns.Msg) *dns.Msg {
	a := new(dns.Msg).SetRcode(q, dns.RcodeNameError)
	a.RecursionAvailable = true
	if opt := q.IsEdns0(); opt != nil {
		a.SetEdns0(messageSize, opt.Do())
		own := a.IsEdns0()
		own.Option = append(own.Option, &dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeProhibited, ExtraText: "not a name that this sandbox may look up"})
	}
	return a
}

// pin makes the addresses of a response reachable, and removes unreachable ones and unrelated
// records.
func (r *Resolver) pin(ctx context.Context, client netip.Addr, a *dns.Msg) error {
	name := a.Question[0].Name
	own := chain(name, a.Answer)
	a.Answer = slices.DeleteFunc(a.Answer, func(rr dns.RR) bool { return !own[key(rr.Header().Name)] })
	a.Ns = slices.DeleteFunc(a.Ns, func(rr dns.RR) bool { return rr.Header().Rrtype != dns.TypeSOA })
	a.Extra = slices.DeleteFunc(a.Extra, func(rr dns.RR) bool { return rr.Header().Rrtype != dns.TypeOPT })
	var addrs []netip.Addr
	keep := minPin
	for _, rr := range a.Answer {
		h := rr.Header()
		h.Ttl = min(h.Ttl, uint32(maxPin/time.Second))
		if at, ok := addressIn(rr); ok {
			addrs = append(addrs, at)
			keep = max(keep, time.Duration(h.Ttl)*time.Second)
		}
	}
	if len(addrs) == 0 {
		return nil
	}
	pinned, err := r.cfg.Sandboxes.Pin(ctx, client, name, addrs, keep)
	if err != nil {
		return err
	}
	a.Answer = slices.DeleteFunc(a.Answer, func(rr dns.RR) bool {
		at, ok := addressIn(rr)
		return ok && !slices.Contains(pinned, at)
	})
	return nil
}

// chain are the names that a response leads to from the question's.
func chain(name string, records []dns.RR) map[string]bool {
	aliases := map[string][]string{}
	for _, rr := range records { // in any order
		if alias, ok := rr.(*dns.CNAME); ok {
			from := key(alias.Hdr.Name)
			aliases[from] = append(aliases[from], key(alias.Target))
		}
	}
	own := map[string]bool{}
	for next := []string{key(name)}; len(next) > 0; {
		at := next[len(next)-1]
		next = next[:len(next)-1]
		if !own[at] {
			own[at] = true
			next = append(next, aliases[at]...)
		}
	}
	return own
}

func key(name string) string { return strings.ToLower(dns.Fqdn(name)) }

func addressIn(rr dns.RR) (netip.Addr, bool) {
	var ip net.IP
	switch rr := rr.(type) {
	case *dns.A:
		ip = rr.A
	case *dns.AAAA:
		ip = rr.AAAA
	}
	a, ok := netip.AddrFromSlice(ip)
	return a.Unmap(), ok
}
