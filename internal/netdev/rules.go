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
	"golang.org/x/sys/unix"
)

// notPublic are the ranges that a sandbox never reaches by default: private, link-local (with
// the metadata address of clouds), shared, documentation, multicast and reserved ones.
var notPublic = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("10.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.0.0.0/24"),
	netip.MustParsePrefix("192.0.2.0/24"),
	netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("198.18.0.0/15"),
	netip.MustParsePrefix("198.51.100.0/24"),
	netip.MustParsePrefix("203.0.113.0/24"),
	netip.MustParsePrefix("224.0.0.0/3"),
}

const (
	setPorts     = "ports"     // who may send: link, hardware address, address
	setNotPublic = "notpublic" // where nobody may send
	setReachable = "reachable" // exceptions from it
	setResolvers = "resolvers" // who may be asked on port 53
)

// ruleset is an instance's two tables of the same name. The bridge table drops all that a
// port sends in a name that is not its own, before anything else sees it; the inet table
// decides where sandboxes may send to, and translates.
type ruleset struct {
	cfg    Config
	bridge *nftables.Table
	inet   *nftables.Table
	ports  *nftables.Set

	mu sync.Mutex // one transaction at a time
}

func newRuleset(cfg Config) *ruleset {
	r := &ruleset{
		cfg:    cfg,
		bridge: &nftables.Table{Name: cfg.Table, Family: nftables.TableFamilyBridge},
		inet:   &nftables.Table{Name: cfg.Table, Family: nftables.TableFamilyINet},
	}
	r.ports = &nftables.Set{
		Table: r.bridge, Name: setPorts, Concatenation: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeEtherAddr, nftables.TypeIPAddr),
	}
	return r
}

// install replaces both tables in one transaction, keeping the ports that are known already.
func (r *ruleset) install() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	known, err := r.knownPorts(conn)
	if err != nil {
		return err
	}
	for _, t := range []*nftables.Table{r.bridge, r.inet} {
		conn.AddTable(t) // so that removing it cannot fail
		conn.DelTable(t)
		conn.AddTable(t)
	}
	if err := conn.AddSet(r.ports, known); err != nil {
		return fmt.Errorf("add set %s: %w", setPorts, err)
	}
	r.addBridgeChain(conn)
	if err := r.addInet(conn); err != nil {
		return err
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

func (r *ruleset) knownPorts(conn *nftables.Conn) ([]nftables.SetElement, error) {
	// Asked first, because the library does not tell the cause when a set is missing.
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyBridge)
	if err != nil {
		return nil, fmt.Errorf("list tables: %w", err)
	}
	ours := func(t *nftables.Table) bool { return t.Name == r.cfg.Table }
	if !slices.ContainsFunc(tables, ours) {
		return nil, nil
	}
	elements, err := conn.GetSetElements(r.ports)
	if err != nil {
		return nil, fmt.Errorf("read set %s: %w", setPorts, err)
	}
	return elements, nil
}

// remove takes both tables away.
func (r *ruleset) remove() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	for _, t := range []*nftables.Table{r.bridge, r.inet} {
		conn.AddTable(t)
		conn.DelTable(t)
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("remove rules of %s: %w", r.cfg.Table, err)
	}
	return nil
}

// admit lets a port send in the name of an address.
func (r *ruleset) admit(link string, addr netip.Addr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	if err := conn.SetAddElements(r.ports, []nftables.SetElement{{Key: portKey(link, addr)}}); err != nil {
		return fmt.Errorf("admit %s: %w", link, err)
	}
	if err := conn.Flush(); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("admit %s: %w", link, err)
	}
	return nil
}

// forget takes back what admit gave; without an address, it looks for the link's.
func (r *ruleset) forget(link string, addr netip.Addr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	keys := [][]byte{}
	if addr.IsValid() {
		keys = append(keys, portKey(link, addr))
	} else if keys, err = r.keysOf(conn, link); err != nil {
		return err
	}
	for _, key := range keys {
		if err := conn.SetDeleteElements(r.ports, []nftables.SetElement{{Key: key}}); err != nil {
			return fmt.Errorf("forget %s: %w", link, err)
		}
		if err := conn.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("forget %s: %w", link, err)
		}
	}
	return nil
}

func (r *ruleset) keysOf(conn *nftables.Conn, link string) (keys [][]byte, err error) {
	known, err := r.knownPorts(conn)
	if err != nil {
		return nil, err
	}
	for _, e := range known {
		if bytes.HasPrefix(e.Key, linkKey(link)) {
			keys = append(keys, e.Key)
		}
	}
	return keys, nil
}

// linkKey is a link's name as the kernel compares it.
func linkKey(link string) []byte {
	key := make([]byte, unix.IFNAMSIZ)
	copy(key, link)
	return key
}

// portKey is an element of the set of ports; each part fills whole 32-bit registers.
func portKey(link string, addr netip.Addr) []byte {
	key := append(linkKey(link), MACOf(addr)...)
	key = append(key, 0, 0)
	ip := addr.As4()
	return append(key, ip[:]...)
}

// Registers that the parts of a port's key are loaded into, one after the other.
const (
	regLink = unix.NFT_REG32_00
	regMAC  = unix.NFT_REG32_04
	regIP   = unix.NFT_REG32_06
)

// addBridgeChain lets a port of ours send IPv4 and ARP in its own name only.
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
	// Where the sender's protocol address stands: in the IP header, and in ARP's.
	for protocol, offset := range map[uint16]uint32{unix.ETH_P_IP: 12, unix.ETH_P_ARP: 14} {
		rule := append(append([]expr.Any{}, ours...),
			&expr.Meta{Key: expr.MetaKeyPROTOCOL, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(protocol)},
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: regLink},
			&expr.Payload{DestRegister: regMAC, Base: expr.PayloadBaseLLHeader, Offset: 6, Len: 6},
			&expr.Payload{DestRegister: regIP, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4},
			&expr.Lookup{SourceRegister: regLink, SetName: setPorts, SetID: r.ports.ID},
			&expr.Verdict{Kind: expr.VerdictAccept},
		)
		conn.AddRule(&nftables.Rule{Table: r.bridge, Chain: chain, Exprs: rule})
	}
	conn.AddRule(&nftables.Rule{Table: r.bridge, Chain: chain, Exprs: append(ours, &expr.Verdict{Kind: expr.VerdictDrop})})
}
