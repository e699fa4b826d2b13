package resolver

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/miekg/dns"
)

// Internal is what sandboxes may learn of names that lead to private addresses.
type Internal struct {
	// Reachable are private ranges that sandboxes may reach: names that lead there are answered.
	Reachable []netip.Prefix
	// Zones are answered whatever their addresses, in lower case and without final dots; "." is all names.
	Zones []string
}

// Direct returns the servers that sandboxes may query themselves: public ones, which answer no internal names.
func (i Internal) Direct(servers []netip.Addr) []netip.Addr {
	return slices.DeleteFunc(slices.Clone(servers), func(a netip.Addr) bool { return isPrivate(a) && !i.lists(".") })
}

// privateZones are domains that exist in private networks only (RFC 6762 appendix G, RFC 8375, ICANN's .internal).
func privateZones() []string {
	return []string{"internal", "intranet", "private", "corp", "home", "lan", "local", "localdomain", "home.arpa"}
}

var (
	shared = netip.MustParsePrefix("100.64.0.0/10") // RFC 6598
	nat64  = netip.MustParsePrefix("64:ff9b::/96")  // RFC 6052: the last 32 bits are an IPv4 address
)

func isPrivate(a netip.Addr) bool {
	a = a.Unmap()
	if nat64.Contains(a) {
		b := a.As16()
		a = netip.AddrFrom4([4]byte(b[12:]))
	}
	return a.IsPrivate() || a.IsLoopback() || a.IsLinkLocalUnicast() || shared.Contains(a)
}

func (i Internal) hides(a netip.Addr) bool {
	return isPrivate(a) && !slices.ContainsFunc(i.Reachable, func(p netip.Prefix) bool { return p.Contains(a.Unmap()) })
}

// lists reports whether a name is in one of Zones.
func (i Internal) lists(name string) bool {
	return slices.Contains(i.Zones, ".") || within(name, i.Zones)
}

func within(name string, zones []string) bool {
	name = strings.TrimSuffix(key(name), ".")
	return slices.ContainsFunc(zones, func(zone string) bool { return name == zone || strings.HasSuffix(name, "."+zone) })
}

// refuses reports whether a question is not forwarded. Names of private zones may lead to reachable addresses; their other
// records tell of nothing that a sandbox may reach.
func (i Internal) refuses(q dns.Question) bool {
	if i.lists(q.Name) {
		return false
	}
	if a, ok := reverse(q.Name); ok {
		return i.hides(a)
	}
	return !asksAddress(q) && within(q.Name, privateZones())
}

func asksAddress(q dns.Question) bool { return q.Qtype == dns.TypeA || q.Qtype == dns.TypeAAAA }

// conceal removes what a sandbox may not learn from a response. It reports false if nothing of an answer remains.
func (i Internal) conceal(a *dns.Msg) bool {
	q := a.Question[0]
	if i.lists(q.Name) {
		return true
	}
	secret := func(rr dns.RR) bool { return i.secret(q, rr) }
	before := len(a.Answer)
	a.Answer, a.Ns, a.Extra = slices.DeleteFunc(a.Answer, secret), slices.DeleteFunc(a.Ns, secret), slices.DeleteFunc(a.Extra, secret)
	addresses := slices.ContainsFunc(a.Answer, func(rr dns.RR) bool { _, ok := addressIn(rr); return ok })
	if !asksAddress(q) {
		return before == 0 || len(a.Answer) > 0
	}
	if removed := before != len(a.Answer); removed && !addresses {
		return false
	}
	if !addresses && len(a.Answer) > 0 { // aliases to a name without such an address, which may have a private one
		a.Answer, a.Ns, a.Extra = nil, nil, nil
	}
	return true
}

// secret reports whether a record has a private address, or in response to another question an internal name.
func (i Internal) secret(q dns.Question, rr dns.RR) bool {
	if at, ok := addressIn(rr); ok {
		return i.hides(at) && !i.lists(rr.Header().Name)
	}
	if hints := hintsOf(rr); slices.ContainsFunc(hints, i.hides) {
		return true
	}
	target := targetOf(rr)
	return target != "" && !asksAddress(q) && within(target, privateZones()) && !i.lists(target)
}

// hintsOf are the addresses in an HTTPS or SVCB record.
func hintsOf(rr dns.RR) (hints []netip.Addr) {
	var values []dns.SVCBKeyValue
	switch rr := rr.(type) {
	case *dns.HTTPS:
		values = rr.Value
	case *dns.SVCB:
		values = rr.Value
	}
	for _, v := range values {
		if k := v.Key(); k != dns.SVCB_IPV4HINT && k != dns.SVCB_IPV6HINT {
			continue
		}
		for text := range strings.SplitSeq(v.String(), ",") {
			if a, err := netip.ParseAddr(text); err == nil {
				hints = append(hints, a)
			}
		}
	}
	return hints
}

// targetOf is the name that a record leads to, or empty.
func targetOf(rr dns.RR) string {
	switch rr := rr.(type) {
	case *dns.CNAME:
		return rr.Target
	case *dns.DNAME:
		return rr.Target
	case *dns.NS:
		return rr.Ns
	case *dns.SOA:
		return rr.Ns
	case *dns.MX:
		return rr.Mx
	case *dns.SRV:
		return rr.Target
	case *dns.PTR:
		return rr.Ptr
	case *dns.HTTPS:
		return rr.Target
	case *dns.SVCB:
		return rr.Target
	}
	return ""
}

// reverse is the address of a name for reverse lookups; of a part of one, the first address below it.
func reverse(name string) (netip.Addr, bool) {
	labels := strings.Split(strings.TrimSuffix(key(name), "."), ".")
	if len(labels) < 3 || labels[len(labels)-1] != "arpa" {
		return netip.Addr{}, false
	}
	family, digits := labels[len(labels)-2], labels[:len(labels)-2]
	slices.Reverse(digits)
	switch family {
	case "in-addr":
		var b [4]byte
		for at, d := range digits[:min(len(digits), len(b))] {
			n, err := strconv.ParseUint(d, 10, 8)
			if err != nil {
				break
			}
			b[at] = byte(n)
		}
		return netip.AddrFrom4(b), true
	case "ip6":
		var b [16]byte
		for at, d := range digits[:min(len(digits), 2*len(b))] {
			n, err := strconv.ParseUint(d, 16, 4)
			if err != nil {
				break
			}
			b[at/2] |= byte(n) << (4 * (1 - at%2))
		}
		return netip.AddrFrom16(b), true
	}
	return netip.Addr{}, false
}
