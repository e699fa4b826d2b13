// Package egress decides what a sandbox may reach. It compiles users' policies into a [Policy], and
// [Decide] returns the rule for a destination, as text for users. The operator's [HostRules] take
// precedence. The package changes nothing on the host: package netdev makes the kernel enforce the
// same, and a test compares the two.
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
	// From is the entry in its author's terms, such as "denyOut[0] 0.0.0.0/0".
	From string
}

// Name is an entry of a policy with a domain name, or with "*." in front all names below it.
type Name struct {
	Pattern string
	From    string
}

// Policy is a user's egress policy of one sandbox. The zero value closes nothing beyond the host
// rules.
type Policy struct {
	// Allow takes precedence over Deny and Closed.
	Allow, Deny []Rule
	// Names are allowed as the addresses that the resolver has pinned.
	Names []Name
	// Closed is the rule that denies every address not allowed; empty means none does.
	Closed string
	// Bounds must also allow what the others do. See [Policy.Within].
	Bounds Bounds
}

// Compile compiles a policy; nil has no rules. 0.0.0.0/0 includes IPv6, so that closing everything
// leaves no gap. The error is an errs.ErrInvalid that names the entry; the API server admits no
// such policy.
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

var allAddresses = [2]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}

func read(list string, i int, entry string) (Rule, error) {
	rule := Rule{From: origin(list, i, entry)}
	if !agents.IsAddressOrPrefix(entry) {
		return rule, fmt.Errorf("%s[%d]: %q is not an IP address or a CIDR: %w", list, i, entry, errs.ErrInvalid)
	}
	if a, err := netip.ParseAddr(entry); err == nil {
		rule.Prefix = netip.PrefixFrom(a, a.BitLen())
	} else {
		rule.Prefix = netip.MustParsePrefix(entry).Masked() // validated
	}
	return rule, nil
}

func origin(list string, i int, entry string) string { return fmt.Sprintf("%s[%d] %s", list, i, entry) }

// Restricts reports whether the policy closes an address that the host rules leave open.
func (p Policy) Restricts() bool { return p.Bounds.On || p.closes() }

// closes is Restricts without the bounds.
func (p Policy) closes() bool { return !p.allowsAll() && (p.Closed != "" || len(p.Deny) > 0) }

// UsesResolver reports whether all DNS queries of the sandbox go to Barchan's resolver, which answers
// allowed names only.
func (p Policy) UsesResolver() bool {
	return p.Bounds.answersNothing() || (p.closes() && (p.Closed != "" || len(p.Names) > 0))
}

// Pins reports whether names allow addresses.
func (p Policy) Pins() bool { return p.closes() && len(p.Names) > 0 }

func (p Policy) allowsAll() bool {
	return slices.ContainsFunc(p.Allow, func(r Rule) bool { return r.Prefix == allAddresses[0] })
}

// Equal reports whether two policies have the same rules in the same words.
func (p Policy) Equal(q Policy) bool {
	return p.Closed == q.Closed && slices.Equal(p.Allow, q.Allow) && slices.Equal(p.Deny, q.Deny) &&
		slices.Equal(p.Names, q.Names) && p.Bounds.Equal(q.Bounds)
}

// Match finds the entry that allows a name, in any case and with or without a final dot.
// "*.example.com" matches names of any depth below example.com, but not example.com.
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

func (p Policy) lacksNameOf(q Policy) bool {
	return slices.ContainsFunc(q.Names, func(n Name) bool {
		return !slices.ContainsFunc(p.Names, func(m Name) bool { return m.Pattern == n.Pattern })
	})
}

// canonical is a name in its form for comparisons.
func canonical(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

func find(rules []Rule, a netip.Addr) (Rule, bool) {
	i := slices.IndexFunc(rules, func(r Rule) bool { return r.Prefix.Contains(a) })
	if i < 0 {
		return Rule{}, false
	}
	return rules[i], true
}

// Survives reports whether an open connection to an address, allowed by an older policy, may
// continue under p; pinned reports whether the address is pinned for an allowed name now.
//
// A connection may outlive its pin, and then its name is unknown. It continues if the older policy
// allowed it only for a name, and p removes no name.
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
