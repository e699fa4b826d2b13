package placement

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// dnsPort is that of the cluster's DNS.
const dnsPort = 53

// block is an ipBlock.
type block struct {
	prefix netip.Prefix
	except []netip.Prefix
}

var everywhere = []block{{prefix: netip.MustParsePrefix("0.0.0.0/0")}, {prefix: netip.MustParsePrefix("::/0")}}

// without returns a block without some ranges, and false if nothing is left.
func (b block) without(ranges ...netip.Prefix) (block, bool) {
	b.except = slices.Clone(b.except)
	for _, r := range ranges {
		switch {
		case !r.Overlaps(b.prefix):
		case r.Bits() <= b.prefix.Bits():
			return block{}, false
		case !slices.Contains(b.except, r):
			b.except = append(b.except, r)
		}
	}
	return b, true
}

// intersect returns the addresses that are in two blocks, and false if there are none.
func (b block) intersect(c block) (block, bool) {
	if !b.prefix.Overlaps(c.prefix) {
		return block{}, false
	}
	narrow := b.prefix
	if c.prefix.Bits() > narrow.Bits() {
		narrow = c.prefix
	}
	return block{prefix: narrow}.without(append(slices.Clone(b.except), c.except...)...)
}

// intersectAll returns the addresses that are in a block of each list.
func intersectAll(a, b []block) (all []block) {
	for _, x := range a {
		for _, y := range b {
			if both, ok := x.intersect(y); ok {
				all = append(all, both)
			}
		}
	}
	return all
}

func subtract(from []block, ranges []netip.Prefix) (all []block) {
	for _, b := range from {
		if rest, ok := b.without(ranges...); ok {
			all = append(all, rest)
		}
	}
	return all
}

// open returns the addresses that no sandbox's policy needs to name: the public ones, and what the operator allows.
func (p *Placer) open() []block {
	var closed []netip.Prefix
	for _, r := range sandbox.NotPublic() {
		closed = append(closed, r.Prefix)
	}
	all := subtract(everywhere, closed)
	for _, r := range p.cfg.Reachable {
		all = append(all, block{prefix: r.Masked()})
	}
	return all
}

// egressOf returns the egress rules of a sandbox: open addresses that both spec.barchan.network and
// spec.barchan.networkPolicy allow, the Pods that the latter selects, and the cluster's DNS. Where network closes
// everything that it does not allow, neither Pods nor DNS are allowed. An errs.ErrInvalid names a field that a
// NetworkPolicy cannot express.
func (p *Placer) egressOf(b *agents.BarchanSpec) ([]networkingv1.NetworkPolicyEgressRule, error) {
	if b == nil {
		b = &agents.BarchanSpec{}
	}
	path := field.NewPath("spec", "barchan")
	own, closed, err := ownBlocks(b.Network, path.Child("network"))
	if err != nil {
		return nil, err
	}
	own = intersectAll(p.open(), own)
	bounds := []networkingv1.NetworkPolicyEgressRule{{}}
	if b.NetworkPolicy != nil {
		bounds = b.NetworkPolicy.Egress
	}
	var rules []networkingv1.NetworkPolicyEgressRule
	dns := false
	for i := range bounds {
		to, all, err := peersOf(&bounds[i], own, closed, path.Child("networkPolicy", "egress").Index(i))
		if err != nil {
			return nil, err
		}
		if len(to) > 0 { // a rule without peers would allow everything
			rules = append(rules, networkingv1.NetworkPolicyEgressRule{To: to, Ports: withProtocol(bounds[i].Ports)})
		}
		dns = dns || opensDNS(bounds[i].Ports, all)
	}
	if dns && !closed {
		rules = append(rules, clusterDNS())
	}
	return rules, nil
}

// ownBlocks returns the addresses that spec.barchan.network allows. It closes if it denies all that it does not allow.
func ownBlocks(n *agents.EgressPolicy, path *field.Path) (allowed []block, closes bool, err error) {
	if n == nil {
		return everywhere, false, nil
	}
	closes = n.Internet != nil && !*n.Internet
	var denied []netip.Prefix
	for i, entry := range n.DenyOut {
		prefix, err := parsePrefix(entry, path.Child("denyOut").Index(i))
		if err != nil {
			return nil, false, err
		}
		closes = closes || prefix == everywhere[0].prefix
		denied = append(denied, prefix)
	}
	if !closes {
		allowed = subtract(everywhere, denied)
	}
	for i, entry := range n.AllowOut {
		at := path.Child("allowOut").Index(i)
		if !agents.IsAddressOrPrefix(entry) {
			return nil, false, invalid(field.Forbidden(at, "a NetworkPolicy has no names; list addresses and CIDRs"))
		}
		prefix, err := parsePrefix(entry, at)
		if err != nil {
			return nil, false, err
		}
		if prefix == everywhere[0].prefix {
			return everywhere, false, nil
		}
		allowed = append(allowed, block{prefix: prefix})
	}
	return allowed, closes, nil
}

