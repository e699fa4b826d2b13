package firewall

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/match"
)

// Policies are the egress policies of single sandboxes, and the addresses that their names are
// pinned to. It is the part of [Rules] that callers use on an open network.
type Policies struct{ rules *Rules }

// Policies returns the policies of these rules.
func (r *Rules) Policies() Policies { return Policies{r} }

// SetEgress limits an endpoint to what a policy allows before it returns; the zero Policy removes
// the endpoint's rules. Open connections that the policy forbids are cut. Pins of names that are
// still allowed stay. Setting the policy in force again costs nothing. The network must be open.
func (ps Policies) SetEgress(ctx context.Context, ep Endpoint, p egress.Policy) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("set egress of %s: %w", ep.ID, err)
	}
	if strings.Contains(ep.ID, separator) || len(ep.ID) > maxComment {
		return fmt.Errorf("set egress: ID %q: %w", ep.ID, errs.ErrInvalid)
	}
	if err := ps.rules.setEgress(ep, p); err != nil {
		return fmt.Errorf("set egress of %s: %w", ep.ID, err)
	}
	return nil
}

// Egress is the policy in force for an ID, the zero Policy if none was set; false means that the
// policy is unknown or not fully in force.
func (ps Policies) Egress(id string) (egress.Policy, bool) {
	switch p := ps.rules.egress.get(id); {
	case p == nil:
		return egress.Policy{}, true
	case p.unknown || p.uncut:
		return egress.Policy{}, false
	default:
		return p.policy, true
	}
}

// EgressOf is the policy in force for a source address. An unknown policy is returned as one that
// closes all.
func (ps Policies) EgressOf(source netip.Addr) egress.Policy {
	switch p := ps.rules.egress.bySender(source); {
	case p == nil:
		return egress.Policy{}
	case p.unknown:
		return egress.Policy{Closed: "a policy that is not known yet"}
	default:
		return p.policy
	}
}

// EgressRules names the IDs that have rules of their own.
func (ps Policies) EgressRules(_ context.Context) ([]string, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	found, err := ps.rules.egress.read(conn)
	if err != nil {
		return nil, fmt.Errorf("list egress rules: %w", err)
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// HostRules returns the limits of all sandboxes of the instance.
func (ps Policies) HostRules() egress.HostRules { return ps.rules.hostRules() }

func (r *Rules) setEgress(ep Endpoint, p egress.Policy) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.setEgressLocked(ep, p)
	if r.reloaded(&err) {
		err = r.setEgressLocked(ep, p)
	}
	return err
}

// +checklocks:r.mu
func (r *Rules) setEgressLocked(ep Endpoint, p egress.Policy) error {
	old := r.egress.get(ep.ID)
	next := r.place(ep, p, old)
	switch {
	case old == nil && !p.Restricts():
		if !p.Equal(egress.Policy{}) {
			r.egress.put(next)
		}
		return nil
	case old != nil && old.chain == next.chain && old.matchesAs(next):
		next.bounds, next.sets, next.pins, next.uncut = old.bounds, old.sets, old.pins, old.uncut
	default:
		if err := r.exchange(old, next); err != nil {
			return err
		}
	}
	r.egress.put(next)
	if !next.uncut {
		return nil
	}
	before := egress.Policy{}
	if old != nil { // the zero Policy where it is unknown
		before = old.policy
	}
	if err := r.cutForbidden(next, before); err != nil {
		return err
	}
	return r.noteCut(next)
}

// noteCut records, in the kernel first, that no forbidden connection is open.
//
// +checklocks:r.mu
func (r *Rules) noteCut(p *placed) error {
	conn, err := r.connect()
	if err != nil {
		return err
	}
	cut := *p
	cut.uncut = false
	for i, a := range p.sources {
		if !a.IsValid() {
			continue
		}
		if err := conn.SetDeleteElements(r.egress.askers[i], []nftables.SetElement{{Key: a.AsSlice()}}); err != nil {
			return fmt.Errorf("remove from %s: %w", r.egress.askers[i].Name, err)
		}
		if err := r.egress.addAsker(conn, i, a, &cut); err != nil {
			return err
		}
	}
	if err := r.commit(conn); err != nil {
		return err
	}
	r.egress.put(&cut)
	return nil
}

// place returns the kernel objects that a policy needs, with the allowed pins of the old one.
func (r *Rules) place(ep Endpoint, p egress.Policy, old *placed) *placed {
	next := &placed{id: ep.ID, sources: [2]netip.Addr{ep.Address, ep.Address6}, policy: p, pins: map[netip.Addr]egress.Pin{}}
	if !r.cfg.Gateway6.IsValid() {
		next.sources[1] = netip.Addr{}
	}
	if !p.Restricts() {
		next.sources = [2]netip.Addr{}
		return next
	}
	next.chain, next.uncut = chainName(ep, p), p.Pins()
	if p.UsesResolver() {
		next.asking = next.sources
	}
	if old != nil && old.chain == next.chain && !old.matchesAs(next) { // another program removed elements
		next.chain += separator + "again"
	}
	if !p.Pins() || old == nil {
		return next
	}
	for a, pin := range old.pins {
		names := slices.DeleteFunc(slices.Clone(pin.Names), func(name string) bool {
			_, ok := p.Match(name)
			return !ok
		})
		if len(names) > 0 && time.Until(pin.Until) > 0 {
			next.pins[a] = egress.Pin{Address: a, Names: names, Until: pin.Until}
		}
	}
	return next
}

// exchange replaces old, which may be nil, by next in one transaction.
//
// +checklocks:r.mu
func (r *Rules) exchange(old, next *placed) error {
	conn, err := r.connect()
	if err != nil {
		return err
	}
	if next.chain != "" {
		if err := r.addPolicy(conn, old, next); err != nil {
			return err
		}
	}
	if old != nil {
		if err := r.egress.replace(conn, old, next); err != nil {
			return err
		}
	}
	if next.chain != "" {
		if err := r.egress.point(conn, next); err != nil {
			return err
		}
	}
	return r.commit(conn)
}

// addPolicy adds a sandbox's chain and sets.
func (r *Rules) addPolicy(conn *nftables.Conn, old, next *placed) error {
	p, e := next.policy, r.egress
	chain := conn.AddChain(&nftables.Chain{Name: next.chain, Table: e.table})
	if err := r.addBounds(conn, chain, next); err != nil {
		return err
	}
	allow, err := addPrefixSets(conn, e.table, next.chain+kindAllow, prefixes(p.Allow))
	if err != nil {
		return err
	}
	deny, err := addPrefixSets(conn, e.table, next.chain+kindDeny, prefixes(p.Deny))
	if err != nil {
		return err
	}
	next.sets = append(next.sets, allow[0].Name, allow[1].Name, deny[0].Name, deny[1].Name)
	for i := range families {
		r.rule(conn, chain, inSet(allow[i], i), match.Accept())
	}
	if p.Pins() {
		pins := e.pinSets(next.id)
		for i, set := range pins {
			next.sets = append(next.sets, set.Name)
			if err := e.carryPins(conn, set, i, old, next); err != nil {
				return err
			}
			r.rule(conn, chain, inSet(set, i), match.Accept())
		}
		// A connection outlives the pin that allowed it; forbidden connections were cut.
		r.rule(conn, chain, match.Established(), match.Accept())
	}
	for i := range families {
		r.rule(conn, chain, inSet(deny[i], i), refuse())
	}
	if p.Closed != "" {
		r.rule(conn, chain, refuse())
	}
	return nil
}

func refuse() []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chainRefuse}}
}

