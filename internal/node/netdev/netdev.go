// Package netdev gives each sandbox its network: a named namespace, a veth pair into one
// bridge, and the rules that isolate sandboxes from each other, the host and private
// addresses. It is the only user of netlink, of network namespaces and of nftables. It
// allocates no addresses and starts nothing in a namespace.
//
// Everything it creates has a name from its [Config], so that several instances can share a host and
// be found and removed without a record. Namespaces that [Network.Run] prepares have no name yet: the
// kernel removes them with the process.
package netdev

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/netdev/firewall"
	"github.com/barchan-dev/barchan/internal/node/netdev/rates"
	"github.com/barchan-dev/barchan/internal/node/netdev/rulewatch"
)

// DefaultNetnsDir is the directory of named network namespaces, as ip(8) uses it.
const DefaultNetnsDir = "/run/netns"

const (
	// peerName is the interface's name inside a namespace.
	peerName = "eth0"
	// maxLinkName is the kernel's limit (IFNAMSIZ less the final zero).
	maxLinkName = 15
)

// Config names one instance's network.
type Config struct {
	// Bridge is the name of the bridge, at most 15 characters.
	Bridge string
	// Subnet is the IPv4 range of bridge and sandboxes.
	Subnet netip.Prefix
	// Subnet6 is the IPv6 range beside it; the zero value means that sandboxes have no IPv6.
	Subnet6 netip.Prefix
	// Spares is the number of namespaces that Run prepares for Attach; zero means none.
	Spares int
	// Gateway is the bridge's own address; the zero value means the first of the subnet.
	Gateway netip.Addr
	// Table names the nftables tables.
	Table string
	// NetnsPrefix begins the name of every network namespace.
	NetnsPrefix string
	// NetnsDir holds them; empty means DefaultNetnsDir.
	NetnsDir string
	// Resolvers are the only hosts allowed on port 53, even if private.
	Resolvers []netip.Addr
	// Reachable are private ranges that sandboxes may reach.
	Reachable []netip.Prefix
	// Connections is how many connections of one sandbox the kernel tracks at once; 0: any number.
	Connections uint32
	// Rates bound what one sandbox sends and receives, other than between its own programs.
	Rates rates.Limits
	// MTU of the sandboxes' interfaces; zero means 1500.
	MTU int
	Log *slog.Logger
}

// Endpoint is one sandbox's place in the network.
type Endpoint = firewall.Endpoint

// Attachment describes an attached sandbox's network.
type Attachment struct {
	// NetnsPath is the file of the network namespace.
	NetnsPath string
	// HostLink is the name of the host's end of the veth pair.
	HostLink string
	MAC      net.HardwareAddr
}

// Network is one instance's network. It is safe for concurrent use.
type Network struct {
	// Policies are the sandboxes' egress policies.
	firewall.Policies

	cfg   Config
	log   *slog.Logger
	host  *netlink.Handle
	rules *firewall.Rules

	spares *netnsPool

	mu     sync.Mutex
	bridge netlink.Link // +checklocks:mu
}

// New checks the configuration and changes nothing on the host.
func New(cfg Config) (*Network, error) {
	if cfg.NetnsDir == "" {
		cfg.NetnsDir = DefaultNetnsDir
	}
	if cfg.MTU == 0 {
		cfg.MTU = 1500
	}
	if !cfg.Gateway.IsValid() && cfg.Subnet.IsValid() {
		cfg.Gateway = cfg.Subnet.Masked().Addr().Next()
	}
	if err := check(cfg); err != nil {
		return nil, err
	}
	host, err := netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_INET_DIAG)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	rules := firewall.New(firewall.Config{
		Table: cfg.Table, Bridge: cfg.Bridge, PortPrefix: linkPrefix(cfg.NetnsPrefix), Subnet: cfg.Subnet, Subnet6: cfg.Subnet6,
		Gateway: cfg.Gateway, Gateway6: gateway6(cfg), Resolvers: cfg.Resolvers, Reachable: cfg.Reachable, Connections: cfg.Connections, Rates: cfg.Rates,
	})
	return &Network{
		Policies: rules.Policies(), cfg: cfg, host: host, rules: rules, spares: newNetnsPool(cfg.Spares),
		log: cfg.Log.With("component", "netdev"),
	}, nil
}

