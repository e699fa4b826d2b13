package config

import (
	"net"
	"net/mail"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/config/setting"
	"github.com/barchan-dev/barchan/internal/edge/acme/dnsrecords"
)

// mostACMEWait bounds how long the servers of a domain are waited for.
const mostACMEWait = 10 * time.Minute

// ACMEByDNS reports whether domains are proven by their records, so that wildcards can be had.
func (c *Config) ACMEByDNS() bool { return c.ACMEHook != "" || c.ACMEUpdateServer != "" }

func (c *Config) checkACME() error {
	if err := absolute("acmeCA", c.ACMECA, "acmeHook", c.ACMEHook, "acmeUpdateKeyFile", c.ACMEUpdateKeyFile); err != nil || !c.ACME {
		return err
	}
	switch {
	case c.TLSAddr == "":
		return setting.Invalid("acme", "is on, but tlsAddr is empty: there is nothing to serve with a certificate")
	case c.Role == RoleReplica && !c.ACMEByDNS():
		return setting.Invalid("acme", "is on in a replica without acmeUpdateServer or acmeHook; the authority's question to a name may reach another replica, so give it DNS")
	case c.ACMEWait < 0 || c.ACMEWait > mostACMEWait:
		return setting.Invalid("acmeWait", "%s is out of range, want 0 to %s", c.ACMEWait, mostACMEWait)
	case !slices.ContainsFunc(c.Domains, certifiable):
		return setting.Invalid("domains", "none of %s is a domain that an authority certifies; name a public one, or turn acme off", strings.Join(c.Domains, ", "))
	case c.ACMEUpdateServer != "":
		if err := c.checkACMEUpdates(); err != nil {
			return err
		}
	case c.ACMEUpdateZone+c.ACMEUpdateKeyName+c.ACMEUpdateKeyFile != "":
		return setting.Invalid("acmeUpdateServer", "is empty, but a zone or a key for updates is set; name the DNS server that takes them")
	}
	return c.checkAuthority()
}

func (c *Config) checkAuthority() error {
	u, err := url.Parse(c.ACMEDirectory)
	if err != nil || u.Scheme != "https" || u.Host == "" {
		return setting.Invalid("acmeDirectory", "%q is not an address such as https://acme-v02.api.letsencrypt.org/directory", c.ACMEDirectory)
	}
	if !c.ACMEAgree {
		return setting.Invalid("acmeAgree", "is false; %s requires agreement to its terms of service: read them and set it to true", u.Host)
	}
	if a, err := mail.ParseAddress(c.ACMEEmail); c.ACMEEmail != "" && (err != nil || a.Address != c.ACMEEmail) {
		return setting.Invalid("acmeEmail", "%q is not an address such as ops@example.org", c.ACMEEmail)
	}
	return nil
}

// certifiable reports whether a domain can have a certificate at all.
func certifiable(domain string) bool {
	host := plainDomain(domain)
	return strings.Contains(host, ".") && !strings.HasSuffix(host, ".localhost")
}

func plainDomain(domain string) string {
	if host, _, err := net.SplitHostPort(domain); err == nil {
		return host
	}
	return domain
}

func (c *Config) checkACMEUpdates() error {
	host, port, err := net.SplitHostPort(c.ACMEUpdateServer)
	if _, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil || host == "" {
		return setting.Invalid("acmeUpdateServer", "%q is not host:port", c.ACMEUpdateServer)
	}
	if c.ACMEHook != "" {
		return setting.Invalid("acmeHook", "is set beside acmeUpdateServer; have DNS records changed by one of them")
	}
	for _, s := range []struct{ key, value string }{
		{"acmeUpdateZone", c.ACMEUpdateZone}, {"acmeUpdateKeyName", c.ACMEUpdateKeyName}, {"acmeUpdateKeyFile", c.ACMEUpdateKeyFile},
	} {
		if s.value == "" {
			return setting.Invalid(s.key, "is missing; updates of DNS need a zone and a TSIG key")
		}
	}
	if !slices.Contains(dnsrecords.Algorithms(), c.ACMEUpdateAlgorithm) {
		return setting.Invalid("acmeUpdateAlgorithm", "%q is none of %s", c.ACMEUpdateAlgorithm, strings.Join(dnsrecords.Algorithms(), ", "))
	}
	zone := strings.Trim(c.ACMEUpdateZone, ".")
	if !dnsName.MatchString(zone) {
		return setting.Invalid("acmeUpdateZone", "%q is not a lower-case domain name such as example.org", c.ACMEUpdateZone)
	}
	for _, d := range c.Domains {
		if host := plainDomain(d); certifiable(d) && host != zone && !strings.HasSuffix(host, "."+zone) {
			return setting.Invalid("acmeUpdateZone", "%s is not in the zone %s; its records could not be changed", host, zone)
		}
	}
	return nil
}
