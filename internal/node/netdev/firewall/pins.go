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

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/nftset"
)

const (
	// maxPins bounds the addresses that a sandbox's names are pinned to; the one that would
	// end first makes room.
	maxPins = 1024
	// pinAhead is how much longer than asked for a pin is set, so that the same answer a
	// moment later finds it long enough.
	pinAhead = 5 * time.Minute
	// pinEnding is the time of a pin that is set only to be removed.
	pinEnding = time.Minute
	// maxComment is what fits beside an element: a name at least.
	maxComment = 253
)

// Pins are the addresses that an ID reaches because names are allowed, in order.
func (ps Policies) Pins(id string) (pins []egress.Pin) {
	e := ps.rules.egress
	e.mu.RLock()
	defer e.mu.RUnlock()
	p := e.placed[id]
	if p == nil {
		return nil
	}
	for _, pin := range p.pins {
		if time.Until(pin.Until) > 0 {
			pins = append(pins, pin)
		}
	}
	slices.SortFunc(pins, func(a, b egress.Pin) int { return a.Address.Compare(b.Address) })
	return pins
}

// Pin makes the addresses of a name reachable for the sandbox with an address, for keep at least,
// and returns those that it may reach: none that the host's rules close. If the policy does not
// use pins, it returns all and does nothing. A name that the policy does not allow, or no longer,
// is an errs.ErrForbidden.
func (ps Policies) Pin(ctx context.Context, source netip.Addr, name string, addrs []netip.Addr, keep time.Duration) ([]netip.Addr, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("pin %s: %w", name, err)
	}
	if !ps.EgressOf(source).UsesResolver() {
		return addrs, nil
	}
	pinned, err := ps.rules.pin(source, name, addrs, keep)
	if err != nil {
		return nil, fmt.Errorf("pin %s: %w", name, err)
	}
	return pinned, nil
}

func (r *Rules) pin(source netip.Addr, name string, addrs []netip.Addr, keep time.Duration) (pinned []netip.Addr, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	host := r.hostRules()
	for _, a := range addrs {
		if a = a.Unmap(); host.Open(a) {
			pinned = append(pinned, a)
		}
	}
	err = r.pinLocked(source, name, pinned, keep)
	if r.reloaded(&err) {
		err = r.pinLocked(source, name, pinned, keep)
	}
	return pinned, err
}

// +checklocks:r.mu
func (r *Rules) pinLocked(source netip.Addr, name string, addrs []netip.Addr, keep time.Duration) error {
	p := r.egress.bySender(source)
	if p == nil {
		return nil // it has no policy any more
	}
	if _, ok := p.policy.Match(name); !ok || !p.policy.Pins() {
		return fmt.Errorf("the name is not allowed: %w", errs.ErrForbidden)
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	now := time.Now()
	changed := map[netip.Addr]egress.Pin{}
	for _, a := range addrs {
		was := p.pins[a]
		if slices.Contains(was.Names, name) && was.Until.Sub(now) > keep {
			continue
		}
		until := now.Add(keep + pinAhead)
		if was.Until.After(until) {
			until = was.Until
		}
		changed[a] = egress.Pin{Address: a, Names: namesWith(was.Names, name), Until: until}
	}
	if len(changed) == 0 {
		return nil
	}
	return r.writePins(p, changed, now)
}

// writePins sets pins in the kernel, making room for them.
//
// +checklocks:r.mu
func (r *Rules) writePins(p *placed, changed map[netip.Addr]egress.Pin, now time.Time) error {
	conn, err := r.connect()
	if err != nil {
		return err
	}
	gone := surplus(p.pins, changed)
	var removed, added [2][]nftables.SetElement
	for a := range changed {
		gone = append(gone, a)
		added[familyOf(a)] = append(added[familyOf(a)], pinElement(changed[a], now))
	}
	for _, a := range gone {
		if _, ok := p.pins[a]; ok {
			removed[familyOf(a)] = append(removed[familyOf(a)], nftables.SetElement{Key: a.AsSlice(), Timeout: pinEnding})
		}
	}
	for i, set := range r.egress.pinSets(p.id) {
		if err := exchangePins(conn, set, removed[i], added[i]); err != nil {
			return err
		}
	}
	if err := r.commit(conn); err != nil {
		return err
	}
	r.egress.notePins(p, gone, changed)
	return nil
}

func (e *egressTable) notePins(p *placed, gone []netip.Addr, changed map[netip.Addr]egress.Pin) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, a := range gone {
		delete(p.pins, a)
	}
	for a, pin := range p.pins {
		if time.Until(pin.Until) <= 0 {
			delete(p.pins, a)
		}
	}
	maps.Copy(p.pins, changed)
}

