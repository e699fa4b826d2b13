package resolver

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/barchan-dev/barchan/internal/node/egress"
)

// pinAll makes every address reachable.
type pinAll struct{}

func (pinAll) EgressOf(netip.Addr) egress.Policy { return egress.Policy{} }

func (pinAll) Pin(_ context.Context, _ netip.Addr, _ string, addrs []netip.Addr, _ time.Duration) ([]netip.Addr, error) {
	return addrs, nil
}

// A response of another server has only records of the question's name when it is pinned, and fits a datagram.
func FuzzResponse(f *testing.F) {
	q := new(dns.Msg).SetQuestion("www.test.", dns.TypeA)
	a := new(dns.Msg).SetReply(q)
	for _, line := range []string{"www.test. 60 IN CNAME a.test.", "a.test. 60 IN CNAME www.test.", "a.test. 60 IN A 192.0.2.1", "other.test. 60 IN A 192.0.2.2"} {
		rr, err := dns.NewRR(line)
		if err != nil {
			f.Fatal(err)
		}
		a.Answer = append(a.Answer, rr)
	}
	wire, err := a.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(wire)
	r := &Resolver{cfg: Config{Sandboxes: pinAll{}}}
	f.Fuzz(func(t *testing.T, wire []byte) {
		a := new(dns.Msg)
		if a.Unpack(wire) != nil {
			return
		}
		out := reply(q, a)
		own := chain("www.test.", out.Answer)
		if err := r.pin(t.Context(), netip.Addr{}, out); err != nil {
			t.Fatal(err)
		}
		for _, rr := range out.Answer {
			if !own[key(rr.Header().Name)] || rr.Header().Ttl > uint32(maxPin/time.Second) {
				t.Errorf("answered %s", rr)
			}
		}
		out.Compress = true
		out.Truncate(dns.MinMsgSize)
		if b, err := out.Pack(); err == nil && len(b) > dns.MinMsgSize && len(out.Answer)+len(out.Ns)+len(out.Extra) > 0 {
			t.Errorf("%d bytes of %d records", len(b), len(out.Answer))
		}
	})
}

// BenchmarkChain has as many aliases as a response holds, in the worst order.
func BenchmarkChain(b *testing.B) {
	var records []dns.RR
	for i := range 4600 {
		records = append(records, &dns.CNAME{Hdr: dns.RR_Header{Name: fmt.Sprint(4600-i-1, ".")}, Target: fmt.Sprint(4600-i, ".")})
	}
	for b.Loop() {
		if own := chain("0.", records); len(own) != len(records)+1 {
			b.Fatal(len(own))
		}
	}
}
