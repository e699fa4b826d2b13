package egress

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

var hostRules = HostRules{
	Sandboxes: []netip.Prefix{netip.MustParsePrefix("10.87.0.0/16"), netip.MustParsePrefix("fd01::/64")},
	Gateways:  []netip.Addr{netip.MustParseAddr("10.87.0.1"), netip.MustParseAddr("fd01::1")},
	Machine:   []netip.Addr{netip.MustParseAddr("198.41.0.4"), netip.MustParseAddr("192.168.1.53")},
	Resolvers: []netip.Addr{netip.MustParseAddr("9.9.9.9"), netip.MustParseAddr("192.168.1.53")},
	Reachable: []netip.Prefix{netip.MustParsePrefix("10.20.0.0/16")},
}

func policy(t *testing.T, allow, deny string, internet bool) Policy {
	t.Helper()
	p, err := Compile(&agents.EgressPolicy{Internet: &internet, AllowOut: strings.Fields(allow), DenyOut: strings.Fields(deny)})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestDecide(t *testing.T) {
	pins := []Pin{{Address: netip.MustParseAddr("5.5.5.5"), Names: []string{"www.example.com"}, Until: time.Date(2030, 1, 1, 12, 30, 0, 0, time.UTC)}}
	for _, tt := range []struct {
		name, allow, deny string
		closed            bool
		to                string
		port              uint16
		protocol          string
		want              Verdict
		rule              string
	}{
		{name: "no policy", to: "8.8.8.8", want: Allowed, rule: "public addresses are open"},
		{name: "private", to: "10.1.2.3", want: Refused, rule: "private ranges are closed (10.0.0.0/8)"},
		{name: "metadata", to: "169.254.169.254", want: Refused, rule: "metadata"},
		{name: "private, mapped", to: "::ffff:10.1.2.3", want: Refused, rule: "10.0.0.0/8"},
		{name: "private and allowed by the user", allow: "10.1.2.3", to: "10.1.2.3", want: Refused, rule: "private ranges"},
		{name: "private and allowed by the operator", to: "10.20.1.1", want: Allowed, rule: "setting reachable"},
		{name: "the operator's range, denied by the user", deny: "10.20.0.0/16", to: "10.20.1.1", want: Refused, rule: "denyOut[0]"},
		{name: "neighbour", allow: "10.87.0.9", to: "10.87.0.9", want: Refused, rule: "other sandboxes"},
		{name: "gateway", allow: "10.87.0.1", to: "10.87.0.1", want: Refused, rule: "the machine itself"},
		{name: "the machine's public address", allow: "198.41.0.4", to: "198.41.0.4", want: Refused, rule: "the machine itself"},
		{name: "DNS on the machine", to: "192.168.1.53", port: 53, want: Allowed, rule: "dnsResolvers"},
		{name: "another port of it", to: "192.168.1.53", port: 80, want: Refused, rule: "the machine itself"},
		{name: "IPv6", to: "2606::1", want: Allowed, rule: "public"},
		{name: "IPv6 private", to: "fd00::1", want: Refused, rule: "fc00::/7"},
		{name: "IPv4 in IPv6", to: "2002:0a00:0001::1", want: Refused, rule: "2002::/16"},
		{name: "NAT64", to: "64:ff9b::a00:1", want: Refused, rule: "::/3"},

		{name: "denied", deny: "8.0.0.0/8", to: "8.8.8.8", want: Refused, rule: "denyOut[0] 8.0.0.0/8"},
		{name: "allowed before denied", allow: "1.1.1.1 8.8.8.8", deny: "8.0.0.0/8", to: "8.8.8.8", want: Allowed, rule: "allowOut[1] 8.8.8.8"},
		{name: "all denied", deny: "8.0.0.0/8 0.0.0.0/0", to: "1.1.1.1", want: Refused, rule: "denyOut[1] 0.0.0.0/0"},
		{name: "all denied, IPv6 too", deny: "0.0.0.0/0", to: "2606::1", want: Refused, rule: "denyOut[0] 0.0.0.0/0"},
		{name: "only IPv6 denied", deny: "::/0", to: "8.8.8.8", want: Allowed, rule: "public"},
		{name: "no internet", closed: true, to: "8.8.8.8", want: Refused, rule: "internet: false"},
		{name: "no internet but all", closed: true, allow: "0.0.0.0/0", to: "2606::1", want: Allowed, rule: "allowOut[0] 0.0.0.0/0"},
		{name: "no internet, its own range", closed: true, to: "10.20.1.1", want: Refused, rule: "internet: false"},
		{name: "pinned", closed: true, allow: "*.example.com", to: "5.5.5.5", want: Allowed, rule: "allowOut[0] *.example.com, whose www.example.com is pinned to 5.5.5.5 until 12:30:00 UTC"},
		{name: "pinned for another name", closed: true, allow: "example.org", to: "5.5.5.5", want: Refused, rule: "internet: false"},

		{name: "DNS", to: "9.9.9.9", port: 53, want: Allowed, rule: "dnsResolvers"},
		{name: "DNS elsewhere", to: "8.8.8.8", port: 53, want: Refused, rule: "resolvers only"},
		{name: "QUIC elsewhere", to: "8.8.8.8", port: 53, protocol: "sctp", want: Allowed, rule: "public"},
		{name: "DNS at the gateway", to: "10.87.0.1", port: 53, want: Resolver, rule: "answers there"},
		{name: "DNS without internet", closed: true, allow: "8.8.8.8", to: "8.8.8.8", port: 53, want: Resolver, rule: "internet: false"},
		{name: "DNS with a name", deny: "1.0.0.0/8 0.0.0.0/0", allow: "x.com", to: "10.1.1.1", port: 53, want: Resolver, rule: "denyOut[1] 0.0.0.0/0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := policy(t, tt.allow, tt.deny, !tt.closed)
			k := Packet{Address: netip.MustParseAddr(tt.to), Port: tt.port, Protocol: "udp"}
			if k.Port == 0 {
				k.Port = 443
			}
			if tt.protocol != "" {
				k.Protocol = tt.protocol
			}
			d := Decide(hostRules, p, pins, k)
			if d.Verdict != tt.want || !strings.Contains(d.Rule, tt.rule) {
				t.Errorf("Decide = %s by %q, want %s by %q", d.Verdict, d.Rule, tt.want, tt.rule)
			}
		})
	}
	noIPv6 := HostRules{Sandboxes: hostRules.Sandboxes[:1]}
	if d := Decide(noIPv6, Policy{}, nil, Packet{Address: netip.MustParseAddr("2606::1"), Port: 443, Protocol: "tcp"}); d.Verdict != Refused || !strings.Contains(d.Rule, "subnet6") {
		t.Errorf("IPv6 without a range: %+v", d)
	}
}

