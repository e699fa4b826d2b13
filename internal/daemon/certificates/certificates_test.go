package certificates

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/edge/acme"
)

func settings(t *testing.T) *config.Config {
	t.Helper()
	cfg := config.Default()
	cfg.DataDir, cfg.ACME, cfg.ACMEAgree, cfg.Domains = t.TempDir(), true, true, []string{"box.test"}
	return &cfg
}

// TestWhoseCertificates checks the requested certificates and their report to the administrator.
func TestWhoseCertificates(t *testing.T) {
	c, err := Open(t.Context(), settings(t), telemetry.Discard())
	if err != nil || c.ACME == nil || c.CA == nil || c.TLS.NextProtos[len(c.TLS.NextProtos)-1] != acme.Protocol {
		t.Fatalf("%+v, %v", c, err)
	}
	cfg := settings(t)
	cfg.ACMEHook = "/bin/true"
	if c, err = Open(t.Context(), cfg, telemetry.Discard()); err != nil || !c.ACME.Wildcard() {
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
		cfg := settings(t)
		cfg.ACMEUpdateZone, cfg.ACMEUpdateKeyName = "test", "k"
		c.set(cfg)
		if got, err := Open(t.Context(), cfg, telemetry.Discard()); got.ACME != nil || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
