package resolver

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/miekg/dns"
)

// Sandboxes learn no names of private addresses, unless the address is reachable or the operator lists the zone.
func TestInternalNames(t *testing.T) {
	up := startUpstream(t, map[string][]string{
		"example.com. A":               {"example.com. 60 IN A 8.8.8.8"},
		"git.example.com. A":           {"git.example.com. 60 IN A 10.1.2.3"},
		"six.example.com. AAAA":        {"six.example.com. 60 IN AAAA fd00::1"},
		"nat64.example.com. AAAA":      {"nat64.example.com. 60 IN AAAA 64:ff9b::10.1.2.3"},
		"wiki.example.com. A":          {"wiki.example.com. 60 IN CNAME wiki.dc1.corp.", "wiki.dc1.corp. 60 IN A 192.168.7.7"},
		"wiki.example.com. AAAA":       {"wiki.example.com. 60 IN CNAME wiki.dc1.corp."},
		"mixed.example.com. A":         {"mixed.example.com. 60 IN A 8.8.4.4", "mixed.example.com. 60 IN A 172.16.0.9"},
		"open.example.com. A":          {"open.example.com. 60 IN A 10.9.0.1"},
		"db.corp.example.org. A":       {"db.corp.example.org. 60 IN A 10.1.2.4"},
		"db.corp.example.org. TXT":     {`db.corp.example.org. 60 IN TXT "x"`},
		"3.2.1.10.in-addr.arpa. PTR":   {"3.2.1.10.in-addr.arpa. 60 IN PTR git.example.com."},
		"1.0.9.10.in-addr.arpa. PTR":   {"1.0.9.10.in-addr.arpa. 60 IN PTR open.example.com."},
		"8.8.8.8.in-addr.arpa. PTR":    {"8.8.8.8.in-addr.arpa. 60 IN PTR dns.google."},
		"_ldap._tcp.dc1.corp. SRV":     {"_ldap._tcp.dc1.corp. 60 IN SRV 0 0 389 ldap.dc1.corp."},
		"_ldap._tcp.example.com. SRV":  {"_ldap._tcp.example.com. 60 IN SRV 0 0 389 ldap.dc1.corp."},
		"example.com. MX":              {"example.com. 60 IN MX 1 mail.example.com."},
		"svc.example.com. HTTPS":       {"svc.example.com. 60 IN HTTPS 1 . ipv4hint=10.1.2.3"},
		"loop.example.com. A":          {"loop.example.com. 60 IN A 127.0.0.1"},
		"metadata.google.internal. A":  {"metadata.google.internal. 60 IN A 169.254.169.254"},
		"carrier.example.com. A":       {"carrier.example.com. 60 IN A 100.64.1.1"},
		"10.in-addr.arpa. NS":          {"10.in-addr.arpa. 60 IN NS dc1.corp."},
		"x.corp.example.org.evil. A":   {"x.corp.example.org.evil. 60 IN A 10.1.2.4"},
		"notcorp.example.org. A":       {"notcorp.example.org. 60 IN A 10.1.2.4"},
		"8.b.d.0.1.0.0.2.ip6.arpa. NS": {"8.b.d.0.1.0.0.2.ip6.arpa. 60 IN NS ns.example.com."},
		"0.0.d.f.ip6.arpa. NS":         {"0.0.d.f.ip6.arpa. 60 IN NS ns.example.com."},
	})
	internal := Internal{Reachable: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/16")}, Zones: []string{"corp.example.org"}}
	at := start(t, &fakeSandboxes{}, func(c *Config) { c.Internal = internal }, up.addr)
	for _, c := range []struct {
		name string
		kind uint16
		want []string // nil: the name does not exist
	}{
		{"example.com.", dns.TypeA, []string{"60 IN A 8.8.8.8"}},
		{"git.example.com.", dns.TypeA, nil},
		{"GIT.example.com.", dns.TypeA, nil},
		{"six.example.com.", dns.TypeAAAA, nil},
		{"nat64.example.com.", dns.TypeAAAA, nil},
		{"wiki.example.com.", dns.TypeA, nil},
		{"wiki.example.com.", dns.TypeAAAA, []string{}},
		{"mixed.example.com.", dns.TypeA, []string{"60 IN A 8.8.4.4"}},
		{"open.example.com.", dns.TypeA, []string{"60 IN A 10.9.0.1"}},
		{"db.corp.example.org.", dns.TypeA, []string{"60 IN A 10.1.2.4"}},
		{"db.corp.example.org.", dns.TypeTXT, []string{`60 IN TXT "x"`}},
		{"3.2.1.10.in-addr.arpa.", dns.TypePTR, nil},
		{"1.0.9.10.in-addr.arpa.", dns.TypePTR, []string{"60 IN PTR open.example.com."}},
		{"8.8.8.8.in-addr.arpa.", dns.TypePTR, []string{"60 IN PTR dns.google."}},
		{"_ldap._tcp.dc1.corp.", dns.TypeSRV, nil},
		{"_ldap._tcp.example.com.", dns.TypeSRV, nil},
		{"example.com.", dns.TypeMX, []string{"60 IN MX 1 mail.example.com."}},
		{"svc.example.com.", dns.TypeHTTPS, nil},
		{"loop.example.com.", dns.TypeA, nil},
		{"metadata.google.internal.", dns.TypeA, nil},
		{"carrier.example.com.", dns.TypeA, nil},
		{"10.in-addr.arpa.", dns.TypeNS, nil},
		{"x.corp.example.org.evil.", dns.TypeA, nil},
		{"notcorp.example.org.", dns.TypeA, nil},
		{"8.b.d.0.1.0.0.2.ip6.arpa.", dns.TypeNS, []string{"60 IN NS ns.example.com."}},
		{"0.0.d.f.ip6.arpa.", dns.TypeNS, nil},
	} {
		a := ask(t, "udp", at, c.name, c.kind)
		got := texts(a)
		if (a.Rcode == dns.RcodeNameError) != (c.want == nil) || !slices.Equal(got, c.want) {
			t.Errorf("%s %s: %s %q, want %q", c.name, dns.TypeToString[c.kind], dns.RcodeToString[a.Rcode], got, c.want)
		}
		if c.want == nil && len(a.Ns)+len(a.Extra) > 1 { // OPT alone
			t.Errorf("%s %s tells more: %v", c.name, dns.TypeToString[c.kind], a)
		}
	}
}

// A name that the sandbox's own policy allows is the tenant's word, and opens nothing of the operator's.
func TestInternalNamesOfAPolicy(t *testing.T) {
	up := startUpstream(t, map[string][]string{
		"example.com. A":       {"example.com. 60 IN CNAME www.corp.", "www.corp. 60 IN A 10.1.2.3"},
		"srv.example.org. SRV": {"srv.example.org. 60 IN SRV 0 0 389 ldap.dc1.corp."},
	})
	at := start(t, &fakeSandboxes{policy: closed}, nil, up.addr)
	for name, kind := range map[string]uint16{"example.com.": dns.TypeA, "srv.example.org.": dns.TypeSRV} {
		if a := ask(t, "udp", at, name, kind); a.Rcode != dns.RcodeNameError || len(a.Answer) > 0 {
			t.Errorf("%s: %v", name, a)
		}
	}
}

// Sandboxes query public servers themselves; all else would tell them internal names.
func TestDirectServers(t *testing.T) {
	public, private := netip.MustParseAddr("9.9.9.9"), netip.MustParseAddr("10.0.0.2")
	servers := []netip.Addr{private, public, netip.MustParseAddr("fd00::53"), netip.MustParseAddr("::ffff:10.0.0.2"), netip.MustParseAddr("127.0.0.53")}
	if got := (Internal{Zones: []string{"corp"}}).Direct(servers); !slices.Equal(got, []netip.Addr{public}) {
		t.Errorf("got %v", got)
	}
	if got := (Internal{Zones: []string{"."}}).Direct(servers); len(got) != len(servers) {
		t.Errorf("with all names: got %v", got)
	}
}

func FuzzConceal(f *testing.F) {
	f.Add("3.2.1.10.in-addr.arpa.", dns.TypePTR, []byte{})
	f.Add("0-25.2.1.10.in-addr.arpa.", dns.TypePTR, []byte{})
	i := Internal{}
	f.Fuzz(func(t *testing.T, name string, kind uint16, wire []byte) {
		q := new(dns.Msg).SetQuestion(name, kind)
		i.refuses(q.Question[0])
		a := new(dns.Msg)
		if a.Unpack(wire) != nil {
			return
		}
		out := reply(q, a)
		if !i.conceal(out) {
			return
		}
		for _, rr := range slices.Concat(out.Answer, out.Ns, out.Extra) {
			if at, ok := addressIn(rr); ok && at.IsPrivate() {
				t.Errorf("answered %s", rr)
			}
		}
	})
}
