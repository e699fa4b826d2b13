package egress

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Bounds are the egress rules of a template's networkPolicy. They deny what they do not allow,
// whatever the sandbox's own policy is. The zero value denies nothing.
type Bounds struct {
	On     bool
	Grants []Grant
	// DNS is the rule that allows DNS; empty means that no names are answered.
	DNS string
}

// Grant is one rule: ranges of addresses, and the allowed ports.
type Grant struct {
	Ranges []Range
	// Ports may be empty for all ports of every protocol.
	Ports []Ports
}

// Range is one peer of a rule.
type Range struct {
	Prefix netip.Prefix
	Except []netip.Prefix
	// From is the peer in its author's terms, such as "networkPolicy.egress[0].to[0] 8.0.0.0/8".
	From string
}

func (r Range) has(a netip.Addr) bool { return r.Prefix.Contains(a) && !containsAny(r.Except, a) }

// Ports is a range of ports of a protocol, "tcp", "udp" or "sctp", from First to Last.
type Ports struct {
	Protocol    string
	First, Last uint16
}

// String formats ports as users write them: "tcp 443", "udp 1000-2000", "tcp".
func (p Ports) String() string {
	switch p.First {
	case 0:
		return p.Protocol
	case p.Last:
		return fmt.Sprintf("%s %d", p.Protocol, p.First)
	default:
		return fmt.Sprintf("%s %d-%d", p.Protocol, p.First, p.Last)
	}
}

func (p Ports) has(k Packet) bool {
	return p.Protocol == k.Protocol && p.First <= k.Port && k.Port <= p.Last
}

// decide returns the rule's decision, or the zero Decision.
func (g Grant) decide(k Packet) Decision {
	peer := slices.IndexFunc(g.Ranges, func(r Range) bool { return r.has(k.Address) })
	port := slices.IndexFunc(g.Ports, func(p Ports) bool { return p.has(k) })
	switch {
	case peer < 0 || (port < 0 && len(g.Ports) > 0):
		return Decision{}
	case port < 0:
		return Decision{Verdict: Allowed, Rule: g.Ranges[peer].From}
	default:
		return Decision{Verdict: Allowed, Rule: g.Ranges[peer].From + ", " + g.Ports[port].String()}
	}
}

// closedByBounds is the rule for packets that no grant allows.
const closedByBounds = "networkPolicy.egress allows nothing else"

// decide returns the bounds' decision, or the zero Decision.
func (b Bounds) decide(k Packet) Decision {
	if !b.On {
		return Decision{}
	}
	if k.dns() && b.DNS != "" {
		return Decision{Verdict: Allowed, Rule: b.DNS}
	}
	for _, g := range b.Grants {
		if d := g.decide(k); d.Verdict != "" {
			return d
		}
	}
	return Decision{Verdict: Refused, Rule: closedByBounds}
}

func (b Bounds) answersNothing() bool { return b.On && b.DNS == "" }

// Equal reports whether two bounds have the same rules in the same words.
func (b Bounds) Equal(c Bounds) bool {
	return b.On == c.On && b.DNS == c.DNS && slices.EqualFunc(b.Grants, c.Grants, func(g, h Grant) bool {
		return slices.EqualFunc(g.Ranges, h.Ranges, Range.equal) && slices.Equal(g.Ports, h.Ports)
	})
}

func (r Range) equal(o Range) bool {
	return r.Prefix == o.Prefix && r.From == o.From && slices.Equal(r.Except, o.Except)
}

// Within returns the policy restricted by the egress rules of a networkPolicy; nil leaves it
// unchanged. Without DNS in the rules its names are dropped. The error is an errs.ErrInvalid that
// names the entry; the API server admits no such rules.
func (p Policy) Within(rules *agents.NetworkPolicy) (Policy, error) {
	if rules == nil {
		return p, nil
	}
	if bad := CheckRules(rules.Egress, field.NewPath("networkPolicy", "egress")); len(bad) > 0 {
		return Policy{}, fmt.Errorf("%w: %w", bad.ToAggregate(), errs.ErrInvalid)
	}
	p.Bounds = Bounds{On: true}
	for i := range rules.Egress {
		p.Bounds.add(&rules.Egress[i], fmt.Sprintf("networkPolicy.egress[%d]", i))
	}
	if p.Bounds.answersNothing() {
		p.Names = nil
	}
	return p, nil
}

func (b *Bounds) add(rule *networkingv1.NetworkPolicyEgressRule, from string) {
	g := Grant{Ports: portsOf(rule.Ports)}
	everywhere := len(rule.To) == 0
	if everywhere {
		for _, all := range allAddresses {
			g.Ranges = append(g.Ranges, Range{Prefix: all, From: from + " everywhere"})
		}
	}
	for i, peer := range rule.To {
		if peer.IPBlock == nil {
			continue // Pods
		}
		r := Range{Prefix: prefix(peer.IPBlock.CIDR), From: fmt.Sprintf("%s.to[%d] %s", from, i, peer.IPBlock.CIDR)}
		for _, e := range peer.IPBlock.Except {
			r.Except = append(r.Except, prefix(e))
		}
		g.Ranges, everywhere = append(g.Ranges, r), everywhere || r.Prefix.Bits() == 0
	}
	b.Grants = append(b.Grants, g)
	if b.DNS == "" && opensDNS(g.Ports, everywhere) {
		b.DNS = "DNS is open by " + from
	}
}

