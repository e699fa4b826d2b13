package egress

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

func rules(t *testing.T, text string) *agents.NetworkPolicy {
	t.Helper()
	p := &agents.NetworkPolicy{}
	if err := yaml.UnmarshalStrict([]byte("egress: "+text), p); err != nil {
		t.Fatal(err)
	}
	return p
}

func bounded(t *testing.T, p Policy, text string) Policy {
	t.Helper()
	p, err := p.Within(rules(t, text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The upstream controller's default for templates without a policy.
const upstreamDefault = `[{to: [
  {ipBlock: {cidr: 0.0.0.0/0, except: [10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 169.254.0.0/16]}},
  {ipBlock: {cidr: "::/0", except: ["fc00::/7"]}}]}]`

const onlyDNS = `[{ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]}]`

// The cluster's DNS as in most manifests, and HTTPS.
const clusterDNS = `[
  {to: [{namespaceSelector: {}, podSelector: {matchLabels: {k8s-app: kube-dns}}}], ports: [{protocol: UDP, port: 53}]},
  {ports: [{port: 443}]}]`

func TestDecideWithinRules(t *testing.T) {
	closed := policy(t, "8.8.8.8", "", false)
	for _, tt := range []struct {
		name, rules string
		own         Policy
		to          string
		port        uint16
		protocol    string
		want        Verdict
		rule        string
	}{
		{name: "none", rules: `[]`, to: "8.8.8.8", want: Refused, rule: "networkPolicy.egress allows nothing else"},
		{name: "none, DNS", rules: `[]`, to: "9.9.9.9", port: 53, protocol: "udp", want: Resolver, rule: "opens no DNS"},
		{name: "one that is empty", rules: `[{}]`, to: "2606::1", want: Allowed, rule: "networkPolicy.egress[0] everywhere"},
		{name: "one that is empty, another protocol", rules: `[{}]`, to: "8.8.8.8", protocol: "icmp", want: Allowed, rule: "everywhere"},
		{name: "upstream's default", rules: upstreamDefault, to: "8.8.8.8", want: Allowed, rule: "networkPolicy.egress[0].to[0] 0.0.0.0/0"},
		{name: "upstream's default, IPv6", rules: upstreamDefault, to: "2606::1", want: Allowed, rule: "networkPolicy.egress[0].to[1] ::/0"},
		{name: "upstream's default, its exception", rules: upstreamDefault, to: "10.20.1.1", want: Refused, rule: "allows nothing else"},
		{name: "upstream's default, DNS", rules: upstreamDefault, to: "9.9.9.9", port: 53, protocol: "udp", want: Allowed, rule: "DNS is open by networkPolicy.egress[0]"},
		{name: "DNS alone", rules: onlyDNS, to: "9.9.9.9", port: 53, protocol: "udp", want: Allowed, rule: "DNS is open"},
		{name: "DNS alone, elsewhere", rules: onlyDNS, to: "8.8.8.8", port: 53, protocol: "udp", want: Refused, rule: "resolvers only"},
		{name: "DNS alone, the web", rules: onlyDNS, to: "8.8.8.8", want: Refused, rule: "allows nothing else"},
		{name: "the cluster's DNS", rules: clusterDNS, to: "9.9.9.9", port: 53, protocol: "tcp", want: Allowed, rule: "DNS is open by networkPolicy.egress[0]"},
		{name: "beside the cluster's DNS", rules: clusterDNS, to: "8.8.8.8", want: Allowed, rule: "networkPolicy.egress[1] everywhere, tcp 443"},
		{name: "Pods", rules: `[{to: [{podSelector: {}}]}]`, to: "8.8.8.8", want: Refused, rule: "allows nothing else"},
		{name: "Pods, DNS", rules: `[{to: [{podSelector: {}}]}]`, to: "9.9.9.9", port: 53, protocol: "udp", want: Resolver, rule: "opens no DNS"},
		{name: "a range with 53 somewhere", rules: `[{to: [{ipBlock: {cidr: 8.8.8.8/32}}], ports: [{port: 1, endPort: 99}]}]`, to: "9.9.9.9", port: 53, want: Resolver, rule: "opens no DNS"},
		{name: "a port", rules: `[{to: [{ipBlock: {cidr: 8.0.0.1/8}}], ports: [{port: 80}, {port: 443}]}]`, to: "8.8.8.8", want: Allowed, rule: "to[0] 8.0.0.1/8, tcp 443"},
		{name: "its protocol", rules: `[{ports: [{port: 443}]}]`, to: "8.8.8.8", protocol: "udp", want: Refused, rule: "allows nothing else"},
		{name: "the end of a range", rules: `[{ports: [{protocol: UDP, port: 400, endPort: 443}]}]`, to: "8.8.8.8", protocol: "udp", want: Allowed, rule: "udp 400-443"},
		{name: "after a range", rules: `[{ports: [{port: 400, endPort: 442}]}]`, to: "8.8.8.8", want: Refused, rule: "allows nothing else"},
		{name: "a protocol", rules: `[{ports: [{protocol: SCTP}]}]`, to: "8.8.8.8", protocol: "sctp", want: Allowed, rule: "everywhere, sctp"},
		{name: "what the operator closes", rules: `[{to: [{ipBlock: {cidr: 10.0.0.0/8}}]}]`, to: "10.1.2.3", want: Refused, rule: "private ranges"},
		{name: "what the operator opens", rules: `[{to: [{ipBlock: {cidr: 10.20.0.0/16}}]}]`, to: "10.20.1.1", want: Allowed, rule: "10.20.0.0/16"},

		{name: "both", rules: `[{ports: [{port: 443}]}]`, own: closed, to: "8.8.8.8", want: Allowed, rule: "allowOut[0] 8.8.8.8"},
		{name: "only the rules", rules: `[{ports: [{port: 443}]}]`, own: closed, to: "9.1.1.1", want: Refused, rule: "internet: false"},
		{name: "only its own", rules: `[{ports: [{port: 80}]}]`, own: closed, to: "8.8.8.8", want: Refused, rule: "networkPolicy.egress"},
		{name: "its own allows all", rules: `[{ports: [{port: 80}]}]`, own: policy(t, "0.0.0.0/0", "", false), to: "8.8.8.8", want: Refused, rule: "networkPolicy.egress"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			k := Packet{Address: netip.MustParseAddr(tt.to), Port: tt.port, Protocol: tt.protocol}
			if k.Port == 0 {
				k.Port = 443
			}
			if k.Protocol == "" {
				k.Protocol = "tcp"
			}
			if d := Decide(hostRules, bounded(t, tt.own, tt.rules), nil, k); d.Verdict != tt.want || !strings.Contains(d.Rule, tt.rule) {
				t.Errorf("Decide = %s by %q, want %s by %q", d.Verdict, d.Rule, tt.want, tt.rule)
			}
		})
	}
}

func TestNamesWithinRules(t *testing.T) {
	own := policy(t, "example.com", "", false)
	if p := bounded(t, own, onlyDNS); !p.Pins() || DecideName(p, nil, "example.com").Verdict != Allowed || DecideName(p, nil, "other.com").Verdict != Refused {
		t.Errorf("rules with DNS: %+v", p)
	}
	for _, from := range []Policy{own, {}} {
		p := bounded(t, from, `[{ports: [{port: 443}]}]`)
		if d := DecideName(p, nil, "example.com"); p.Pins() || !p.UsesResolver() || d.Verdict != Refused || !strings.Contains(d.Rule, "opens no DNS") {
			t.Errorf("rules without DNS: %+v, %+v", p, d)
		}
	}
	if p, err := own.Within(nil); err != nil || !p.Equal(own) || p.Bounds.On {
		t.Errorf("no rules: %+v, %v", p, err)
	}
	if own.Equal(bounded(t, own, onlyDNS)) || bounded(t, own, `[]`).Equal(bounded(t, own, `[{}]`)) {
		t.Error("policies with other rules are the same")
	}
}

func TestCheckRules(t *testing.T) {
	for text, want := range map[string]string{
		upstreamDefault: "", onlyDNS: "", clusterDNS: "", `[]`: "", `[{}]`: "",
		`[{to: [{}]}]`: "egress[0].to[0]",
		`[{to: [{podSelector: {}, ipBlock: {cidr: 1.0.0.0/8}}]}]`:                                       "egress[0].to[0]",
		`[{}, {to: [{podSelector: {}}, {ipBlock: {cidr: 1.1.1.1}}]}]`:                                   "egress[1].to[1].ipBlock.cidr",
		`[{to: [{ipBlock: {cidr: "::ffff:1.0.0.0/100"}}]}]`:                                             "egress[0].to[0].ipBlock.cidr",
		`[{to: [{ipBlock: {cidr: 1.0.0.0/8, except: [1.1.0.0/16, 2.0.0.0/16]}}]}]`:                      "egress[0].to[0].ipBlock.except[1]",
		`[{to: [{ipBlock: {cidr: 1.0.0.0/8, except: [1.0.0.0/8]}}]}]`:                                   "egress[0].to[0].ipBlock.except[0]",
		`[{to: [{ipBlock: {cidr: 0.0.0.0/0, except: ["fc00::/7"]}}]}]`:                                  "egress[0].to[0].ipBlock.except[0]",
		`[{ports: [{port: https}]}]`:                                                                    "egress[0].ports[0].port",
		`[{ports: [{port: 80}, {port: 0}]}]`:                                                            "egress[0].ports[1].port",
		`[{ports: [{port: 65536}]}]`:                                                                    "egress[0].ports[0].port",
		`[{ports: [{endPort: 80}]}]`:                                                                    "egress[0].ports[0].port",
		`[{ports: [{port: 80, endPort: 79}]}]`:                                                          "egress[0].ports[0].endPort",
		`[{ports: [{protocol: ICMP}]}]`:                                                                 "egress[0].ports[0].protocol",
		`[` + strings.Repeat(`{}, `, 1000) + `{}]`:                                                      "egress",
		`[{to: [{ipBlock: {cidr: 1.0.0.0/8, except: [` + strings.Repeat("1.1.1.1/32, ", 999) + `]}}]}]`: "egress",
	} {
		bad := CheckRules(rules(t, text).Egress, field.NewPath("egress"))
		if (want == "") != (len(bad) == 0) || (len(bad) > 0 && bad[0].Field != want) {
			t.Errorf("CheckRules(%.80s) = %v, want %q", text, bad, want)
		}
		_, err := Policy{}.Within(rules(t, text))
		if (want == "") != (err == nil) || (err != nil && (!errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "networkPolicy."+want))) {
			t.Errorf("Within(%.80s) = %v", text, err)
		}
	}
}
