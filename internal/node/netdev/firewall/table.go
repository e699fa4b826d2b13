package firewall

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"sync"

	"github.com/google/nftables"

	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/nftset"
)

// The egress table of an instance has the policies of single sandboxes:
//
//	forward ─ verdict map by source address ─→ the sandbox's own chain ─→ refuse
//	resolve ─ set of source addresses ─→ DNS goes to our resolver, whatever server it asks
//
// A chain and its sets are immutable: a new policy gets new ones and replaces one element of the
// map, in one transaction, so that no packet passes between two policies. Only the sets of pinned
// addresses change, and outlive a policy. Opening the instance again removes nothing here.
const (
	setPolicies = "policies"
	setAskers   = "askers"
	chainRefuse = "refuse"
	// rulesFormat is part of chain names: chains of another format are replaced.
	rulesFormat = "1"
)

// egressTable is the table and its known content.
type egressTable struct {
	table    *nftables.Table
	policies [2]*nftables.Set
	askers   [2]*nftables.Set

	mu       sync.RWMutex
	bySource map[netip.Addr]string // +checklocks:mu
	placed   map[string]*placed    // +checklocks:mu
}

// placed are the kernel objects of one ID. It is immutable, except for pins: the holder of
// Rules.mu changes them under egressTable.mu.
type placed struct {
	id      string
	sources [2]netip.Addr
	// asking are the sources whose DNS queries go to our resolver.
	asking [2]netip.Addr
	// policy is enforced by the chain; unknown means that the chain was found in the kernel.
	policy  egress.Policy
	unknown bool
	// chain is empty if the policy needs none.
	chain string
	// bounds is the chain of the policy's bounds; empty if it has none.
	bounds string
	sets   []string
	pins   map[netip.Addr]egress.Pin
	// uncut means that connections may be open that the policy forbids.
	uncut bool
}

// matchesAs reports whether the same packets go to the chain and to our resolver.
func (p *placed) matchesAs(q *placed) bool { return p.sources == q.sources && p.asking == q.asking }

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

// bySender finds the objects of a source address; nil if it has none.
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
	maps.DeleteFunc(e.bySource, func(_ netip.Addr, owner string) bool { return owner == id })
}

func (e *egressTable) reset() {
	e.mu.Lock()
	defer e.mu.Unlock()
	clear(e.bySource)
	clear(e.placed)
}

// load reads the kernel's state. A known policy stays known if its chain is unchanged.
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
		case now != nil && now.chain == was.chain && now.matchesAs(was):
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

// read finds chains, sets and pins by their names, and their owners by the map's elements.
func (e *egressTable) read(conn *nftables.Conn) (map[string]*placed, error) {
	found := map[string]*placed{}
	sets, err := nftset.List(conn, e.table)
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

// readChains records the owner of each chain.
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

// readSources records which source addresses go to chains and to our resolver.
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

// commentUncut marks a source that may have open connections that the policy forbids.
const commentUncut = "uncut"

// Names of a sandbox's objects end in their kind: "ID.hash", "ID.hash.allow", "ID.pins"; bounds
// have further kinds.
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

// chainName hashes all inputs of a chain, so that a restart recognizes an unchanged chain.
func chainName(ep Endpoint, p egress.Policy) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %s %+v", rulesFormat, ep.Address, ep.Address6, p))
	return ep.ID + separator + hex.EncodeToString(sum[:8])
}
