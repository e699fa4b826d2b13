// Package trust is the mutual TLS of replicas: their authority, certificates and renewal.
package trust

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/localca"
)

const (
	leafLife = 90 * 24 * time.Hour
	// RenewBefore is how long before its expiry a certificate is renewed.
	RenewBefore = 30 * 24 * time.Hour
	backdate    = time.Hour
	dirMode     = 0o700
)

// Reasons why connections are refused.
const (
	RefusedNoCertificate = "no_certificate"
	RefusedCertificate   = "certificate" // not of our authority, expired, or for other uses
)

// Source names the source of this replica's certificate and CA: Dir, Seed, or the three files. The
// certificate must have the replica's name as a DNS name, literally, and be valid for server and
// client authentication.
type Source struct {
	// Dir has a CA for the replicas alone, which all of them read; the first creates it. It must not
	// be that of a gateway's certificates.
	Dir string
	// Seed is a secret of ed25519.SeedSize bytes that all replicas share, and no other process has. Each replica
	// derives the same CA from it.
	Seed []byte
	// CAFile, CertFile and KeyFile are PEM files that are renewed externally. They are read for each
	// connection.
	CAFile, CertFile, KeyFile string
}

// Trust implements mutual TLS.
type Trust struct {
	name  string
	files Source
	ca    *x509.Certificate // of Dir or Seed; nil with files
	key   crypto.Signer     // of Dir or Seed

	Mu   sync.Mutex
	Leaf *tls.Certificate // +checklocks:Mu
}

// Open checks the source, and creates what Dir lacks.
func Open(name string, files Source) (*Trust, error) {
	t := &Trust{name: name, files: files}
	if err := t.openSource(); err != nil {
		return nil, fmt.Errorf("peers: %w", err)
	}
	if _, err := t.roots(); err != nil {
		return nil, err
	}
	cert, err := t.Certificate()
	if err != nil {
		return nil, err
	}
	if !slices.Contains(cert.Leaf.DNSNames, name) {
		return nil, fmt.Errorf("peers: certificate %s is for %q, not for this replica, %q: %w", files.CertFile, cert.Leaf.DNSNames, name, errs.ErrInvalid)
	}
	return t, nil
}

// openSource makes or reads a CA of our own, unless there are files.
func (t *Trust) openSource() error {
	given := 0
	for _, file := range []string{t.files.CAFile, t.files.CertFile, t.files.KeyFile} {
		if file != "" {
			given++
		}
	}
	switch dir, seed := t.files.Dir, t.files.Seed; {
	case dir != "" && given == 0 && seed == nil:
		return t.openAuthority(dir)
	case len(seed) == ed25519.SeedSize && given == 0 && dir == "":
		return t.deriveAuthority(seed)
	case given == 3 && dir == "" && seed == nil:
		return nil
	}
	return fmt.Errorf("TLS: want one of Dir, a Seed of %d bytes, and all of CAFile, CertFile and KeyFile: %w", ed25519.SeedSize, errs.ErrInvalid)
}

// deriveAuthority makes the CA of a seed. It is the same on each replica to the byte: an Ed25519 signature has no random part.
// It ends with its seed; the last instant that a certificate can name stands for that (RFC 5280, 4.1.2.5).
func (t *Trust) deriveAuthority(seed []byte) error {
	key := ed25519.NewKeyFromSeed(seed)
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{Organization: []string{"Barchan peers"}, CommonName: "derived authority"},
		NotBefore:             time.Date(2020, time.January, 1, 0, 0, 0, 0, time.UTC),
		NotAfter:              time.Date(9999, time.December, 31, 23, 59, 59, 0, time.UTC),
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true, IsCA: true, MaxPathLenZero: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return fmt.Errorf("sign certificate of authority: %w", err)
	}
	t.key = key
	if t.ca, err = x509.ParseCertificate(der); err != nil {
		return fmt.Errorf("read back certificate of authority: %w", err)
	}
	return nil
}

// openAuthority locks the directory, so that two replicas that start together end with one CA.
func (t *Trust) openAuthority(dir string) error {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return fmt.Errorf("make directory of authority: %w", err)
	}
	return Exclusively(filepath.Join(dir, ".lock"), func() error {
		ca, err := localca.Open(localca.Config{Dir: dir})
		if err != nil {
			return err
		}
		block, _ := pem.Decode(ca.CertPEM())
		if t.ca, err = x509.ParseCertificate(block.Bytes); err != nil {
			return fmt.Errorf("read certificate of authority: %w", err)
		}
		t.key, err = readKey(filepath.Join(dir, localca.KeyFile))
		return err
	})
}

