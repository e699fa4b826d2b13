// Package setting has a setting: a variable with a name in files, in the environment and as a flag, which is read from text and shown as
// text. It knows no setting by name, and no rule for the value of one but its type.
package setting

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Setting is a variable as people see it.
type Setting struct {
	Key      string // in files, for example httpAddr
	Doc      string
	Variable string // of the environment; empty: derived from Key
	// Ptr points to a string, bool, int, []string, time.Duration, resource.Quantity, netip.Prefix, []netip.Addr or []netip.Prefix.
	Ptr any
}

// Error is a refused value; it is an errs.ErrInvalid.
type Error struct{ Key, Message string }

// Error names the key.
func (e *Error) Error() string { return e.Key + ": " + e.Message }

// Unwrap is the kind.
func (e *Error) Unwrap() error { return errs.ErrInvalid }

// Invalid returns an [*Error] of a key.
func Invalid(key, format string, args ...any) error {
	return &Error{key, fmt.Sprintf(format, args...)}
}

// Flag is the name of the setting's flag, without dashes before it.
func (s Setting) Flag() string { return flagName(s.Key) }

// Env is the name of the setting's environment variable.
func (s Setting) Env() string {
	if s.Variable != "" {
		return s.Variable
	}
	return "BARCHAN_" + strings.ToUpper(strings.ReplaceAll(s.Flag(), "-", "_"))
}

// Value is the setting as a string, bool, int or []string.
func (s Setting) Value() any {
	switch p := s.Ptr.(type) {
	case *string:
		return *p
	case *bool:
		return *p
	case *int:
		return *p
	case *[]string:
		return append([]string{}, *p...)
	case *[]netip.Addr:
		out := make([]string, 0, len(*p))
		for _, a := range *p {
			out = append(out, a.String())
		}
		return out
	case *time.Duration:
		return p.String()
	case *[]netip.Prefix:
		out := make([]string, 0, len(*p))
		for _, x := range *p {
			out = append(out, x.String())
		}
		return out
	case *netip.Prefix:
		if !p.IsValid() {
			return ""
		}
		return p.String()
	case *resource.Quantity:
		return p.String()
	default:
		return fmt.Sprint(p) // no other type is allowed
	}
}

// Text is the value as Set reads it.
func (s Setting) Text() string {
	if list, ok := s.Value().([]string); ok {
		return strings.Join(list, ",")
	}
	return fmt.Sprint(s.Value())
}

// Set reads a value as people write it. Lists are separated by commas. An error is an [*Error].
func (s Setting) Set(text string) error {
	var err error
	switch p := s.Ptr.(type) {
	case *string:
		*p = text
	case *bool:
		if *p, err = strconv.ParseBool(text); err != nil {
			return Invalid(s.Key, "%q is neither true nor false", text)
		}
	case *int:
		if *p, err = strconv.Atoi(text); err != nil {
			return Invalid(s.Key, "%q is not a whole number", text)
		}
	case *[]string:
		*p = splitList(text)
	case *time.Duration:
		if *p, err = time.ParseDuration(text); err != nil {
			return Invalid(s.Key, "%q is not a duration such as 90s or 24h", text)
		}
	case *resource.Quantity:
		if *p, err = resource.ParseQuantity(text); err != nil {
			return Invalid(s.Key, "%q is not a quantity such as 500m, 2 or 512Mi", text)
		}
	default:
		return s.setNetwork(text)
	}
	return nil
}

// setNetwork is Set for addresses and ranges.
func (s Setting) setNetwork(text string) error {
	switch p := s.Ptr.(type) {
	case *[]netip.Addr:
		return s.setAddrs(p, text)
	case *[]netip.Prefix:
		return s.setPrefixes(p, text)
	case *netip.Prefix:
		if text == "" { // whether one is needed is not decided here
			*p = netip.Prefix{}
			return nil
		}
		subnet, err := netip.ParsePrefix(text)
		if err != nil {
			return Invalid(s.Key, "%q is not a subnet such as 10.87.0.0/16", text)
		}
		*p = subnet
	}
	return nil
}

func (s Setting) setAddrs(p *[]netip.Addr, text string) error {
	var out []netip.Addr
	for _, item := range splitList(text) {
		a, err := netip.ParseAddr(item)
		if err != nil {
			return Invalid(s.Key, "%q is not an IP address", item)
		}
		out = append(out, a)
	}
	*p = out
	return nil
}

func (s Setting) setPrefixes(p *[]netip.Prefix, text string) error {
	var out []netip.Prefix
	for _, item := range splitList(text) {
		x, err := netip.ParsePrefix(item)
		if err != nil {
			return Invalid(s.Key, "%q is not a range such as 10.1.0.0/16", item)
		}
		out = append(out, x)
	}
	*p = out
	return nil
}

// Kind names the type of the setting's value, as the help shows it: bool, int, list, duration, CIDR, quantity or string.
func (s Setting) Kind() string {
	switch s.Ptr.(type) {
	case *bool:
		return "bool"
	case *int:
		return "int"
	case *[]string, *[]netip.Addr, *[]netip.Prefix:
		return "list"
	case *time.Duration:
		return "duration"
	case *netip.Prefix:
		return "CIDR"
	case *resource.Quantity:
		return "quantity"
	default:
		return "string"
	}
}

func splitList(text string) []string {
	var out []string
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			out = append(out, item)
		}
	}
	return out
}

// flagName turns lower camel case into words with dashes: etcdCA is etcd-ca.
func flagName(key string) string {
	var b strings.Builder
	runes := []rune(key)
	for i, r := range runes {
		if i > 0 && unicode.IsUpper(r) && !unicode.IsUpper(runes[i-1]) {
			b.WriteByte('-')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
