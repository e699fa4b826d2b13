package acme

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// Files below the directory of an authority, readable by their owner only.
const (
	accountFile = "account.key"
	triesFile   = "tries.json"
	certSuffix  = ".pem" // a key and its chain, in one file, so that they always match

	privateMode = 0o600
	dirMode     = 0o700

	pemCert = "CERTIFICATE"
	pemKey  = "PRIVATE KEY"
)

// folderOf returns a directory per authority: a certificate is useless to clients that trust another
// one.
func folderOf(directory string) string {
	sum := sha256.Sum256([]byte(directory))
	name := hex.EncodeToString(sum[:6])
	if u, err := url.Parse(directory); err == nil && u.Hostname() != "" {
		name = u.Hostname() + "-" + name
	}
	return name
}

// load reads the stored files.
func (m *Manager) load() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.wants {
		path := m.certPath(w)
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var c *tls.Certificate
		if err == nil {
			c, err = parseCert(text)
		}
		if err != nil {
			m.log.Warn("certificate cannot be read, another one is asked for", telemetry.Path, path, telemetry.Error, err)
			continue
		}
		m.held[w.id] = c
	}
	m.indexLocked()
	if err := m.loadTriesLocked(); err != nil {
		m.log.Warn("earlier tries are forgotten", telemetry.Path, filepath.Join(m.dir, triesFile), telemetry.Error, err)
	}
}

// +checklocks:m.mu
func (m *Manager) loadTriesLocked() error {
	text, err := os.ReadFile(filepath.Join(m.dir, triesFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read tries: %w", err)
	}
	if err := json.Unmarshal(text, &m.tries); err != nil {
		return fmt.Errorf("read tries: %w", err)
	}
	if m.tries == nil { // the file contained null
		m.tries = map[string]orderAttempt{}
	}
	for id, t := range m.tries {
		if t.Settings != m.settings() {
			t.After = time.Time{} // the cause may have been fixed
			m.tries[id] = t
		}
	}
	return nil
}

// settings identifies the settings that an attempt depends on.
func (m *Manager) settings() string {
	sum := sha256.Sum256([]byte(m.cfg.Email + "\x00" + m.cfg.Settings))
	return hex.EncodeToString(sum[:8])
}

func (m *Manager) certPath(w certSpec) string { return filepath.Join(m.dir, w.id+certSuffix) }

// indexLocked indexes certificates by their names. One with other names than are wanted now serves
// those that it has.
//
// +checklocks:m.mu
func (m *Manager) indexLocked() {
	m.byName = map[string]*tls.Certificate{}
	for _, w := range m.wants {
		if c := m.held[w.id]; c != nil {
			for _, name := range c.Leaf.DNSNames {
				m.byName[name] = c
			}
		}
	}
}

// keep writes a certificate and serves it from now on.
func (m *Manager) keep(w certSpec, text []byte) error {
	c, err := parseCert(text)
	if err != nil {
		return err
	}
	if !covers(c, w) {
		return fmt.Errorf("the authority certified %v, wanted %v: %w", c.Leaf.DNSNames, w.names, errs.ErrUnavailable)
	}
	if err := durable.WriteFile(m.certPath(w), text, privateMode); err != nil {
		return fmt.Errorf("keep certificate: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.held[w.id] = c
	m.indexLocked()
	return nil
}

// covers reports whether a certificate has all wanted names.
func covers(c *tls.Certificate, w certSpec) bool {
	for _, name := range w.names {
		if !slices.Contains(c.Leaf.DNSNames, name) {
			return false
		}
	}
	return true
}

func parseCert(text []byte) (*tls.Certificate, error) {
	pair, err := tls.X509KeyPair(text, text)
	if err != nil {
		return nil, fmt.Errorf("parse certificate: %w", err)
	}
	return &pair, nil
}

// encodeCert returns the input of parseCert.
func encodeCert(key crypto.Signer, chain [][]byte) ([]byte, error) {
	text, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	for _, der := range chain {
		text = append(text, pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: der})...)
	}
	return text, nil
}

func encodeKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der}), nil
}

func newKey() (crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	return key, nil
}

// accountKey returns the key of the account at the authority, created if missing. An unreadable one is
// an error, and never replaced: its account may be the authorized one.
func (m *Manager) accountKey() (crypto.Signer, error) {
	path := filepath.Join(m.dir, accountFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		key, err := newKey()
		if err != nil {
			return nil, err
		}
		if text, err = encodeKey(key); err != nil {
			return nil, err
		}
		if err := durable.WriteFile(path, text, privateMode); err != nil {
			return nil, fmt.Errorf("keep the account's key: %w", err)
		}
		return key, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the account's key: %w", err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("the account's key %s is no PEM file; restore it, or remove it to have another account made: %w", path, errs.ErrInvalid)
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	signer, ok := key.(crypto.Signer)
	if err != nil || !ok {
		return nil, fmt.Errorf("the account's key %s cannot be read; restore it, or remove it to have another account made: %w", path, errs.ErrInvalid)
	}
	return signer, nil
}
