// Package localca provides a server's certificates: from files that are renewed externally, or from a
// certificate authority of its own, made for one machine and stored in its data directory.
//
// It requests no certificates from outside, and installs no trust anywhere: clients get the path of
// the authority's certificate, and decide whether to trust it.
package localca

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Files of a local authority in its directory.
const (
	CertFile = "ca.crt"
	KeyFile  = "ca.key"

	privateMode = 0o600
	publicMode  = 0o644
	dirMode     = 0o700

	caLife   = 10 * 365 * 24 * time.Hour
	leafLife = 90 * 24 * time.Hour
	// renewBefore is how long before its expiry a certificate is reissued.
	renewBefore = 30 * 24 * time.Hour
	// backdate lets clients whose clocks are a little behind accept a fresh certificate.
	backdate = time.Hour

	pemCert = "CERTIFICATE"
	pemKey  = "PRIVATE KEY"
)

// Config lists the names that a local authority certifies.
type Config struct {
	// Dir is the authority's directory; it is created if missing.
	Dir string
	// Domains are certified literally and for all names one level below. A ":port" is ignored.
	Domains []string
	// Names are further host names and addresses.
	Names []string
}

// CA is a local authority with the one certificate that it issues. Make it with Open.
type CA struct {
	certPEM []byte
	cert    *x509.Certificate
	key     crypto.Signer
	path    string
	dns     []string
	ips     []net.IP

	mu   sync.Mutex
	leaf *tls.Certificate // +checklocks:mu
}

// Open loads the authority of a directory, or creates one if there is none or it is about to expire. A
// certificate without its key is an error that names the file: clients trust it.
func Open(cfg Config) (*CA, error) {
	if cfg.Dir == "" {
		return nil, fmt.Errorf("local CA: no directory given: %w", errs.ErrInvalid)
	}
	ca := &CA{path: filepath.Join(cfg.Dir, CertFile), dns: []string{"localhost"}, ips: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback}}
	for _, d := range cfg.Domains {
		name := withoutPort(d)
		ca.add(name)
		if net.ParseIP(name) == nil {
			ca.add("*." + name)
		}
	}
	for _, n := range cfg.Names {
		ca.add(withoutPort(n))
	}
	if err := os.MkdirAll(cfg.Dir, dirMode); err != nil {
		return nil, fmt.Errorf("make directory of local CA: %w", err)
	}
	keyPath := filepath.Join(cfg.Dir, KeyFile)
	err := ca.load(keyPath)
	if errors.Is(err, fs.ErrNotExist) {
		err = ca.create(keyPath)
	}
	if err != nil {
		return nil, err
	}
	if _, err := ca.current(); err != nil {
		return nil, err
	}
	return ca, nil
}

func (ca *CA) add(name string) {
	if name == "" {
		return
	}
	if ip := net.ParseIP(name); ip != nil {
		ca.ips = append(ca.ips, ip)
	} else if !slices.Contains(ca.dns, name) {
		ca.dns = append(ca.dns, name)
	}
}

func withoutPort(name string) string {
	if host, _, err := net.SplitHostPort(name); err == nil {
		name = host
	}
	return strings.ToLower(strings.Trim(name, "[]."))
}

// CertPath is the file with the authority's certificate, for clients to trust.
func (ca *CA) CertPath() string { return ca.path }

// CertPEM is the content of that file.
func (ca *CA) CertPEM() []byte { return slices.Clone(ca.certPEM) }

// TLSConfig returns a server's configuration for HTTP/2 and HTTP/1.1 that renews its certificate
// automatically.
func (ca *CA) TLSConfig() *tls.Config {
	return serverConfig(func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return ca.current() })
}

