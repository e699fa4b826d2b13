package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/edge/acme"
)

func certifying(t *testing.T) *Daemon {
	t.Helper()
	cfg := config.Default()
	cfg.DataDir, cfg.ACME, cfg.ACMEAgree, cfg.Domains = t.TempDir(), true, true, []string{"box.test"}
	return &Daemon{cfg: Config{Config: cfg, Log: telemetry.Discard()}, log: telemetry.Discard()}
}

// TestWhoseCertificates checks the requested certificates and their report to the administrator.
func TestWhoseCertificates(t *testing.T) {
	d := certifying(t)
	cfg, err := d.certificates(t.Context())
	if err != nil || d.acme == nil || d.ca == nil || cfg.NextProtos[len(cfg.NextProtos)-1] != acme.Protocol {
		t.Fatalf("%v, %v", cfg, err)
	}
	d = certifying(t)
	d.cfg.ACMEHook = "/bin/true"
	if _, err = d.certificates(t.Context()); err != nil || !d.acme.Wildcard() {
		t.Errorf("with a hook: %v", err)
	}
}

// TestCertificateSettings: the operator's files take precedence, and an error names its setting.
func TestCertificateSettings(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("not base64!\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		set  func(*config.Config)
		want string
	}{
		"files":  {func(c *config.Config) { c.TLSCert, c.TLSKey = "/nowhere.crt", "/nowhere.key" }, "tlsCert: "},
		"secret": {func(c *config.Config) { c.ACMEUpdateServer, c.ACMEUpdateKeyFile = "127.0.0.1:53", secret }, "acmeUpdateKeyFile: " + secret},
		"roots":  {func(c *config.Config) { c.ACMECA = secret }, "acmeCA: "},
	} {
		d := certifying(t)
		d.cfg.ACMEUpdateZone, d.cfg.ACMEUpdateKeyName = "test", "k"
		c.set(&d.cfg.Config)
		if _, err := d.certificates(t.Context()); d.acme != nil || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
