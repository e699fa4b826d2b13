package kubecluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"
)

// masters is the group that may do everything.
const masters = "system:masters"

// authority signs the certificates of one server or cluster.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// keyPair is a certificate with its key, in PEM.
type keyPair struct{ cert, key []byte }

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert := certificate("test authority")
	cert.IsCA, cert.BasicConstraintsValid, cert.KeyUsage = true, true, x509.KeyUsageCertSign
	a := &authority{cert: cert, key: key}
	a.pem, err = a.sign(cert, key)
	return a, err
}

// client issues what a user of some groups presents.
func (a *authority) client(user string, groups ...string) (keyPair, error) {
	c := certificate(user)
	c.Subject.Organization = groups
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	return a.issue(c)
}

// server issues what a server presents at its hosts: addresses or names.
func (a *authority) server(user string, hosts ...string) (keyPair, error) {
	c := certificate(user)
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			c.IPAddresses = append(c.IPAddresses, ip)
		} else {
			c.DNSNames = append(c.DNSNames, h)
		}
	}
	return a.issue(c)
}

func (a *authority) issue(c *x509.Certificate) (pair keyPair, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair, err
	}
	if pair.cert, err = a.sign(c, key); err != nil {
		return pair, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return pair, err
	}
	pair.key = pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
	return pair, nil
}

func (a *authority) sign(c *x509.Certificate, key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

// config is how the holder of a key pair reaches a server. The client does not limit its rate.
func (a *authority) config(host string, pair keyPair) *rest.Config {
	return &rest.Config{
		Host: "https://" + host, QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: a.pem, CertData: pair.cert, KeyData: pair.key},
	}
}

// writeServer writes ca.crt and the files of an API server for its hosts.
func (a *authority) writeServer(dir string, hosts ...string) error {
	pair, err := a.server("kube-apiserver", hosts...)
	if err != nil {
		return fmt.Errorf("issue certificate: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.crt"), a.pem, 0o600); err != nil {
		return err
	}
	return pair.write(dir, "server")
}

// write writes NAME.crt and NAME.key.
func (p keyPair) write(dir, name string) error {
	if err := os.WriteFile(filepath.Join(dir, name+".crt"), p.cert, 0o600); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name+".key"), p.key, 0o600)
}

func certificate(name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(mathrand.Int64()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature,
	}
}
