package netdev

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/egress"
)

// The egress table of an instance has what single sandboxes may not reach:
//
//	forward ─ verdict map by source address ─→ the sandbox's own chain ─→ refuse
//	resolve ─ set of source addresses ─→ DNS goes to our resolver, whatever server it asks
//
// A chain and its sets are never changed: a new policy gets new ones, and one element of the
// map is exchanged, all in one transaction. So there is no moment between two policies. Only
// the addresses that names are pinned to come and go, in sets that policies leave to each
// other. Nothing here is removed when the instance is opened again.
const (
	setPolicies = "policies"
	setAskers   = "askers"
	chainRefuse = "refuse"
	// rulesFormat goes into the names of chains: those of another format are made anew.
	rulesFormat = "1"
)

// egressTable is the table and what is known to be in it.
type egressTable struct {
	table    *nftables.Table
	policies [2]*nftables.Set
	askers   [2]*nftables.Set

	mu       sync.RWMutex
	bySource map[netip.Addr]string // +checklocks:mu
	placed   map[string]*placed    // +checklocks:mu
}

// placed is what is in the kernel for one ID. It is not changed, but for pins, which only
// whoever holds the transaction does, under egressTable.mu.
type placed struct {
	id      string
	sources [2]netip.Addr
	// asking are those of sources whose questions go to our resolver.
	asking [2]netip.Addr
	// policy is what the chain does; unknown means that it was found in the kernel.
	policy  egress.Policy
	unknown bool
	// chain is empty where the policy needs none.
	chain string
	// bounds is the chain of the policy's bounds; empty where it has none.
	bounds string
	sets   []string
	pins   map[netip.Addr]egress.Pin
	// uncut means that connections may be open that the policy forbids.
	uncut bool
}

// leadsAs reports whether the same packets are led to the chain and to our resolver.
func (p *placed) leadsAs(q *placed) bool { return p.sources == q.sources && p.asking == q.asking }

func newEgressTable(name string) *egressTable {
	e := &egressTable{
		table:    &nftables.Table{Name: name + "-egress", Family: nftables.TableFamilyINet},
		bySource: map[netip.Addr]string{}, placed: map[string]*placed{},
	}
	for i, f := range families {
		e.policies[i] = &nftables.Set{Table: e.table, Name: setPolicies + f.suffix, IsMap: true, KeyType: f.key, DataType: nftables.TypeVerdict}
		e.askers[i] = &nftables.Set{Table: e.table, Name: setAskers + f.suffix, KeyType: f.key}
	}
	return e
}

func (e *egressTable) get(id string) *placed {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.placed[id]
}

// bySender finds who sends from an address; nil if nothing is known of it.
func (e *egressTable) bySender(source netip.Addr) *placed {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.placed[e.bySource[source.Unmap()]]
}

func (e *egressTable) put(p *placed) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dropLocked(p.id)
	e.placed[p.id] = p
	for _, a := range p.sources {
		if a.IsValid() {
			e.bySource[a] = p.id
		}
	}
}

func (e *egressTable) drop(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.dropLocked(id)
}

// +checklocks:e.mu
func (e *egressTable) dropLocked(id string) {
	delete(e.placed, id)
	maps.DeleteFunc(e.bySource, func(_ netip.Addr, who string) bool { return who == id })
}

func (e *egressTable) reset() {
	e.mu.Lock()
	defer e.mu.Unlock()
	clear(e.bySource)
	clear(e.placed)
}

// load reads what is in the kernel. What is known of policies stays known where the chain is
// still the same.
func (e *egressTable) load(conn *nftables.Conn) error {
	found, err := e.read(conn)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, was := range e.placed {
		switch now := found[id]; {
		case now == nil && was.chain == "":
			found[id] = was
		case now != nil && now.chain == was.chain && now.leadsAs(was):
			now.policy, now.unknown = was.policy, was.unknown
		}
	}
	clear(e.bySource)
	e.placed = found
	for id, p := range found {
		for _, a := range p.sources {
			if a.IsValid() {
				e.bySource[a] = id
			}
		}
	}
	return nil
}

