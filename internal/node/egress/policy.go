// Package egress says what a sandbox may reach. It reads the policy that users write into a
// [Policy], and [Decide] names the rule that decides about a destination, in words for people.
// The operator's word stands above the user's: see [Ground]. The package touches nothing:
// package netdev has the kernel do the same, and a test holds the two together.
package egress

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Rule is an entry of a policy that is a range of addresses.
type Rule struct {
	Prefix netip.Prefix
	// From is the entry as its author knows it, such as "denyOut[0] 0.0.0.0/0".
	From string
}

// Name is an entry of a policy that is a domain name: one, or with "*." in front all below it.
type Name struct {
	Pattern string
	From    string
}

// Policy is what a user says about one sandbox. The zero value says nothing: what the ground
// leaves open is open.
type Policy struct {
	// Allow wins over Deny and over Closed.
	Allow, Deny []Rule
	// Names are allowed as the addresses to which the resolver has pinned them.
	Names []Name
	// Closed is the rule that denies every address that nothing allows; empty means none does.
	Closed string
	// Bounds must allow too what all the others do. See [Policy.Within].
	Bounds Bounds
}

// Compile reads a policy; nil says nothing. 0.0.0.0/0 stands for every address, those of IPv6
// too: whoever closes all must not leave a second door open. The error is an errs.ErrInvalid
// that names the entry; the API server lets no such policy in.
func Compile(from *agents.EgressPolicy) (p Policy, err error) {
	if from == nil {
		return p, nil
	}
	if from.Internet != nil && !*from.Internet {
		p.Closed = "internet: false"
	}
	for i, entry := range from.DenyOut {
		rule, err := read("denyOut", i, entry)
		if err != nil {
			return Policy{}, err
		}
		if rule.Prefix != allAddresses[0] {
			p.Deny = append(p.Deny, rule)
		} else if p.Closed == "" {
			p.Closed = rule.From
		}
	}
	for i, entry := range from.AllowOut {
		if !agents.IsAddressOrPrefix(entry) {
			p.Names = append(p.Names, Name{Pattern: canonical(entry), From: origin("allowOut", i, entry)})
			continue
		}
		rule, err := read("allowOut", i, entry)
		if err != nil {
			return Policy{}, err
		}
		p.Allow = append(p.Allow, rule)
		if rule.Prefix == allAddresses[0] {
			p.Allow = append(p.Allow, Rule{Prefix: allAddresses[1], From: rule.From})
		}
	}
	return p, nil
}

// allAddresses are all addresses of a family.
var allAddresses = [2]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

func read(list string, i int, entry string) (Rule, error) {
	rule := Rule{From: origin(list, i, entry)}
	if !agents.IsAddressOrPrefix(entry) {
		return rule, fmt.Errorf("%s[%d]: %q is not an IP address or a CIDR: %w", list, i, entry, errs.ErrInvalid)
	}
	if a, err := netip.ParseAddr(entry); err == nil {
		rule.Prefix = netip.PrefixFrom(a, a.BitLen())
	} else {
		rule.Prefix = netip.MustParsePrefix(entry).Masked() // it was checked
	}
	return rule, nil
}

func origin(list string, i int, entry string) string { return fmt.Sprintf("%s[%d] %s", list, i, entry) }

// Restricts reports whether anything that the ground leaves open is closed by the policy.
func (p Policy) Restricts() bool { return p.Bounds.On || p.closes() }

// closes is Restricts without the bounds.
func (p Policy) closes() bool { return !p.allowsAll() && (p.Closed != "" || len(p.Deny) > 0) }

// Asks reports whether the sandbox's questions about names all go to Barchan's own resolver,
// which answers those about allowed names alone.
func (p Policy) UsesResolver() bool {
	return p.Bounds.answersNothing() || (p.closes() && (p.Closed != "" || len(p.Names) > 0))
}

// Pins reports whether addresses are allowed because names are.
func (p Policy) Pins() bool { return p.closes() && len(p.Names) > 0 }

func (p Policy) allowsAll() bool {
	return slices.ContainsFunc(p.Allow, func(r Rule) bool { return r.Prefix == allAddresses[0] })
}

// Equal reports whether two policies say the same in the same words.
func (p Policy) Equal(q Policy) bool {
	return p.Closed == q.Closed && slices.Equal(p.Allow, q.Allow) && slices.Equal(p.Deny, q.Deny) &&
		slices.Equal(p.Names, q.Names) && p.Bounds.Equal(q.Bounds)
}

// Match finds the entry that allows a name, which may be written in any case and end in a dot.
// "*.example.com" stands for names of any depth below example.com, and not for that itself.
func (p Policy) Match(name string) (Name, bool) {
	name = canonical(name)
	for _, n := range p.Names {
		below, wild := strings.CutPrefix(n.Pattern, "*")
		if name == n.Pattern || (wild && len(name) > len(below) && strings.HasSuffix(name, below)) {
			return n, true
		}
	}
	return Name{}, false
}

// Names that q allows and p does not, or not any more.
func (p Policy) lacksNameOf(q Policy) bool {
	return slices.ContainsFunc(q.Names, func(n Name) bool {
		return !slices.ContainsFunc(p.Names, func(m Name) bool { return m.Pattern == n.Pattern })
	})
}

// canonical is a name as it is compared.
func canonical(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// find is the first rule that has an address.
func find(rules []Rule, a netip.Addr) (Rule, bool) {
	i := slices.IndexFunc(rules, func(r Rule) bool { return r.Prefix.Contains(a) })
	if i < 0 {
		return Rule{}, false
	}
	return rules[i], true
}

// Survives reports whether a connection to an address, open while an older policy was in force,
// may go on under p; pinned says whether the address is pinned for an allowed name now.
//
// A connection may outlive its pin, and then nobody can tell for which name it was made. It goes
// on if the older policy allowed it for nothing but a name, and p takes no name away.
func (p Policy) Survives(older Policy, a netip.Addr, pinned bool) bool {
	if _, ok := find(p.Allow, a); ok || pinned {
		return true
	}
	if _, denied := find(p.Deny, a); p.Closed == "" && !denied {
		return true
	}
	_, byRange := find(older.Allow, a)
	return older.Closed != "" && older.Pins() && !byRange && !p.lacksNameOf(older)
}
