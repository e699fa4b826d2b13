package placement

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

func barchanOf(t *testing.T, text string) *agents.BarchanSpec {
	t.Helper()
	if text == "" {
		return nil
	}
	b := &agents.BarchanSpec{}
	if err := yaml.UnmarshalStrict([]byte(text), b); err != nil {
		t.Fatal(err)
	}
	return b
}

// allows reports whether rules allow TCP to an address, or to the Pods with a label if the address is empty.
func allows(rules []networkingv1.NetworkPolicyEgressRule, address string, port int32, label string) bool {
	return slices.ContainsFunc(rules, func(r networkingv1.NetworkPolicyEgressRule) bool {
		open := len(r.Ports) == 0 || slices.ContainsFunc(r.Ports, func(p networkingv1.NetworkPolicyPort) bool {
			return *p.Protocol == corev1.ProtocolTCP && (p.Port == nil || p.Port.IntVal == port)
		})
		return open && slices.ContainsFunc(r.To, func(to networkingv1.NetworkPolicyPeer) bool {
			if to.IPBlock == nil {
				return address == "" && to.PodSelector.MatchLabels["k8s-app"] == label
			}
			return address != "" && covers(to.IPBlock.CIDR, address) &&
				!slices.ContainsFunc(to.IPBlock.Except, func(e string) bool { return covers(e, address) })
		})
	})
}

// checkExcept has exceptions be as the API server requires them: within the CIDR, and not all of it.
func checkExcept(t *testing.T, b *networkingv1.IPBlock) {
	t.Helper()
	if b == nil {
		return
	}
	whole := netip.MustParsePrefix(b.CIDR)
	for _, text := range b.Except {
		if e := netip.MustParsePrefix(text); e.Bits() <= whole.Bits() || !whole.Contains(e.Addr()) {
			t.Errorf("%s is not within %s", e, whole)
		}
	}
}

func covers(cidr, address string) bool {
	return netip.MustParsePrefix(cidr).Contains(netip.MustParseAddr(address))
}