// read finds chains, sets and pins by their names, and whose they are by the map's elements.
func (e *egressTable) read(conn *nftables.Conn) (map[string]*placed, error) {
	found := map[string]*placed{}
	sets, err := setsOf(conn, e.table)
	if err != nil || len(sets) == 0 {
		return found, err
	}
	of := func(id string) *placed {
		if found[id] == nil {
			found[id] = &placed{id: id, unknown: true, pins: map[netip.Addr]egress.Pin{}}
		}
		return found[id]
	}
	if err := e.readChains(conn, of); err != nil {
		return nil, err
	}
	for _, s := range sets {
		id, ours := ownerOf(s.Name)
		if !ours {
			continue
		}
		p := of(id)
		p.sets = append(p.sets, s.Name)
		if !strings.Contains(s.Name, kindPins) {
			continue
		}
		if err := readPins(conn, s, p.pins); err != nil {
			return nil, err
		}
	}
	return found, e.readSources(conn, found, of)
}

// readChains notes whose chains there are.
func (e *egressTable) readChains(conn *nftables.Conn, of func(id string) *placed) error {
	chains, err := conn.ListChainsOfTableFamily(e.table.Family)
	if err != nil {
		return fmt.Errorf("list chains: %w", err)
	}
	for _, c := range chains {
		id, ours := ownerOf(c.Name)
		switch {
		case !ours || c.Table.Name != e.table.Name:
		case strings.HasSuffix(c.Name, kindBounds):
			of(id).bounds = c.Name
		default:
			of(id).chain = c.Name
		}
	}
	return nil
}

// readSources notes by which addresses packets are led to chains and to our resolver.
func (e *egressTable) readSources(conn *nftables.Conn, found map[string]*placed, of func(id string) *placed) error {
	for i, set := range e.policies {
		elements, err := conn.GetSetElements(set)
		if err != nil {
			return fmt.Errorf("read map %s: %w", set.Name, err)
		}
		for _, element := range elements {
			of(element.Comment).sources[i], _ = netip.AddrFromSlice(element.Key)
		}
		if elements, err = conn.GetSetElements(e.askers[i]); err != nil {
			return fmt.Errorf("read set %s: %w", e.askers[i].Name, err)
		}
		asks := map[netip.Addr]string{}
		for _, element := range elements {
			a, _ := netip.AddrFromSlice(element.Key)
			asks[a] = element.Comment
		}
		for _, p := range found {
			if comment, ok := asks[p.sources[i]]; ok {
				p.asking[i] = p.sources[i]
				p.uncut = p.uncut || comment == commentUncut
			}
		}
	}
	return nil
}

// commentUncut stands beside who may have connections open that the policy forbids.
const commentUncut = "uncut"

// Names of a sandbox's objects end in what they are: "ID.hash", "ID.hash.allow", "ID.pins". See
// also those of bounds.
const (
	separator = "."
	kindAllow = ".allow"
	kindDeny  = ".deny"
	kindPins  = ".pins"
)

func ownerOf(name string) (id string, ours bool) {
	id, _, ours = strings.Cut(name, separator)
	return id, ours
}

// chainName depends on all that the chain does, so that after a restart it can be told
// whether the one in the kernel is the right one.
func chainName(ep Endpoint, p egress.Policy) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %s %+v", rulesFormat, ep.Address, ep.Address6, p))
	return ep.ID + separator + hex.EncodeToString(sum[:8])
}