func prefixes(rules []egress.Rule) (list []netip.Prefix) {
	for _, r := range rules {
		list = append(list, r.Prefix)
	}
	return list
}

// point directs a sandbox's packets to its chain, and its DNS queries to our resolver.
func (e *egressTable) point(conn *nftables.Conn, p *placed) error {
	for i, a := range p.sources {
		if !a.IsValid() {
			continue
		}
		element := nftables.SetElement{
			Key: a.AsSlice(), Comment: p.id, VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: p.chain},
		}
		if err := conn.SetAddElements(e.policies[i], []nftables.SetElement{element}); err != nil {
			return fmt.Errorf("add to map %s: %w", e.policies[i].Name, err)
		}
		if p.policy.UsesResolver() {
			if err := e.addAsker(conn, i, a, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// addAsker directs DNS queries from an address to our resolver. The element's comment keeps the
// state that must survive this process.
func (e *egressTable) addAsker(conn *nftables.Conn, i int, a netip.Addr, p *placed) error {
	element := nftables.SetElement{Key: a.AsSlice()}
	if p.uncut {
		element.Comment = commentUncut
	}
	if err := conn.SetAddElements(e.askers[i], []nftables.SetElement{element}); err != nil {
		return fmt.Errorf("add to set %s: %w", e.askers[i].Name, err)
	}
	return nil
}

// remove deletes the kernel objects of an ID.
func (e *egressTable) remove(conn *nftables.Conn, old *placed) error {
	return e.replace(conn, old, &placed{id: old.id})
}

// replace deletes the kernel objects of an ID that next does not use.
func (e *egressTable) replace(conn *nftables.Conn, old, next *placed) error {
	for i, a := range old.sources {
		if !a.IsValid() {
			continue
		}
		// Added first: deleting a missing element fails.
		if err := conn.SetAddElements(e.askers[i], []nftables.SetElement{{Key: a.AsSlice()}}); err != nil {
			return fmt.Errorf("add to set %s: %w", e.askers[i].Name, err)
		}
		for _, set := range []*nftables.Set{e.policies[i], e.askers[i]} {
			if err := conn.SetDeleteElements(set, []nftables.SetElement{{Key: a.AsSlice()}}); err != nil {
				return fmt.Errorf("remove from %s: %w", set.Name, err)
			}
		}
	}
	for _, name := range []string{old.chain, old.bounds} { // the jumping chain first
		if name == "" {
			continue
		}
		chain := &nftables.Chain{Name: name, Table: e.table}
		conn.FlushChain(chain)
		conn.DelChain(chain)
	}
	for _, name := range old.sets {
		if !slices.Contains(next.sets, name) {
			conn.DelSet(&nftables.Set{Table: e.table, Name: name})
		}
	}
	return nil
}
