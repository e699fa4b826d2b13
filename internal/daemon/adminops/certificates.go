package adminops

import (
	"fmt"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/edge/acme"
)

// certificates returns those that an authority issues.
func certificates(m *acme.Manager) (out []adminclient.Certificate) {
	if m == nil {
		return nil
	}
	for _, s := range m.States() {
		out = append(out, adminclient.Certificate{
			Names: s.Names, Expires: s.Expires, Issuer: s.Issuer, Next: s.Next, Failures: s.Failures, Failure: s.Failure,
		})
	}
	return out
}

// checkCertificates returns them as findings of a doctor.
func checkCertificates(m *acme.Manager) (out []adminclient.Check) {
	for _, c := range certificates(m) {
		check := adminclient.Check{Name: "certificate of " + strings.Join(c.Names, ", "), State: adminclient.CheckOK}
		switch {
		case c.Expires.IsZero():
			check.State, check.Detail = adminclient.CheckWarning, "not issued yet; the local CA's is served"
		case time.Now().After(c.Expires):
			check.State, check.Detail = adminclient.CheckFailed, "ended at "+c.Expires.Format(time.RFC3339)
		default:
			check.Detail = "until " + c.Expires.Format(time.RFC3339) + ", by " + c.Issuer
		}
		if c.Failures > 0 {
			if check.State == adminclient.CheckOK {
				check.State = adminclient.CheckWarning
			}
			check.Detail += fmt.Sprintf("; %d failed tries, the last: %s", c.Failures, c.Failure)
			check.Remedy = "correct that; the next try is at " + c.Next.Format(time.RFC3339) + ", or when the server starts with other settings of acme"
		}
		out = append(out, check)
	}
	if m != nil && !m.Wildcard() {
		out = append(out, adminclient.Check{
			Name: "certificates of sandboxes' hosts", State: adminclient.CheckWarning, Detail: "the local CA's: a wildcard certificate needs changes of DNS records",
			Remedy: "set acmeUpdateServer or acmeHook, or use the path form of URLs",
		})
	}
	return out
}
