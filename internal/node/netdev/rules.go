package netdev

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/ipam"
)

// Names of sets. Those of IPv6 end in a 6.
const (
	setPorts     = "ports"     // who may send: link, hardware address, address
	setNotPublic = "notpublic" // where nobody may send
	setReachable = "reachable" // exceptions from it
	setResolvers = "resolvers" // who may be asked on port 53
)

// ruleset is an instance's tables. The bridge table drops all that a port sends in a name that
// is not its own, before anything else sees it; the inet table of the same name decides where
// any sandbox may send to, and translates. What single sandboxes may not reach besides is in a
// table of its own (egress.go): a packet passes only where both let it.
type ruleset struct {
	cfg      Config
	gateway6 netip.Addr // the zero value where there is no IPv6
	bridge   *nftables.Table
	inet     *nftables.Table
	ports    [2]*nftables.Set // by family, as all pairs here: IPv4 first
	egress   *egressTable
	flows    *netlink.Handle // to connections; nil before it is needed; +checklocks:mu

	mu      sync.Mutex     // one transaction at a time
	conn    *nftables.Conn // +checklocks:mu
	settled bool           // +checklocks:mu
}

func newRuleset(cfg Config) *ruleset {
	r := &ruleset{
		cfg:      cfg,
		gateway6: gateway6(cfg),
		bridge:   &nftables.Table{Name: cfg.Table, Family: nftables.TableFamilyBridge},
		inet:     &nftables.Table{Name: cfg.Table, Family: nftables.TableFamilyINet},
	}
	for i, f := range families {
		r.ports[i] = &nftables.Set{
			Table: r.bridge, Name: setPorts + f.suffix, Concatenation: true,
			KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeEtherAddr, f.key),
		}
	}
	r.egress = newEgressTable(cfg.Table)
	return r
}

// family is what differs between IPv4 and IPv6.
type family struct {
	suffix           string // of sets' names
	key              nftables.SetDatatype
	number           byte
	etherType        uint16
	source, to, size uint32 // offsets and length of addresses in the header
}

var families = [2]family{
	{"", nftables.TypeIPAddr, unix.NFPROTO_IPV4, unix.ETH_P_IP, 12, 16, 4},
	{"6", nftables.TypeIP6Addr, unix.NFPROTO_IPV6, unix.ETH_P_IPV6, 8, 24, 16},
}

// familyOf is the index of an address's family.
func familyOf(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// install replaces both tables in one transaction, keeping the ports that are known already.
func (r *ruleset) install() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	conn, err := r.connect()
	if err != nil {
		return err
	}
	var known [2][]nftables.SetElement
	for i, set := range r.ports {
		if known[i], err = elementsOf(conn, set); err != nil {
			return err
		}
	}
	if err := r.egress.load(conn); err != nil {
		return err
	}
	for _, t := range []*nftables.Table{r.bridge, r.inet} {
		conn.AddTable(t) // so that removing it cannot fail
		conn.DelTable(t)
		conn.AddTable(t)
	}
	for i, set := range r.ports {
		if err := addSet(conn, set, known[i]); err != nil {
			return err
		}
	}
	r.addBridgeChain(conn)
	if err := r.addInet(conn); err != nil {
		return err
	}
	if err := r.addEgress(conn); err != nil {
		return err
	}
	if err := r.commit(conn); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// elementsOf reads a set; one that does not exist has none.
func elementsOf(conn *nftables.Conn, set *nftables.Set) ([]nftables.SetElement, error) {
	sets, err := setsOf(conn, set.Table)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(sets, func(s *nftables.Set) bool { return s.Name == set.Name }) {
		return nil, nil
	}
	elements, err := conn.GetSetElements(set)
	if err != nil {
		return nil, fmt.Errorf("read set %s: %w", set.Name, err)
	}
	return elements, nil
}

// setsOf lists a table's sets. The table is looked for first, because the library does not tell
// the cause when one is missing.
func setsOf(conn *nftables.Conn, table *nftables.Table) ([]*nftables.Set, error) {
	tables, err := conn.ListTablesOfFamily(table.Family)
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == table.Name }) {
		return nil, nil
	}
	sets, err := conn.GetSets(table)
	if err != nil {
		return nil, fmt.Errorf("list sets of %s: %w", table.Name, err)
	}
	return sets, nil
}

