package resolver

import (
	"net/netip"
	"os"
	"slices"
	"strings"
)

// dnsPort is the port of DNS servers (RFC 1035, 4.2).
const dnsPort = 53

// Upstreams returns the servers that a resolver forwards to: the configured ones, else the host's own, which may be reachable
// from the host only, else public ones.
func Upstreams(configured []netip.Addr) (all []netip.AddrPort) {
	if len(configured) == 0 {
		if text, err := os.ReadFile("/etc/resolv.conf"); err == nil {
			configured = nameservers(string(text))
		}
	}
	if len(configured) == 0 {
		configured = publicResolvers()
	}
	for _, a := range configured {
		all = append(all, netip.AddrPortFrom(a.Unmap(), dnsPort))
	}
	return all
}

// nameservers returns the servers of a resolv.conf.
func nameservers(text string) (found []netip.Addr) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(fields[1]); err == nil {
			found = append(found, a)
		}
	}
	return found
}

// HostServers returns the host's own servers that a sandbox can reach, or public ones if the host's listen on loopback only.
func HostServers() []netip.Addr {
	for _, file := range []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"} {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		found := slices.DeleteFunc(nameservers(string(text)), func(a netip.Addr) bool { return !a.Is4() || a.IsLoopback() })
		if len(found) > 0 {
			return found
		}
	}
	return publicResolvers()
}

func publicResolvers() []netip.Addr {
	return []netip.Addr{netip.AddrFrom4([4]byte{1, 1, 1, 1}), netip.AddrFrom4([4]byte{8, 8, 8, 8})}
}
