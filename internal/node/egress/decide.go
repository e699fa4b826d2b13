package egress

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Verdict is the result for a packet.
type Verdict string

// Verdicts.
const (
	Allowed Verdict = "allowed"
	Refused Verdict = "refused"
	// Resolver means that it goes to Barchan's own resolver, whatever its destination.
	Resolver Verdict = "resolver"
)

// Source is whose rule decides.
type Source string

// Sources.
const (
	// SourceSandbox is the sandbox's own policy, SourceTemplate the networkPolicy of its template.
	SourceSandbox  Source = "sandbox"
	SourceTemplate Source = "template"
	// SourceHost is the operator, whose rules hold for all sandboxes.
	SourceHost Source = "host"
)

// Decision is a verdict and the rule behind it, as text for users.
type Decision struct {
	Verdict Verdict `json:"verdict"`
	Rule    string  `json:"rule"`
	Source  Source  `json:"source"`
}

// from returns the decision as one by the rules of a source. The zero Decision stays as it is.
func (d Decision) from(s Source) Decision {
	if d.Verdict != "" {
		d.Source = s
	}
	return d
}

// Packet is a packet from a sandbox. Protocol is "tcp", "udp" or another name in lower case.
type Packet struct {
	Address  netip.Addr
	Port     uint16
	Protocol string
}

// Pin is an address that is allowed by a name, until a time.
type Pin struct {
	Address netip.Addr `json:"address"`
	Names   []string   `json:"names"`
	Until   time.Time  `json:"until"`
}

func (k Packet) dns() bool { return k.Port == 53 && (k.Protocol == "udp" || k.Protocol == "tcp") }

// Decide returns the decision about the first packet of a connection. An open connection outlives
// its pin; nothing else depends on earlier state.
func Decide(g HostRules, p Policy, pins []Pin, k Packet) Decision {
	a := k.Address.Unmap()
	if k.dns() && p.UsesResolver() && g.Offers(a) {
		return Decision{Verdict: Resolver, Rule: fmt.Sprintf("Barchan's resolver answers all DNS of this sandbox, because of %s", p.resolverRule())}.from(p.resolverSource())
	}
	host := g.decide(a, k.dns()).from(SourceHost)
	if host.Verdict != Allowed || slices.Contains(g.Machine, a) {
		return host // traffic to the host itself is no egress
	}
	k.Address = a
	bounds := p.Bounds.decide(k).from(SourceTemplate)
	if bounds.Verdict == Refused {
		return bounds
	}
	return cmp.Or(p.decide(a, pins).from(SourceSandbox), bounds, host)
}

const noDNSRule = "networkPolicy.egress, which opens no DNS"

// resolverRule names the rule because of which Barchan answers a sandbox's DNS.
func (p Policy) resolverRule() string {
	if p.Bounds.answersNothing() {
		return noDNSRule
	}
	if p.Closed != "" {
		return p.Closed
	}
	return p.Names[0].From
}

// resolverSource is whose rule that is.
func (p Policy) resolverSource() Source {
	if p.Bounds.answersNothing() {
		return SourceTemplate
	}
	return SourceSandbox
}

// decide returns the policy's decision about an address, or the zero Decision.
func (p Policy) decide(a netip.Addr, pins []Pin) Decision {
	if r, ok := find(p.Allow, a); ok {
		return Decision{Verdict: Allowed, Rule: r.From}
	}
	if !p.closes() {
		return Decision{}
	}
	for _, pin := range pins {
		if pin.Address != a {
			continue
		}
		for _, name := range pin.Names {
			if n, ok := p.Match(name); ok {
				return Decision{Verdict: Allowed, Rule: fmt.Sprintf("%s, whose %s is pinned to %s until %s", n.From, name, a, stamp(pin.Until))}
			}
		}
	}
	if r, ok := find(p.Deny, a); ok {
		return Decision{Verdict: Refused, Rule: r.From}
	}
	if p.Closed != "" {
		return Decision{Verdict: Refused, Rule: p.Closed}
	}
	return Decision{}
}

// DecideName decides whether a sandbox receives the addresses of a name. If so, packets are decided
// separately, unless the addresses are pinned.
func DecideName(p Policy, pins []Pin, name string) Decision {
	if !p.UsesResolver() {
		return Decision{Verdict: Allowed, Rule: "any name is answered"}.from(SourceHost)
	}
	if p.Bounds.answersNothing() {
		return Decision{Verdict: Refused, Rule: "no name is answered, because of " + noDNSRule}.from(SourceTemplate)
	}
	n, ok := p.Match(name)
	if !ok {
		return Decision{Verdict: Refused, Rule: fmt.Sprintf("no entry of allowOut has the name, and %s", p.resolverRule())}.from(SourceSandbox)
	}
	var pinned []string
	for _, pin := range pins {
		if slices.Contains(pin.Names, canonical(name)) {
			pinned = append(pinned, fmt.Sprintf("%s until %s", pin.Address, stamp(pin.Until)))
		}
	}
	if len(pinned) == 0 {
		return Decision{Verdict: Allowed, Rule: n.From + ", pinned to its addresses when the sandbox resolves it"}.from(SourceSandbox)
	}
	return Decision{Verdict: Allowed, Rule: n.From + ", pinned to " + strings.Join(pinned, ", ")}.from(SourceSandbox)
}

func stamp(t time.Time) string { return t.UTC().Format("15:04:05 UTC") }