// TLSConfigBehind is TLSConfig for names with another source of certificates: first is called at each
// handshake, and if it returns nil the authority's own is used. protocols are further ones that the
// server offers in ALPN.
func (ca *CA) TLSConfigBehind(first func(*tls.ClientHelloInfo) *tls.Certificate, protocols ...string) *tls.Config {
	cfg := serverConfig(func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if c := first(hello); c != nil {
			return c, nil
		}
		return ca.current()
	})
	cfg.NextProtos = append(cfg.NextProtos, protocols...)
	return cfg
}

func serverConfig(get func(*tls.ClientHelloInfo) (*tls.Certificate, error)) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}, GetCertificate: get}
}

// load fails with fs.ErrNotExist only when there is no authority at all, or an expired one.
func (ca *CA) load(keyPath string) error {
	certPEM, err := os.ReadFile(ca.path)
	if err != nil { // a crash in create leaves a key alone
		return fmt.Errorf("read local CA: %w", err)
	}
	keyPEM, err := os.ReadFile(keyPath)
	if err != nil {
		// Never fs.ErrNotExist: a certificate that clients trust is not replaced automatically.
		return fmt.Errorf("local CA: key file %s: %s; restore it, or remove %s to have a new CA made: %w", keyPath, err.Error(), ca.path, errs.ErrInvalid)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return fmt.Errorf("local CA in %s and %s: %w", ca.path, keyPath, err)
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok || !pair.Leaf.IsCA {
		return fmt.Errorf("local CA: %s is not a certificate of an authority: %w", ca.path, errs.ErrInvalid)
	}
	if time.Until(pair.Leaf.NotAfter) < renewBefore {
		return fmt.Errorf("local CA %s expires at %s: %w", ca.path, pair.Leaf.NotAfter, fs.ErrNotExist)
	}
	ca.certPEM, ca.cert, ca.key = certPEM, pair.Leaf, signer
	return nil
}

func (ca *CA) create(keyPath string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make key of local CA: %w", err)
	}
	host, _ := os.Hostname() // only to help users distinguish authorities
	template := &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{"Barchan local CA"}, CommonName: strings.TrimSpace("Barchan " + host)},
		NotBefore:             time.Now().Add(-backdate),
		NotAfter:              time.Now().Add(caLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := sign(template, template, key.Public(), key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("encode key of local CA: %w", err)
	}
	ca.certPEM, ca.key = pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: der}), key
	if ca.cert, err = x509.ParseCertificate(der); err != nil {
		return fmt.Errorf("read back local CA: %w", err)
	}
	// The certificate is removed first and written last: the next attempt replaces a key without one.
	if err := os.Remove(ca.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace local CA: %w", err)
	}
	if err := durable.WriteFile(keyPath, pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: keyDER}), privateMode); err != nil {
		return err
	}
	return durable.WriteFile(ca.path, ca.certPEM, publicMode)
}

// current returns the certificate, reissued shortly before its expiry.
func (ca *CA) current() (*tls.Certificate, error) {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if ca.leaf != nil && time.Until(ca.leaf.Leaf.NotAfter) > renewBefore {
		return ca.leaf, nil
	}
	leaf, err := ca.issue()
	if err != nil {
		return nil, err
	}
	ca.leaf = leaf
	return leaf, nil
}

func (ca *CA) issue() (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key of certificate: %w", err)
	}
	template := &x509.Certificate{
		Subject:     pkix.Name{Organization: []string{"Barchan"}, CommonName: ca.dns[len(ca.dns)-1]},
		NotBefore:   time.Now().Add(-backdate),
		NotAfter:    time.Now().Add(leafLife),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    ca.dns,
		IPAddresses: ca.ips,
	}
	der, err := sign(template, ca.cert, key.Public(), ca.key)
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read back certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

func sign(template, parent *x509.Certificate, public crypto.PublicKey, key crypto.Signer) ([]byte, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, fmt.Errorf("make serial number: %w", err)
	}
	template.SerialNumber = serial
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, key)
	if err != nil {
		return nil, fmt.Errorf("sign certificate: %w", err)
	}
	return der, nil
}