func TestEgress(t *testing.T) {
	t.Parallel()
	const dns = "kube-dns" // stands for the Pods of the cluster's DNS
	p := &Placer{cfg: Config{Reachable: []netip.Prefix{netip.MustParsePrefix("10.20.0.0/16")}}}
	for name, tt := range map[string]struct {
		barchan       string
		open, refused string // addresses, or addresses:port; kube-dns at port 53
	}{
		"default":                       {"", "8.8.8.8 2606::1 10.20.1.1 kube-dns", "10.21.1.1 192.168.1.1 172.16.0.1 169.254.169.254 100.64.0.1 127.0.0.1 224.0.0.1 fd00::1 fe80::1 ::ffff:1"},
		"spec.barchan alone":            {"{suspend: Delete}", "8.8.8.8 kube-dns", "10.21.1.1"},
		"no internet":                   {"{network: {internet: false}}", "", "8.8.8.8 2606::1 10.20.1.1 kube-dns"},
		"no internet, allowed":          {"{network: {internet: false, allowOut: [8.0.0.0/8, 9.9.9.9, '2606::/16', 10.0.0.0/8]}}", "8.8.8.8 9.9.9.9 2606::1 10.20.1.1", "9.9.9.8 2607::1 10.21.1.1 kube-dns"},
		"denied":                        {"{network: {denyOut: [8.0.0.0/8, '2606::1', 10.20.1.0/24]}}", "9.9.9.9 2606::2 10.20.2.1 kube-dns", "8.8.8.8 2606::1 10.20.1.1"},
		"denied but for some":           {"{network: {denyOut: [8.0.0.0/8], allowOut: [8.8.0.0/16]}}", "8.8.8.8 9.9.9.9", "8.9.1.1"},
		"everything denied":             {"{network: {denyOut: [0.0.0.0/0], allowOut: [8.8.8.8]}}", "8.8.8.8", "8.8.8.9 2606::1 kube-dns"},
		"all of IPv6 denied":            {"{network: {denyOut: ['::/0']}}", "8.8.8.8 kube-dns", "2606::1"},
		"everything allowed":            {"{network: {internet: false, allowOut: [0.0.0.0/0]}}", "8.8.8.8 2606::1 kube-dns", "10.21.1.1 169.254.169.254"},
		"no rules":                      {"{networkPolicy: {}}", "", "8.8.8.8 10.20.1.1 kube-dns"},
		"one empty rule":                {"{networkPolicy: {egress: [{}]}}", "8.8.8.8 2606::1 kube-dns", "10.21.1.1"},
		"a range":                       {"{networkPolicy: {egress: [{to: [{ipBlock: {cidr: 8.0.0.0/8, except: [8.8.0.0/16]}}]}]}}", "8.9.1.1", "8.8.8.8 9.9.9.9 2606::1 kube-dns"},
		"a range that is not public":    {"{networkPolicy: {egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8}}]}]}}", "10.20.1.1", "10.21.1.1 8.8.8.8"},
		"only one that is closed":       {"{networkPolicy: {egress: [{to: [{ipBlock: {cidr: 192.168.0.0/16}}]}]}}", "", "192.168.1.1 8.8.8.8"},
		"a port":                        {"{networkPolicy: {egress: [{ports: [{port: 443}]}]}}", "8.8.8.8:443", "8.8.8.8:80 10.21.1.1:443 kube-dns"},
		"ports with 53":                 {"{networkPolicy: {egress: [{ports: [{port: 53}]}]}}", "8.8.8.8:53 kube-dns", "8.8.8.8:80"},
		"both":                          {"{network: {denyOut: [8.8.0.0/16]}, networkPolicy: {egress: [{to: [{ipBlock: {cidr: 8.0.0.0/8}}]}]}}", "8.9.1.1", "8.8.8.8 9.9.9.9"},
		"both, one narrower":            {"{network: {internet: false, allowOut: [8.8.8.0/24]}, networkPolicy: {egress: [{to: [{ipBlock: {cidr: 8.0.0.0/8, except: [8.8.8.128/25]}}]}]}}", "8.8.8.8", "8.8.8.200 8.9.1.1"},
		"a port range with 53":          {"{networkPolicy: {egress: [{to: [{ipBlock: {cidr: 8.8.8.8/32}}], ports: [{port: 1, endPort: 99}]}]}}", "8.8.8.8:1", "kube-dns"},
		"selected Pods":                 {"{networkPolicy: {egress: [{to: [{podSelector: {matchLabels: {k8s-app: db}}}]}]}}", "db", "8.8.8.8 kube-dns"},
		"selected Pods, but all closed": {"{network: {internet: false}, networkPolicy: {egress: [{to: [{podSelector: {matchLabels: {k8s-app: db}}}]}]}}", "", "db 8.8.8.8"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rules, err := p.egressOf(barchanOf(t, tt.barchan))
			if err != nil {
				t.Fatal(err)
			}
			for want, list := range map[bool]string{true: tt.open, false: tt.refused} {
				for to := range strings.FieldsSeq(list) {
					address, port, label := to, int32(80), ""
					if at, err := netip.ParseAddrPort(to); err == nil {
						address, port = at.Addr().String(), int32(at.Port())
					} else if !strings.ContainsAny(to, ".:") {
						address, label = "", to
					}
					if label == dns {
						port = dnsPort
					}
					if got := allows(rules, address, port, label); got != want {
						t.Errorf("%s: allowed %v, want %v, by %+v", to, got, want, rules)
					}
				}
			}
			for i, r := range rules {
				if len(r.To) == 0 {
					t.Errorf("rule %d has no peers, which allows everything", i)
				}
				for _, to := range r.To {
					checkExcept(t, to.IPBlock)
				}
			}
		})
	}
}

func TestEgressRefused(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ barchan, want string }{
		"name":    {"{network: {denyOut: [0.0.0.0/0], allowOut: [8.8.8.8, example.com]}}", "spec.barchan.network.allowOut[1]: Forbidden: a NetworkPolicy has no names"},
		"denied":  {"{network: {denyOut: [x]}}", "spec.barchan.network.denyOut[0]: Invalid value"},
		"allowed": {"{network: {allowOut: ['::ffff:1.2.3.4']}}", "spec.barchan.network.allowOut[0]"},
		"cidr":    {"{networkPolicy: {egress: [{}, {to: [{ipBlock: {cidr: x}}]}]}}", "spec.barchan.networkPolicy.egress[1].to[0].ipBlock.cidr: Invalid value"},
		"except":  {"{networkPolicy: {egress: [{to: [{ipBlock: {cidr: 1.0.0.0/8, except: [1.1.1.1/32, y]}}]}]}}", "spec.barchan.networkPolicy.egress[0].to[0].ipBlock.except[1]: Invalid value"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := (&Placer{}).egressOf(barchanOf(t, tt.barchan))
			if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}