// maxElements is how many elements fit into one message with room to spare.
const maxElements = 500

// addSet adds a set with any number of elements.
func addSet(conn *nftables.Conn, set *nftables.Set, elements []nftables.SetElement) error {
	if err := addEmptySet(conn, set); err != nil {
		return err
	}
	for part := range slices.Chunk(elements, maxElements) {
		if err := conn.SetAddElements(set, part); err != nil {
			return fmt.Errorf("fill set %s: %w", set.Name, err)
		}
	}
	return nil
}

// numbering is held while a set gets its number: the library counts them in one variable for all
// connections of the process, and does not guard it.
var numbering sync.Mutex

func addEmptySet(conn *nftables.Conn, set *nftables.Set) error {
	numbering.Lock()
	defer numbering.Unlock()
	if err := conn.AddSet(set, nil); err != nil {
		return fmt.Errorf("add set %s: %w", set.Name, err)
	}
	return nil
}

// remove takes all tables away.
func (r *ruleset) remove() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	conn, err := r.connect()
	if err != nil {
		return err
	}
	for _, t := range []*nftables.Table{r.bridge, r.inet, r.egress.table} {
		conn.AddTable(t)
		conn.DelTable(t)
	}
	if err := r.commit(conn); err != nil {
		return fmt.Errorf("remove rules of %s: %w", r.cfg.Table, err)
	}
	r.egress.reset()
	return nil
}

// admit lets a port send in the name of its IPv4 address, and of the IPv6 address beside it
// where there is one. Addresses that are the zero value are left out.
func (r *ruleset) admit(link string, addrs ...netip.Addr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	conn, err := r.connect()
	if err != nil {
		return err
	}
	for i, keys := range portKeys(link, addrs) {
		if len(keys) == 0 {
			continue
		}
		if err := conn.SetAddElements(r.ports[i], keys); err != nil {
			return fmt.Errorf("admit %s: %w", link, err)
		}
	}
	if err := r.commit(conn); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("admit %s: %w", link, err)
	}
	return nil
}

// forget takes back what admit gave a port. Nothing there is success.
func (r *ruleset) forget(link string, addrs ...netip.Addr) error {
	return r.forgetEndpoint("", link, addrs...)
}

// forgetEndpoint takes back what admit gave a port and the egress rules of an ID, in one
// transaction. Addresses that are not known are looked for. Nothing there is success.
func (r *ruleset) forgetEndpoint(id, link string, addrs ...netip.Addr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	addrs = slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return !a.IsValid() })
	if len(addrs) == 1 {
		if beside := ipam.Beside(r.cfg.Subnet6, addrs[0]); beside.IsValid() {
			addrs = append(addrs, beside)
		}
	}
	if len(addrs) > 0 {
		if err := r.forgetLocked(id, portKeys(link, addrs)); !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	err := r.lookAndForget(id, link) // something is not as known
	if r.reloaded(&err) {
		err = r.lookAndForget(id, link)
	}
	return err
}

// +checklocks:r.mu
func (r *ruleset) lookAndForget(id, link string) error {
	keys, err := r.keysOf(link)
	if err != nil {
		return err
	}
	return r.forgetLocked(id, keys)
}

// +checklocks:r.mu
func (r *ruleset) forgetLocked(id string, keys [2][]nftables.SetElement) error {
	conn, err := r.connect()
	if err != nil {
		return err
	}
	for i, elements := range keys {
		if len(elements) == 0 {
			continue
		}
		if err := conn.SetDeleteElements(r.ports[i], elements); err != nil {
			return fmt.Errorf("forget port: %w", err)
		}
	}
	if old := r.egress.get(id); old != nil {
		if err := r.egress.remove(conn, old); err != nil {
			return fmt.Errorf("forget egress of %s: %w", id, err)
		}
	}
	if err := r.commit(conn); err != nil {
		return fmt.Errorf("forget rules: %w", err)
	}
	r.egress.drop(id)
	return nil
}

