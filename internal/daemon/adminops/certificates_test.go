package adminops

import (
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/edge/acme"
)

// TestCertificates checks what an administrator sees of an authority's certificates, with and without changes of DNS records.
func TestCertificates(t *testing.T) {
	with := func(dns acme.DNS) *acme.Manager {
		m, err := acme.New(acme.Config{Dir: t.TempDir(), Domains: []string{"box.test"}, Log: telemetry.Discard(), DNS: dns})
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	checks := checkCertificates(with(nil))
	if len(checks) != 4 || checks[3].State != adminclient.CheckWarning || !strings.Contains(checks[3].Remedy, "acmeHook") {
		t.Errorf("without DNS: %+v", checks)
	}
	m := with(acme.Hook{Program: "/bin/true"})
	if len(checkCertificates(m)) != 1 || len(certificates(m)[0].Names) != 2 {
		t.Errorf("with a hook: %+v", certificates(m))
	}
}