// addEgress adds the chains that all sandboxes share, replacing those that are there, and
// leaves all else as it is.
func (r *ruleset) addEgress(conn *nftables.Conn) error {
	e := r.egress
	conn.AddTable(e.table)
	for i := range families {
		for _, set := range []*nftables.Set{e.policies[i], e.askers[i]} {
			if err := addEmptySet(conn, set); err != nil {
				return err
			}
		}
	}
	refuse := conn.AddChain(&nftables.Chain{Name: chainRefuse, Table: e.table})
	conn.FlushChain(refuse)
	r.rule(conn, refuse, protocol(unix.IPPROTO_TCP), []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}})
	r.rule(conn, refuse, []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED}})

	forward := r.filterChain(conn, e.table, "forward", nftables.ChainHookForward, beforeOthers)
	conn.FlushChain(forward)
	resolve := conn.AddChain(&nftables.Chain{
		Name: "resolve", Table: e.table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPrerouting, Priority: new(*nftables.ChainPriorityNATDest + beforeOthers),
	})
	conn.FlushChain(resolve)
	for i, gateway := range [2]netip.Addr{r.cfg.Gateway, r.gateway6} {
		if !gateway.IsValid() {
			continue
		}
		r.rule(conn, forward, r.from(), source(i), []expr.Any{
			&expr.Lookup{SourceRegister: 1, SetName: e.policies[i].Name, SetID: e.policies[i].ID, IsDestRegSet: true},
		})
		for _, number := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP} {
			r.rule(conn, resolve, r.from(), source(i), []expr.Any{
				&expr.Lookup{SourceRegister: 1, SetName: e.askers[i].Name, SetID: e.askers[i].ID},
			}, toDNS(number), []expr.Any{
				&expr.Immediate{Register: 1, Data: gateway.AsSlice()},
				&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(families[i].number), RegAddrMin: 1},
			})
		}
	}
	return nil
}

// source loads the address that a packet of a family comes from.
func source(i int) []expr.Any {
	return append(isFamily(i),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: families[i].source, Len: families[i].size})
}

// SetEgress has an endpoint reach what a policy allows, and nothing else, from the moment that
// it returns; the zero Policy takes all its rules away. Connections that are open and that the
// policy forbids are cut. What names are pinned to stays, for the names that are still allowed.
// A policy that is in force already costs nothing. The network must be open.
func (n *Network) SetEgress(ctx context.Context, ep Endpoint, p egress.Policy) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("set egress of %s: %w", ep.ID, err)
	}
	if strings.Contains(ep.ID, separator) || len(ep.ID) > maxComment {
		return fmt.Errorf("set egress: ID %q: %w", ep.ID, errs.ErrInvalid)
	}
	if err := n.rules.setEgress(ep, p); err != nil {
		return fmt.Errorf("set egress of %s: %w", ep.ID, err)
	}
	return nil
}

// Egress is the policy that is in force for an ID, the zero Policy where none was set; false
// means that it is not known which, or that it is not in force in full.
func (n *Network) Egress(id string) (egress.Policy, bool) {
	switch p := n.rules.egress.get(id); {
	case p == nil:
		return egress.Policy{}, true
	case p.unknown || p.uncut:
		return egress.Policy{}, false
	default:
		return p.policy, true
	}
}

// EgressOf is the policy in force for whoever sends from an address. Where it is not known
// which, it is one that closes all.
func (n *Network) EgressOf(source netip.Addr) egress.Policy {
	switch p := n.rules.egress.bySender(source); {
	case p == nil:
		return egress.Policy{}
	case p.unknown:
		return egress.Policy{Closed: "a policy that is not known yet"}
	default:
		return p.policy
	}
}

// EgressRules names the IDs that have rules of their own.
func (n *Network) EgressRules(_ context.Context) ([]string, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	found, err := n.rules.egress.read(conn)
	if err != nil {
		return nil, fmt.Errorf("list egress rules: %w", err)
	}
	return slices.Sorted(maps.Keys(found)), nil
}

// Ground is what all sandboxes of the instance are kept to.
func (n *Network) Ground() egress.Ground { return n.rules.ground() }

