package firewall

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/netdev/conntrack"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall/nftset"
	"github.com/barchan-dev/barchan/internal/node/netdev/rates"
)

// Names of sets. Those of IPv6 end in a 6.
const (
	setPorts     = "ports"     // who may send: link, hardware address, address
	setNotPublic = "notpublic" // where no sandbox may send
	setReachable = "reachable" // exceptions from it
	setResolvers = "resolvers" // who may be asked on port 53
	setSenders   = "senders"   // who has connections
)

// Config names one instance's rules.
type Config struct {
	// Table names the bridge and the inet table; the egress table has it as a prefix.
	Table string
	// Bridge is the link that sandboxes' packets arrive from.
	Bridge string
	// PortPrefix begins the names of all host links of the instance.
	PortPrefix string
	// Subnet and Subnet6 are the sandboxes' ranges; a zero Subnet6 means no IPv6.
	Subnet, Subnet6 netip.Prefix
	// Gateway and Gateway6 are the bridge's addresses; Gateway6 is the zero value without IPv6.
	Gateway, Gateway6 netip.Addr
	// Resolvers accept DNS queries from sandboxes, even at private addresses.
	Resolvers []netip.Addr
	// Reachable are private ranges that sandboxes may reach.
	Reachable []netip.Prefix
	// Connections is how many connections of one sandbox the kernel tracks at once; 0: any number.
	Connections uint32
	// Rates bound what one sandbox sends and receives.
	Rates rates.Limits
}

// Endpoint is a sandbox's ID and addresses.
type Endpoint struct {
	// ID is unique in the instance; it becomes part of file names.
	ID      string
	Address netip.Addr
	// Address6 is the zero value without IPv6.
	Address6 netip.Addr
}

// Port is the bridge port of an endpoint.
type Port struct {
	Endpoint
	// Link is the name of the host's end of the veth pair.
	Link string
	// MAC is the only hardware address that the port may send from.
	MAC net.HardwareAddr
}

// Rules are an instance's tables, and safe for concurrent use. The bridge table drops spoofed
// packets of a port first. The inet table of the same name limits the destinations of all
// sandboxes, and translates addresses. The egress table (table.go) has the policies of single
// sandboxes: a packet passes only if both tables accept it.
type Rules struct {
	cfg    Config
	bridge *nftables.Table
	inet   *nftables.Table
	ports  [2]*nftables.Set // by family, as all pairs here: IPv4 first
	egress *egressTable

	mu      sync.Mutex     // one transaction at a time
	conn    *nftables.Conn // +checklocks:mu
	settled bool           // +checklocks:mu
	// installed counts the rules of Install; nil after Remove.
	installed map[string]int  // +checklocks:mu
	flows     conntrack.Table // +checklocks:mu
}

// New changes nothing in the kernel.
func New(cfg Config) *Rules {
	r := &Rules{
		cfg:    cfg,
		bridge: &nftables.Table{Name: cfg.Table, Family: nftables.TableFamilyBridge},
		inet:   &nftables.Table{Name: cfg.Table, Family: nftables.TableFamilyINet},
		egress: newEgressTable(cfg.Table),
	}
	for i, f := range families {
		r.ports[i] = &nftables.Set{
			Table: r.bridge, Name: setPorts + f.suffix, Concatenation: true,
			KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeEtherAddr, f.key),
		}
	}
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

// Install replaces the bridge and the inet table in one transaction and keeps admitted ports. It
// keeps the egress policies that it finds in the kernel.
func (r *Rules) Install() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	conn, err := r.connect()
	if err != nil {
		return err
	}
	var known [2][]nftables.SetElement
	for i, set := range r.ports {
		if known[i], err = nftset.Elements(conn, set); err != nil {
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
		if err := nftset.Add(conn, set, known[i]); err != nil {
			return err
		}
	}
	r.addBridgeChain(conn)
	if err := rates.Add(conn, r.bridge, r.cfg.PortPrefix, r.cfg.Rates); err != nil {
		return err
	}
	if err := r.addInet(conn); err != nil {
		return err
	}
	if err := r.addEgress(conn); err != nil {
		return err
	}
	if err := r.commit(conn); err != nil {
		return err
	}
	r.installed, err = r.count()
	return err
}

// Remove deletes all tables.
func (r *Rules) Remove() error {
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
	r.installed = nil
	return nil
}

// Admit lets a port send from its addresses. Invalid addresses are skipped.
func (r *Rules) Admit(p Port) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	conn, err := r.connect()
	if err != nil {
		return err
	}
	for i, keys := range portKeys(p) {
		if len(keys) == 0 {
			continue
		}
		if err := conn.SetAddElements(r.ports[i], keys); err != nil {
			return fmt.Errorf("admit %s: %w", p.Link, err)
		}
	}
	if err := r.commit(conn); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("admit %s: %w", p.Link, err)
	}
	return nil
}

// Forget revokes Admit and removes the egress rules of the ID, in one transaction. It looks up
// unknown addresses. A port that was never admitted is success.
func (r *Rules) Forget(p Port) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.Address.IsValid() {
		if !p.Address6.IsValid() {
			p.Address6 = ipam.Beside(r.cfg.Subnet6, p.Address)
		}
		if err := r.forgetLocked(p.ID, portKeys(p)); !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	err := r.lookUpAndForget(p.ID, p.Link) // the addresses differ from the admitted ones
	if r.reloaded(&err) {
		err = r.lookUpAndForget(p.ID, p.Link)
	}
	return err
}

// +checklocks:r.mu
func (r *Rules) lookUpAndForget(id, link string) error {
	keys, err := r.keysOf(link)
	if err != nil {
		return err
	}
	return r.forgetLocked(id, keys)
}

// +checklocks:r.mu
func (r *Rules) forgetLocked(id string, keys [2][]nftables.SetElement) error {
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
func (r *Rules) keysOf(link string) (keys [2][]nftables.SetElement, err error) {
	conn, err := r.connect()
	if err != nil {
		return keys, err
	}
	for i, set := range r.ports {
		known, err := nftset.Elements(conn, set)
		if err != nil {
			return keys, err
		}
		keys[i] = slices.DeleteFunc(known, func(e nftables.SetElement) bool { return !bytes.HasPrefix(e.Key, linkKey(link)) })
	}
	return keys, nil
}

// reloaded reads the kernel's state again if a transaction failed because its state was outdated:
// another program may have flushed rules, and elements time out. It reports whether to retry.
//
// +checklocks:r.mu
func (r *Rules) reloaded(failure *error) bool {
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

// portKeys are a port's elements in the sets of ports, by family; each part of a key fills whole
// 32-bit registers.
func portKeys(p Port) (keys [2][]nftables.SetElement) {
	for i, a := range []netip.Addr{p.Address, p.Address6} {
		if !a.IsValid() {
			continue
		}
		key := append(linkKey(p.Link), p.MAC...)
		key = append(append(key, 0, 0), a.AsSlice()...)
		keys[i] = append(keys[i], nftables.SetElement{Key: key})
	}
	return keys
}
