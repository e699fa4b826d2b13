package daemon

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/edge/acme"
	"github.com/barchan-dev/barchan/internal/edge/acme/dnsrecords"
)

// certificates are those of the TLS listener: the operator's files, else what an ACME authority
// has issued where it is configured, else the local CA's.
func (d *Daemon) certificates(ctx context.Context) (*tls.Config, error) {
	if d.cfg.TLSCert != "" {
		if d.cfg.ACME {
			d.log.WarnContext(ctx, "acme is on, but tlsCert is set: its file is served, and no certificate is requested")
		}
		files, err := localca.OpenFiles(d.cfg.TLSCert, d.cfg.TLSKey, d.log)
		if err != nil {
			return nil, fmt.Errorf("tlsCert: %w", err)
		}
		return files.TLSConfig(), nil
	}
	ca, err := localca.Open(localca.Config{Dir: filepath.Join(d.cfg.DataDir, "tls"), Domains: d.cfg.Domains})
	if err != nil {
		return nil, fmt.Errorf("local CA: %w", err)
	}
	d.ca = ca
	if !d.cfg.ACME {
		return ca.TLSConfig(), nil
	}
	if d.acme, err = d.newACME(); err != nil {
		return nil, err
	}
	return ca.TLSConfigBehind(d.acme.Certificate, acme.Protocol), nil
}

func (d *Daemon) newACME() (*acme.Manager, error) {
	cfg := acme.Config{
		Dir: filepath.Join(d.cfg.DataDir, "acme"), Directory: d.cfg.ACMEDirectory, Email: d.cfg.ACMEEmail, Domains: d.cfg.Domains, Log: d.cfg.Log,
		Settings: strings.Join([]string{d.cfg.ACMEHook, d.cfg.ACMEUpdateServer, d.cfg.ACMEUpdateZone, d.cfg.ACMEUpdateKeyName, d.cfg.ACMEUpdateAlgorithm}, "\n"),
	}
	if d.cfg.ACMECA != "" {
		text, err := os.ReadFile(d.cfg.ACMECA)
		if err != nil {
			return nil, fmt.Errorf("acmeCA: %w", err)
		}
		if cfg.Roots = x509.NewCertPool(); !cfg.Roots.AppendCertsFromPEM(text) {
			return nil, fmt.Errorf("acmeCA: %s has no certificate in PEM: %w", d.cfg.ACMECA, errs.ErrInvalid)
		}
	}
	switch {
	case d.cfg.ACMEHook != "":
		cfg.DNS = acme.Delayed{DNS: acme.Hook{Program: d.cfg.ACMEHook}, Wait: d.cfg.ACMEWait}
	case d.cfg.ACMEUpdateServer != "":
		secret, err := os.ReadFile(d.cfg.ACMEUpdateKeyFile)
		if err != nil {
			return nil, fmt.Errorf("acmeUpdateKeyFile: %w", err)
		}
		zone := dnsrecords.Zone{
			Server: d.cfg.ACMEUpdateServer, Name: d.cfg.ACMEUpdateZone, KeyName: d.cfg.ACMEUpdateKeyName,
			Algorithm: d.cfg.ACMEUpdateAlgorithm, Secret: string(bytes.TrimSpace(secret)),
		}
		if err := zone.Check(); err != nil {
			return nil, fmt.Errorf("acmeUpdateKeyFile: %s: %w", d.cfg.ACMEUpdateKeyFile, err)
		}
		cfg.DNS, cfg.Settings = acme.Delayed{DNS: zone, Wait: d.cfg.ACMEWait}, cfg.Settings+"\n"+zone.Secret
	}
	return acme.New(cfg)
}