func readKey(path string) (crypto.Signer, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read key of authority: %w", err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("%s is not PEM: %w", path, errs.ErrInvalid)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("%s cannot sign: %w", path, errs.ErrInvalid)
	}
	return signer, nil
}

// Exclusively runs f while no other process runs one on the same lock file.
func Exclusively(lock string, f func() error) error {
	file, err := os.OpenFile(lock, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("open lock: %w", err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		return errors.Join(fmt.Errorf("lock %s: %w", lock, err), file.Close())
	}
	return errors.Join(f(), file.Close())
}

// Certificate returns this replica's certificate. One of our own CA is reissued before it expires.
func (t *Trust) Certificate() (*tls.Certificate, error) {
	if t.ca == nil {
		pair, err := tls.LoadX509KeyPair(t.files.CertFile, t.files.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("load certificate %s: %w", t.files.CertFile, err)
		}
		return &pair, nil
	}
	t.Mu.Lock()
	defer t.Mu.Unlock()
	if t.Leaf != nil && time.Until(t.Leaf.Leaf.NotAfter) > RenewBefore {
		return t.Leaf, nil
	}
	leaf, err := issue(t.name, t.ca, t.key)
	if err != nil {
		return nil, err
	}
	t.Leaf = leaf
	return leaf, nil
}

func issue(name string, ca *x509.Certificate, caKey crypto.Signer) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key of certificate: %w", err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, fmt.Errorf("make serial number: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{Organization: []string{"Barchan peers"}},
		NotBefore:    time.Now().Add(-backdate),
		NotAfter:     time.Now().Add(leafLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:     []string{name},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca, key.Public(), caKey)
	if err != nil {
		return nil, fmt.Errorf("sign certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read back certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, nil
}

func (t *Trust) roots() (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if t.ca != nil {
		pool.AddCert(t.ca)
		return pool, nil
	}
	text, err := os.ReadFile(t.files.CAFile)
	if err != nil {
		return nil, fmt.Errorf("read authority: %w", err)
	}
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s has no certificate: %w", t.files.CAFile, errs.ErrInvalid)
	}
	return pool, nil
}

// verify checks the peer's certificates.
func (t *Trust) verify(shown []*x509.Certificate, use x509.ExtKeyUsage) error {
	if len(shown) == 0 {
		return fmt.Errorf("no certificate shown: %w", errs.ErrUnauthenticated)
	}
	roots, err := t.roots()
	if err != nil {
		return err
	}
	between := x509.NewCertPool()
	for _, c := range shown[1:] {
		between.AddCert(c)
	}
	opts := x509.VerifyOptions{Roots: roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{use}}
	if _, err := shown[0].Verify(opts); err != nil {
		return fmt.Errorf("certificate: %w: %w", err, errs.ErrForbidden)
	}
	return nil
}

// SpeaksFor reports whether a certificate is that of a member. Wildcards do not match.
func SpeaksFor(cert *x509.Certificate, name string) bool { return slices.Contains(cert.DNSNames, name) }

// Server returns the configuration of the listening side. It verifies the peer itself, in the
// handshake, to pass the reason of a rejection to refused.
func (t *Trust) Server(refused func(reason string)) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		NextProtos:             []string{"http/1.1"},
		ClientAuth:             tls.RequestClientCert,
		SessionTicketsDisabled: true,
		GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return t.Certificate() },
		VerifyConnection: func(c tls.ConnectionState) error {
			err := t.verify(c.PeerCertificates, x509.ExtKeyUsageClientAuth)
			switch {
			case errors.Is(err, errs.ErrUnauthenticated):
				refused(RefusedNoCertificate)
			case err != nil:
				refused(RefusedCertificate)
			}
			return err
		},
	}
}

// Client returns the configuration for connecting to a member, which must present that member's
// certificate.
func (t *Trust) Client(member string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: member,
		// The library would accept wildcards; VerifyConnection makes all its checks, but accepts none.
		InsecureSkipVerify:   true,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return t.Certificate() },
		VerifyConnection: func(c tls.ConnectionState) error {
			if err := t.verify(c.PeerCertificates, x509.ExtKeyUsageServerAuth); err != nil {
				return err
			}
			if !SpeaksFor(c.PeerCertificates[0], member) {
				return fmt.Errorf("certificate is for %q, not for %q: %w", c.PeerCertificates[0].DNSNames, member, errs.ErrForbidden)
			}
			return nil
		},
	}
}