// surplus are the pins that must go to make room for others, those that end first.
func surplus(pins, added map[netip.Addr]egress.Pin) (gone []netip.Addr) {
	var rest []egress.Pin
	for a, pin := range pins {
		if _, ok := added[a]; !ok {
			rest = append(rest, pin)
		}
	}
	over := len(rest) + len(added) - maxPins
	if over <= 0 {
		return nil
	}
	slices.SortFunc(rest, func(a, b egress.Pin) int { return a.Until.Compare(b.Until) })
	for _, pin := range rest[:min(over, len(rest))] {
		gone = append(gone, pin.Address)
	}
	return gone
}

// namesWith puts a name before others, as many as can be written beside an element.
func namesWith(names []string, name string) []string {
	all := []string{name}
	length := len(name)
	for _, other := range names {
		if length += len(other) + 1; other != name && length <= maxComment {
			all = append(all, other)
		}
	}
	return all
}

// pinSets are a sandbox's sets of pinned addresses, by family.
func (e *egressTable) pinSets(id string) (sets [2]*nftables.Set) {
	for i, f := range families {
		sets[i] = &nftables.Set{Table: e.table, Name: id + kindPins + f.suffix, HasTimeout: true, KeyType: f.key}
	}
	return sets
}

// carryPins adds a set of pins if there is none, and brings it to what next has.
func (e *egressTable) carryPins(conn *nftables.Conn, set *nftables.Set, i int, old, next *placed) error {
	fresh := old == nil || !slices.Contains(old.sets, set.Name)
	if fresh {
		return nftset.AddEmpty(conn, set)
	}
	now := time.Now()
	var removed, added []nftables.SetElement
	for a, was := range old.pins {
		pin, kept := next.pins[a]
		if familyOf(a) != i || (kept && len(pin.Names) == len(was.Names)) {
			continue
		}
		removed = append(removed, nftables.SetElement{Key: a.AsSlice(), Timeout: pinEnding})
		if kept {
			added = append(added, pinElement(pin, now))
		}
	}
	return exchangePins(conn, set, removed, added)
}

// exchangePins removes and adds pins of a set.
func exchangePins(conn *nftables.Conn, set *nftables.Set, removed, added []nftables.SetElement) error {
	for part := range slices.Chunk(removed, nftset.MaxElements) {
		if err := conn.SetAddElements(set, part); err != nil { // first, since a pin may expire at this moment
			return fmt.Errorf("hold pins: %w", err)
		}
		if err := conn.SetDeleteElements(set, part); err != nil {
			return fmt.Errorf("remove pins: %w", err)
		}
	}
	for part := range slices.Chunk(added, nftset.MaxElements/2) { // names are long
		if err := conn.SetAddElements(set, part); err != nil {
			return fmt.Errorf("add pins: %w", err)
		}
	}
	return nil
}

func pinElement(pin egress.Pin, now time.Time) nftables.SetElement {
	return nftables.SetElement{Key: pin.Address.AsSlice(), Timeout: pin.Until.Sub(now), Comment: strings.Join(pin.Names, " ")}
}

// readPins adds to pins what a set in the kernel has.
func readPins(conn *nftables.Conn, set *nftables.Set, pins map[netip.Addr]egress.Pin) error {
	elements, err := conn.GetSetElements(set)
	if err != nil {
		return fmt.Errorf("read set %s: %w", set.Name, err)
	}
	now := time.Now()
	for _, element := range elements {
		if a, ok := netip.AddrFromSlice(element.Key); ok {
			pins[a] = egress.Pin{Address: a, Names: strings.Fields(element.Comment), Until: now.Add(element.Expires)}
		}
	}
	return nil
}