func TestMatch(t *testing.T) {
	p := policy(t, "example.com *.example.org 8.8.8.8", "", false)
	for name, want := range map[string]string{
		"example.com": "allowOut[0] example.com", "Example.COM.": "allowOut[0] example.com", "www.example.com": "", "notexample.com": "", "example.com.evil.net": "",
		"a.example.org": "allowOut[1] *.example.org", "a.b.example.org.": "allowOut[1] *.example.org", "example.org": "", ".example.org": "", "xexample.org": "", "": "",
	} {
		if n, ok := p.Match(name); n.From != want || ok != (want != "") {
			t.Errorf("Match(%q) = %q, %t; want %q", name, n.From, ok, want)
		}
	}
	for name, want := range map[string]Verdict{"example.com": Allowed, "other.com": Refused} {
		if d := DecideName(p, nil, name); d.Verdict != want {
			t.Errorf("DecideName(%q) = %+v", name, d)
		}
	}
	if d := DecideName(policy(t, "", "8.8.8.8", true), nil, "other.com"); d.Verdict != Allowed {
		t.Errorf("any name: %+v", d)
	}
}

func TestPolicyNeeds(t *testing.T) {
	for _, tt := range []struct {
		name                      string
		p                         Policy
		restricts, resolver, pins bool
	}{
		{"nothing", Policy{}, false, false, false},
		{"an allowed range", policy(t, "8.8.8.8", "", true), false, false, false},
		{"a denied range", policy(t, "", "8.8.8.8", true), true, false, false},
		{"closed", policy(t, "", "", false), true, true, false},
		{"closed but a name", policy(t, "example.com", "0.0.0.0/0", true), true, true, true},
		{"closed but all", policy(t, "example.com 0.0.0.0/0", "0.0.0.0/0", true), false, false, false},
	} {
		if tt.p.Restricts() != tt.restricts || tt.p.UsesResolver() != tt.resolver || tt.p.Pins() != tt.pins {
			t.Errorf("%s: restricts %t, resolver %t, pins %t", tt.name, tt.p.Restricts(), tt.p.UsesResolver(), tt.p.Pins())
		}
	}
}

func TestCompileRefuses(t *testing.T) {
	if _, err := Compile(&agents.EgressPolicy{DenyOut: []string{"1.1.1.1", "example.com"}}); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "denyOut[1]") {
		t.Errorf("Compile = %v", err)
	}
}

func TestSurvives(t *testing.T) {
	a, b := netip.MustParseAddr("5.5.5.5"), netip.MustParseAddr("8.8.8.8")
	names, fewer := policy(t, "x.com y.com 8.8.8.8", "", false), policy(t, "x.com", "", false)
	for _, tt := range []struct {
		name     string
		now, was Policy
		a        netip.Addr
		pinned   bool
		want     bool
	}{
		{"pinned", fewer, Policy{}, a, true, true},
		{"allowed", names, Policy{}, b, false, true},
		{"open before", names, Policy{}, a, false, false},
		{"its pin ended", policy(t, "x.com y.com 8.8.8.8 9.9.9.9", "", false), names, a, false, true},
		{"a name was removed", fewer, names, a, false, false},
		{"a range was removed", policy(t, "x.com y.com", "", false), names, b, false, false},
		{"no names in the old policy", fewer, policy(t, "", "", false), a, false, false},
		{"now open", policy(t, "x.com", "8.8.8.8", true), names, a, false, true},
		{"now denied", policy(t, "x.com", "5.0.0.0/8", true), policy(t, "", "", true), a, false, false},
	} {
		if got := tt.now.Survives(tt.was, tt.a, tt.pinned); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}