// keysOf finds a link's elements of the sets of ports.
//
// +checklocks:r.mu
func (r *ruleset) keysOf(link string) (keys [2][]nftables.SetElement, err error) {
	conn, err := r.connect()
	if err != nil {
		return keys, err
	}
	for i, set := range r.ports {
		known, err := elementsOf(conn, set)
		if err != nil {
			return keys, err
		}
		keys[i] = slices.DeleteFunc(known, func(e nftables.SetElement) bool { return !bytes.HasPrefix(e.Key, linkKey(link)) })
	}
	return keys, nil
}

// reloaded reads anew what is in the kernel, if a transaction failed because something was not
// there as known: others may have flushed rules, and elements with a timeout go by themselves.
// Then it reports that the transaction is worth another try.
//
// +checklocks:r.mu
func (r *ruleset) reloaded(failure *error) bool {
	if !errors.Is(*failure, unix.ENOENT) && !errors.Is(*failure, unix.EEXIST) {
		return false
	}
	conn, err := r.connect()
	if err == nil {
		err = r.egress.load(conn)
	}
	if err != nil {
		*failure = errors.Join(*failure, err)
	}
	return err == nil
}

// linkKey is a link's name as the kernel compares it.
func linkKey(link string) []byte {
	key := make([]byte, unix.IFNAMSIZ)
	copy(key, link)
	return key
}

// portKeys are a port's elements of the sets of ports, by family; each part of a key fills whole
// 32-bit registers. The hardware address is that of the IPv4 address, which comes first.
func portKeys(link string, addrs []netip.Addr) (keys [2][]nftables.SetElement) {
	for _, a := range addrs {
		if !a.IsValid() {
			continue
		}
		key := append(linkKey(link), MACOf(addrs[0])...)
		key = append(append(key, 0, 0), a.AsSlice()...)
		keys[familyOf(a)] = append(keys[familyOf(a)], nftables.SetElement{Key: key})
	}
	return keys
}

// Registers that the parts of a port's key are loaded into, one after the other.
const (
	regLink = unix.NFT_REG32_00
	regMAC  = unix.NFT_REG32_04
	regIP   = unix.NFT_REG32_06
)

// arpSender is where ARP has the sender's protocol address.
const arpSender = 14

// addBridgeChain lets a port of ours send IPv4, ARP and, where there is any, IPv6 in its own
// name only.
func (r *ruleset) addBridgeChain(conn *nftables.Conn) {
	chain := conn.AddChain(&nftables.Chain{
		Name: "spoof", Table: r.bridge, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw,
	})
	ours := []expr.Any{
		// By the beginning of its name, so that a port is shut before it is known; not every
		// kernel can compare the name of the port's bridge.
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte(linkPrefix(r.cfg.NetnsPrefix))},
	}
	r.addDiscovery(conn, chain, ours)
	permit := func(etherType uint16, i int, offset uint32) {
		rule := append(append([]expr.Any{}, ours...),
			&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(etherType)},
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: regLink},
			&expr.Payload{DestRegister: regMAC, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6},
			&expr.Payload{DestRegister: regIP, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: families[i].size},
			&expr.Lookup{SourceRegister: regLink, SetName: r.ports[i].Name, SetID: r.ports[i].ID},
			&expr.Verdict{Kind: expr.VerdictAccept},
		)
		conn.AddRule(&nftables.Rule{Table: r.bridge, Chain: chain, Exprs: rule})
	}
	permit(unix.ETH_P_ARP, 0, arpSender)
	for i, f := range families {
		if i == 0 || r.gateway6.IsValid() {
			permit(f.etherType, i, f.source)
		}
	}
	conn.AddRule(&nftables.Rule{Table: r.bridge, Chain: chain, Exprs: append(ours, &expr.Verdict{Kind: expr.VerdictDrop})})
}