func check(cfg Config) error {
	switch {
	case cfg.Log == nil:
		return fmt.Errorf("network: logger required: %w", errs.ErrInvalid)
	case cfg.Bridge == "" || len(cfg.Bridge) > maxLinkName:
		return fmt.Errorf("network bridge %q: want 1 to %d characters: %w", cfg.Bridge, maxLinkName, errs.ErrInvalid)
	case !cfg.Subnet.IsValid() || !cfg.Subnet.Addr().Is4() || cfg.Subnet.Bits() > 30:
		return fmt.Errorf("network subnet %s: want an IPv4 prefix of /30 or larger: %w", cfg.Subnet, errs.ErrInvalid)
	case !cfg.Subnet.Contains(cfg.Gateway):
		return fmt.Errorf("network gateway %s: not in %s: %w", cfg.Gateway, cfg.Subnet, errs.ErrInvalid)
	case cfg.Subnet6.IsValid() && !fitsIPv4(cfg.Subnet6):
		return fmt.Errorf("network IPv6 subnet %s: want an IPv6 prefix of /96 or larger: %w", cfg.Subnet6, errs.ErrInvalid)
	case cfg.Spares < 0:
		return fmt.Errorf("network spares %d: want 0 or more: %w", cfg.Spares, errs.ErrInvalid)
	case cfg.Table == "" || cfg.NetnsPrefix == "":
		return fmt.Errorf("network: table and namespace prefix required: %w", errs.ErrInvalid)
	case strings.ContainsRune(cfg.NetnsPrefix, '/'):
		return fmt.Errorf("network namespace prefix %q: must not contain a slash: %w", cfg.NetnsPrefix, errs.ErrInvalid)
	}
	return cfg.Rates.Check()
}

// Close closes what New opened, and the spares. It leaves the network as it is. Run must have
// ended.
func (n *Network) Close() {
	n.spares.clear()
	n.rules.Close()
	n.host.Close()
}

// Gateway is the bridge's address, the sandboxes' default route.
func (n *Network) Gateway() netip.Addr { return n.cfg.Gateway }

// Gateway6 is the bridge's IPv6 address, the first of the IPv6 range; zero if there is
// no IPv6.
func (n *Network) Gateway6() netip.Addr { return gateway6(n.cfg) }

// Subnet is the range of bridge and sandboxes.
func (n *Network) Subnet() netip.Prefix { return n.cfg.Subnet }

// Open creates the bridge and the rules, or corrects existing ones. Attachments stay; it removes
// leftover spares and links being deleted, also those of an earlier process.
func (n *Network) Open(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("open network: %w", err)
	}
	if n.cfg.NetnsDir == DefaultNetnsDir { // shared with other programs
		if err := shareDir(n.cfg.NetnsDir); err != nil {
			return err
		}
	}
	n.spares.clear()
	bridge, err := n.ensureBridge()
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.bridge = bridge
	n.mu.Unlock()
	if err := n.sweepLinks(); err != nil {
		return err
	}
	if err := n.allowForwarding(ctx); err != nil {
		return err
	}
	if err := n.rules.Install(); err != nil {
		return fmt.Errorf("install rules of %s: %w", n.cfg.Table, err)
	}
	return nil
}

// Watch calls lost whenever another program has removed rules that hold sandboxes back, until ctx is done. lost restores
// them: by Restore, and by Adopt and SetEgress of each attachment. Call it once, after Open.
func (n *Network) Watch(ctx context.Context, lost func()) error {
	return rulewatch.Run(ctx, n.rules.Tables(), func() {
		if intact, err := n.rules.Intact(); err != nil || !intact {
			lost()
		}
	})
}

// Restore writes the rules of all sandboxes again. No attachment can send before it is adopted again, if its port was
// forgotten with them.
func (n *Network) Restore() error { return n.rules.Install() }

