// Package dnsrecords changes the TXT records of a zone at its DNS server, by signed updates (RFC 2136
// and RFC 8945). It reads no records and keeps none.
package dnsrecords

import (
	"context"
	"encoding/base64"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Algorithms are those that a key may be of, without the dot at their end.
func Algorithms() []string {
	return []string{"hmac-sha256", "hmac-sha384", "hmac-sha512", "hmac-sha224"}
}

const (
	// lifetime of records, in seconds: they are for one question.
	lifetime = 60
	// clockSkew that a signature allows, in seconds.
	clockSkew = 300
	// exchangeTime bounds one update.
	exchangeTime = 10 * time.Second
)

// Zone is one that the server lets us change. All fields are needed.
type Zone struct {
	Server string // host:port, asked over TCP
	Name   string
	// KeyName, Algorithm (one of Algorithms) and Secret (base64) are the TSIG key.
	KeyName, Algorithm, Secret string
}

// Check says what is wrong with a zone's fields; the error is an errs.ErrInvalid.
func (z Zone) Check() error {
	if _, _, err := net.SplitHostPort(z.Server); err != nil {
		return fmt.Errorf("server %q is not host:port: %w", z.Server, errs.ErrInvalid)
	}
	for what, name := range map[string]string{"zone": z.Name, "key": z.KeyName} {
		if _, ok := dns.IsDomainName(name); !ok || name == "" {
			return fmt.Errorf("%s %q is not a DNS name: %w", what, name, errs.ErrInvalid)
		}
	}
	if secret, err := base64.StdEncoding.DecodeString(z.Secret); err != nil || len(secret) == 0 {
		return fmt.Errorf("the key's secret is not in base64: %w", errs.ErrInvalid)
	}
	return nil
}

// Add puts a value beside those that the name has. It returns when the server has taken it.
func (z Zone) Add(ctx context.Context, name, value string) error {
	return z.update(ctx, name, value, (*dns.Msg).Insert)
}

// Remove takes a value away; one that is not there is no error.
func (z Zone) Remove(ctx context.Context, name, value string) error {
	return z.update(ctx, name, value, (*dns.Msg).Remove)
}

func (z Zone) update(ctx context.Context, name, value string, change func(*dns.Msg, []dns.RR)) error {
	name, zone := dns.Fqdn(strings.ToLower(name)), dns.Fqdn(strings.ToLower(z.Name))
	if !dns.IsSubDomain(zone, name) {
		return fmt.Errorf("%s is not in the zone %s: %w", name, zone, errs.ErrInvalid)
	}
	key, algorithm := dns.Fqdn(strings.ToLower(z.KeyName)), dns.Fqdn(strings.ToLower(z.Algorithm))
	m := new(dns.Msg)
	m.SetUpdate(zone)
	change(m, []dns.RR{&dns.TXT{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeTXT, Class: dns.ClassINET, Ttl: lifetime}, Txt: []string{value}}})
	m.SetTsig(key, algorithm, clockSkew, time.Now().Unix())
	client := &dns.Client{Net: "tcp", Timeout: exchangeTime, TsigSecret: map[string]string{key: z.Secret}}
	answer, _, err := client.ExchangeContext(ctx, m, z.Server)
	if err != nil {
		return fmt.Errorf("update %s at %s: %w: %w", name, z.Server, err, errs.ErrUnavailable)
	}
	if answer.Rcode != dns.RcodeSuccess {
		return fmt.Errorf("update %s at %s: the server answers %s%s: %w", name, z.Server, dns.RcodeToString[answer.Rcode], hints[answer.Rcode], errs.ErrUnavailable)
	}
	return nil
}

// hints say what an answer of a server means most often.
var hints = map[int]string{
	dns.RcodeNotAuth: " (the key, its algorithm, its secret or the clock is wrong, or it has no such zone)",
	dns.RcodeRefused: " (the key may not change this record)",
	dns.RcodeNotZone: " (the name is not in the zone)",
}