// peersOf returns the peers of a rule among these addresses, and whether it names all addresses.
func peersOf(rule *networkingv1.NetworkPolicyEgressRule, own []block, closed bool, path *field.Path) (to []networkingv1.NetworkPolicyPeer, all bool, err error) {
	blocks := everywhere
	if all = len(rule.To) == 0; !all {
		blocks = nil
	}
	for i, peer := range rule.To {
		if peer.IPBlock == nil {
			if !closed {
				to = append(to, peer)
			}
			continue
		}
		at := path.Child("to").Index(i).Child("ipBlock")
		b := block{}
		if b.prefix, err = parsePrefix(peer.IPBlock.CIDR, at.Child("cidr")); err != nil {
			return nil, false, err
		}
		for j, text := range peer.IPBlock.Except {
			e, err := parsePrefix(text, at.Child("except").Index(j))
			if err != nil {
				return nil, false, err
			}
			b.except = append(b.except, e)
		}
		blocks, all = append(blocks, b), all || b.prefix.Bits() == 0
	}
	for _, b := range intersectAll(own, blocks) {
		peer := &networkingv1.IPBlock{CIDR: b.prefix.String()}
		for _, e := range b.except {
			peer.Except = append(peer.Except, e.String())
		}
		to = append(to, networkingv1.NetworkPolicyPeer{IPBlock: peer})
	}
	return to, all, nil
}

// opensDNS reports whether a rule allows the cluster's DNS: its ports have 53 alone, or it names all addresses and its ports
// include 53.
func opensDNS(ports []networkingv1.NetworkPolicyPort, all bool) bool {
	if len(ports) == 0 {
		return all
	}
	return slices.ContainsFunc(ports, func(p networkingv1.NetworkPolicyPort) bool {
		if p.Protocol != nil && *p.Protocol == corev1.ProtocolSCTP {
			return false
		}
		if p.Port == nil {
			return all
		}
		first, last := p.Port.IntVal, p.Port.IntVal
		if p.EndPort != nil {
			last = *p.EndPort
		}
		return p.Port.Type == intstr.Int && first <= dnsPort && dnsPort <= last && (all || first == last)
	})
}

// clusterDNS allows DNS at the Pods of the cluster's DNS, by the labels that CoreDNS has in every distribution.
func clusterDNS() networkingv1.NetworkPolicyEgressRule {
	port := intstr.FromInt32(dnsPort)
	return networkingv1.NetworkPolicyEgressRule{
		To: []networkingv1.NetworkPolicyPeer{{
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: metav1.NamespaceSystem}},
			PodSelector:       &metav1.LabelSelector{MatchLabels: map[string]string{"k8s-app": "kube-dns"}},
		}},
		Ports: []networkingv1.NetworkPolicyPort{{Protocol: new(corev1.ProtocolUDP), Port: &port}, {Protocol: new(corev1.ProtocolTCP), Port: &port}},
	}
}

// withProtocol sets the API server's default, so that what it returns equals what was sent.
func withProtocol(ports []networkingv1.NetworkPolicyPort) []networkingv1.NetworkPolicyPort {
	ports = slices.Clone(ports)
	for i := range ports {
		if ports[i].Protocol == nil {
			ports[i].Protocol = new(corev1.ProtocolTCP)
		}
	}
	return ports
}

// parsePrefix reads a CIDR, or an address as the CIDR that has it alone.
func parsePrefix(text string, path *field.Path) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil && agents.IsAddressOrPrefix(text) {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	prefix, err := netip.ParsePrefix(text)
	if err != nil || !agents.IsAddressOrPrefix(text) {
		return netip.Prefix{}, invalid(field.Invalid(path, text, "must be an IP address or a CIDR"))
	}
	return prefix.Masked(), nil
}

func invalid(err *field.Error) error { return fmt.Errorf("%w: %w", err, errs.ErrInvalid) }