// Destroy removes every namespace, link and rule of the instance, and the bridge. Run must have
// ended.
func (n *Network) Destroy(ctx context.Context) error {
	ids, err := n.List(ctx)
	if err != nil {
		return err
	}
	var failures []error
	for _, id := range ids {
		failures = append(failures, n.Detach(ctx, Endpoint{ID: id}))
	}
	n.mu.Lock()
	n.bridge = nil
	n.mu.Unlock()
	n.spares.clear()
	failures = append(failures, n.sweepLinks(), n.rules.Remove())
	if link, err := n.host.LinkByName(n.cfg.Bridge); err == nil {
		if err := n.host.LinkDel(link); err != nil && !missing(err) {
			failures = append(failures, fmt.Errorf("remove bridge %s: %w", n.cfg.Bridge, err))
		}
	} else if !missing(err) {
		failures = append(failures, fmt.Errorf("find bridge %s: %w", n.cfg.Bridge, err))
	}
	return errors.Join(failures...)
}

// List names the IDs whose namespace exists.
func (n *Network) List(_ context.Context) ([]string, error) {
	entries, err := os.ReadDir(n.cfg.NetnsDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list network namespaces: %w", err)
	}
	var ids []string
	for _, e := range entries {
		if id, ok := strings.CutPrefix(e.Name(), n.cfg.NetnsPrefix); ok {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Links names the host's links that are bridge ports, except spares.
func (n *Network) Links(_ context.Context) ([]string, error) {
	bridge, err := n.host.LinkByName(n.cfg.Bridge)
	if missing(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("find bridge %s: %w", n.cfg.Bridge, err)
	}
	links, err := consistentList(n.host.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var names []string
	for _, l := range links {
		if l.Attrs().MasterIndex == bridge.Attrs().Index && !n.isSpare(l.Attrs().Name) {
			names = append(names, l.Attrs().Name)
		}
	}
	return names, nil
}

// NetnsPath is the path of an ID's namespace, which may not exist.
func (n *Network) NetnsPath(id string) string {
	return filepath.Join(n.cfg.NetnsDir, n.cfg.NetnsPrefix+id)
}

// HostLink is the name of the host's end of an ID's veth pair.
func (n *Network) HostLink(id string) string {
	return linkPrefix(n.cfg.NetnsPrefix) + shortHash(id, maxLinkName-linkPrefixLength)
}

// After the instance's prefix, links without an owner have a character that no hash has.
const (
	spareMark  = "-" // without an owner yet
	deleteMark = "_" // to be deleted
)

func (n *Network) newLinkName(mark string) string {
	return linkPrefix(n.cfg.NetnsPrefix) + mark + strings.ToLower(rand.Text())[:maxLinkName-linkPrefixLength-1]
}

func (n *Network) isSpare(link string) bool {
	return strings.HasPrefix(link, linkPrefix(n.cfg.NetnsPrefix)+spareMark)
}

func (n *Network) isMarkedForDelete(link string) bool {
	return strings.HasPrefix(link, linkPrefix(n.cfg.NetnsPrefix)+deleteMark)
}

const linkPrefixLength = 6

// linkPrefix begins the names of an instance's host ends, and no other's: 20 bits of a hash of the
// namespace prefix.
func linkPrefix(netnsPrefix string) string { return "bc" + shortHash(netnsPrefix, linkPrefixLength-2) }

func shortHash(text string, length int) string {
	sum := sha256.Sum256([]byte(text))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:length]
}

// MACOf derives a sandbox's hardware address from its IPv4 address, so that neighbour entries for
// an address never become stale.
func MACOf(addr netip.Addr) net.HardwareAddr {
	a := addr.As4()
	return net.HardwareAddr{0x02, 0xbc, a[0], a[1], a[2], a[3]}
}

// missing reports whether a netlink error means that the object does not exist.
func missing(err error) bool {
	if err == nil {
		return false
	}
	var none netlink.LinkNotFoundError
	return errors.As(err, &none) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH)
}