// opensDNS reports whether a rule allows the cluster's DNS, which our resolver replaces: it lists
// port 53, or includes it in the ports that it opens everywhere.
func opensDNS(ports []Ports, everywhere bool) bool {
	if len(ports) == 0 {
		return everywhere
	}
	return slices.ContainsFunc(ports, func(p Ports) bool {
		dns := p.has(Packet{Protocol: "udp", Port: 53}) || p.has(Packet{Protocol: "tcp", Port: 53})
		return dns && (everywhere || p.First == p.Last)
	})
}

func portsOf(list []networkingv1.NetworkPolicyPort) (all []Ports) {
	for _, l := range list {
		p := Ports{Protocol: strings.ToLower(string(protocolOf(l))), Last: 65535}
		if l.Port != nil {
			p.First = uint16(l.Port.IntVal) //nolint:gosec // validated
			p.Last = p.First
		}
		if l.EndPort != nil {
			p.Last = uint16(*l.EndPort) //nolint:gosec // validated
		}
		all = append(all, p)
	}
	return all
}

func protocolOf(p networkingv1.NetworkPolicyPort) corev1.Protocol {
	if p.Protocol == nil {
		return corev1.ProtocolTCP
	}
	return *p.Protocol
}

func prefix(text string) netip.Prefix { return netip.MustParsePrefix(text).Masked() }

// maxRuleEntries bounds the rules of a networkPolicy with their peers, exceptions and ports.
const maxRuleEntries = 1000

// CheckRules reports malformed egress rules of a networkPolicy, and unsupported ones: a named port,
// which belongs to a Pod. Peers may be Pods or namespaces.
func CheckRules(rules []networkingv1.NetworkPolicyEgressRule, path *field.Path) (bad field.ErrorList) {
	entries := len(rules)
	for i := range rules {
		at := path.Index(i)
		entries += len(rules[i].To) + len(rules[i].Ports)
		for j, peer := range rules[i].To {
			if peer.IPBlock != nil {
				entries += len(peer.IPBlock.Except)
			}
			bad = append(bad, checkPeer(peer, at.Child("to").Index(j))...)
		}
		for j, port := range rules[i].Ports {
			bad = append(bad, checkPort(port, at.Child("ports").Index(j))...)
		}
	}
	if entries > maxRuleEntries {
		return field.ErrorList{field.TooMany(path, entries, maxRuleEntries)}
	}
	return bad
}

func checkPeer(peer networkingv1.NetworkPolicyPeer, path *field.Path) (bad field.ErrorList) {
	selects := peer.PodSelector != nil || peer.NamespaceSelector != nil
	switch b := peer.IPBlock; {
	case b == nil && !selects:
		return field.ErrorList{field.Required(path, "must have an ipBlock, a podSelector or a namespaceSelector")}
	case b == nil:
		return nil
	case selects:
		return field.ErrorList{field.Forbidden(path, "may not have a selector beside an ipBlock")}
	}
	whole, ok := readCIDR(peer.IPBlock.CIDR)
	if !ok {
		return field.ErrorList{field.Invalid(path.Child("ipBlock", "cidr"), peer.IPBlock.CIDR, "must be a CIDR")}
	}
	for i, text := range peer.IPBlock.Except {
		e, ok := readCIDR(text)
		if !ok || e.Bits() <= whole.Bits() || !whole.Contains(e.Addr()) {
			bad = append(bad, field.Invalid(path.Child("ipBlock", "except").Index(i), text, "must be a CIDR within "+peer.IPBlock.CIDR+", and not all of it"))
		}
	}
	return bad
}

func readCIDR(text string) (netip.Prefix, bool) {
	if !strings.Contains(text, "/") || !agents.IsAddressOrPrefix(text) {
		return netip.Prefix{}, false
	}
	return prefix(text), true
}

func checkPort(p networkingv1.NetworkPolicyPort, path *field.Path) (bad field.ErrorList) {
	protocols := []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}
	if !slices.Contains(protocols, protocolOf(p)) {
		bad = append(bad, field.NotSupported(path.Child("protocol"), protocolOf(p), protocols))
	}
	var first int32 = 1
	switch {
	case p.Port == nil && p.EndPort != nil:
		bad = append(bad, field.Required(path.Child("port"), "is where endPort begins"))
	case p.Port == nil:
	case p.Port.Type == intstr.String:
		return append(bad, field.Invalid(path.Child("port"), p.Port.StrVal, "must be a number: names are those of Pods' ports, and sandboxes reach no Pods"))
	default:
		first = p.Port.IntVal
		bad = append(bad, checkNumber(first, 1, path.Child("port"))...)
	}
	if p.EndPort != nil {
		bad = append(bad, checkNumber(*p.EndPort, first, path.Child("endPort"))...)
	}
	return bad
}

func checkNumber(n, least int32, path *field.Path) field.ErrorList {
	if n < least || n > 65535 {
		return field.ErrorList{field.Invalid(path, n, fmt.Sprintf("must be from %d to 65535", least))}
	}
	return nil
}
