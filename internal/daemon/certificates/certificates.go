// Package certificates decides whose certificates a server's TLS listener has.
package certificates

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/edge/acme"
	"github.com/barchan-dev/barchan/internal/edge/acme/dnsrecords"
)

// Certificates are those of a TLS listener.
type Certificates struct {
	TLS  *tls.Config
	CA   *localca.CA   // nil beside the operator's files
	ACME *acme.Manager // nil without ACME
}

// Open reads or makes the certificates: the operator's files, else what an ACME authority has issued where it is configured, else the
// local CA's. An error names the setting.
func Open(ctx context.Context, cfg *config.Config, log *slog.Logger) (c Certificates, err error) {
	if cfg.TLSCert != "" {
		if cfg.ACME {
			log.WarnContext(ctx, "acme is on, but tlsCert is set: its file is served, and no certificate is requested")
		}
		files, err := localca.OpenFiles(cfg.TLSCert, cfg.TLSKey, log)
		if err != nil {
			return c, fmt.Errorf("tlsCert: %w", err)
		}
		return Certificates{TLS: files.TLSConfig()}, nil
	}
	c.CA, err = localca.Open(localca.Config{Dir: filepath.Join(cfg.DataDir, "tls"), Domains: cfg.Domains})
	if err != nil {
		return c, fmt.Errorf("local CA: %w", err)
	}
	if !cfg.ACME {
		c.TLS = c.CA.TLSConfig()
		return c, nil
	}
	if c.ACME, err = newACME(cfg, log); err != nil {
		return Certificates{}, err
	}
	c.TLS = c.CA.TLSConfigBehind(c.ACME.Certificate, acme.Protocol)
	return c, nil
}

func newACME(set *config.Config, log *slog.Logger) (*acme.Manager, error) {
	cfg := acme.Config{
		Dir: filepath.Join(set.DataDir, "acme"), Directory: set.ACMEDirectory, Email: set.ACMEEmail, Domains: set.Domains, Log: log,
		Settings: strings.Join([]string{set.ACMEHook, set.ACMEUpdateServer, set.ACMEUpdateZone, set.ACMEUpdateKeyName, set.ACMEUpdateAlgorithm}, "\n"),
	}
	if set.ACMECA != "" {
		text, err := os.ReadFile(set.ACMECA)
		if err != nil {
			return nil, fmt.Errorf("acmeCA: %w", err)
		}
		if cfg.Roots = x509.NewCertPool(); !cfg.Roots.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("acmeCA: %s has no certificate in PEM: %w", set.ACMECA, errs.ErrInvalid)
		}
	}
	switch {
	case set.ACMEHook != "":
		cfg.DNS = acme.Delayed{DNS: acme.Hook{Program: set.ACMEHook}, Wait: set.ACMEWait}
	case set.ACMEUpdateServer != "":
		secret, err := os.ReadFile(set.ACMEUpdateKeyFile)
		if err != nil {
			return nil, fmt.Errorf("acmeUpdateKeyFile: %w", err)
		}
		zone := dnsrecords.Zone{
			Server: set.ACMEUpdateServer, Name: set.ACMEUpdateZone, KeyName: set.ACMEUpdateKeyName,
			Algorithm: set.ACMEUpdateAlgorithm, Secret: string(bytes.TrimSpace(secret)),
		}
		if err := zone.Check(); err != nil {
			return nil, fmt.Errorf("acmeUpdateKeyFile: %s: %w", set.ACMEUpdateKeyFile, err)
		}
		cfg.DNS, cfg.Settings = acme.Delayed{DNS: zone, Wait: set.ACMEWait}, cfg.Settings+"\n"+zone.Secret
	}
	return acme.New(cfg)
}