func (r *ruleset) setEgress(ep Endpoint, p egress.Policy) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := r.setEgressLocked(ep, p)
	if r.reloaded(&err) {
		err = r.setEgressLocked(ep, p)
	}
	return err
}

// +checklocks:r.mu
func (r *ruleset) setEgressLocked(ep Endpoint, p egress.Policy) error {
	old := r.egress.get(ep.ID)
	next := r.place(ep, p, old)
	switch {
	case old == nil && !p.Restricts():
		if !p.Equal(egress.Policy{}) {
			r.egress.put(next)
		}
		return nil
	case old != nil && old.chain == next.chain && old.leadsAs(next):
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

// noteCut notes, in the kernel first, that no connection is open that the policy forbids.
//
// +checklocks:r.mu
func (r *ruleset) noteCut(p *placed) error {
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
		return fmt.Errorf("commit: %w", err)
	}
	r.egress.put(&cut)
	return nil
}

// place is what a policy needs in the kernel, with the pins of the old one that it allows.
func (r *ruleset) place(ep Endpoint, p egress.Policy, old *placed) *placed {
	next := &placed{id: ep.ID, sources: [2]netip.Addr{ep.Address, ep.Address6}, policy: p, pins: map[netip.Addr]egress.Pin{}}
	if !r.gateway6.IsValid() {
		next.sources[1] = netip.Addr{}
	}
	if !p.Restricts() {
		next.sources = [2]netip.Addr{}
		return next
	}
	next.chain, next.uncut = chainName(ep, p), p.Pins()
	if p.Asks() {
		next.asking = next.sources
	}
	if old != nil && old.chain == next.chain && !old.leadsAs(next) { // somebody took elements away
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

// exchange puts next in the place of old, which may be nil, in one transaction.
//
// +checklocks:r.mu
func (r *ruleset) exchange(old, next *placed) error {
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
	if err := r.commit(conn); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// addPolicy adds a sandbox's chain and sets.
func (r *ruleset) addPolicy(conn *nftables.Conn, old, next *placed) error {
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
		r.rule(conn, chain, inSet(allow[i], i), accept())
	}
	if p.Pins() {
		pins := e.pinSets(next.id)
		for i, set := range pins {
			next.sets = append(next.sets, set.Name)
			if err := e.carryPins(conn, set, i, old, next); err != nil {
				return err
			}
			r.rule(conn, chain, inSet(set, i), accept())
		}
		// What a name allowed to begin goes on after its pin; what is forbidden was cut.
		r.rule(conn, chain, established(), accept())
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

// point has packets of a sandbox go through its chain, and its questions to our resolver.
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
		if p.policy.Asks() {
			if err := e.addAsker(conn, i, a, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// addAsker has questions from an address go to our resolver. What is to be remembered across
// the death of this process stands beside the element.
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

// remove takes all away that is in the kernel for an ID.
func (e *egressTable) remove(conn *nftables.Conn, old *placed) error {
	return e.replace(conn, old, &placed{id: old.id})
}

// replace takes away what is in the kernel for an ID and what next does not go on with.
func (e *egressTable) replace(conn *nftables.Conn, old, next *placed) error {
	for i, a := range old.sources {
		if !a.IsValid() {
			continue
		}
		// Added first, since there is no removing of what may be missing.
		if err := conn.SetAddElements(e.askers[i], []nftables.SetElement{{Key: a.AsSlice()}}); err != nil {
			return fmt.Errorf("add to set %s: %w", e.askers[i].Name, err)
		}
		for _, set := range []*nftables.Set{e.policies[i], e.askers[i]} {
			if err := conn.SetDeleteElements(set, []nftables.SetElement{{Key: a.AsSlice()}}); err != nil {
				return fmt.Errorf("remove from %s: %w", set.Name, err)
			}
		}
	}
	for _, name := range []string{old.chain, old.bounds} { // the one that jumps first
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
