package localca

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func TestMain(m *testing.M) { eventually.LeaveNoGoroutines(m) }

// handshake connects over a pipe and returns what the client verified.
func handshake(t *testing.T, server *tls.Config, ca []byte, name string) (tls.ConnectionState, error) {
	t.Helper()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	near, far := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s := tls.Server(far, server)
		_ = s.HandshakeContext(t.Context())
		_, _ = io.Copy(io.Discard, s)
		_ = far.Close()
	}()
	c := tls.Client(near, &tls.Config{RootCAs: roots, ServerName: name, NextProtos: []string{"h2", "http/1.1"}})
	err := c.HandshakeContext(t.Context())
	state := c.ConnectionState()
	_ = near.Close()
	<-done
	return state, err
}

func open(t *testing.T, dir string) *CA {
	t.Helper()
	ca, err := Open(Config{Dir: dir, Domains: []string{"box.test:7743"}, Names: []string{"10.1.2.3", "host.example"}})
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func TestNamesThatAreCertified(t *testing.T) {
	ca := open(t, t.TempDir())
	for _, name := range []string{"box.test", "api.box.test", "49983-i0.box.test", "localhost", "127.0.0.1", "::1", "10.1.2.3", "host.example"} {
		state, err := handshake(t, ca.TLSConfig(), ca.CertPEM(), name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if state.NegotiatedProtocol != "h2" {
			t.Errorf("%s: protocol %q", name, state.NegotiatedProtocol)
		}
	}
	if _, err := handshake(t, ca.TLSConfig(), ca.CertPEM(), "evil.test"); err == nil {
		t.Error("a name that is not ours was certified")
	}
}

func TestAuthorityIsKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "dir")
	first := open(t, dir)
	info, err := os.Stat(filepath.Join(dir, KeyFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("key file: %v, %v", info.Mode(), err)
	}
	second := open(t, dir)
	if !bytes.Equal(first.CertPEM(), second.CertPEM()) {
		t.Error("the authority was created again")
	}
	if onDisk, err := os.ReadFile(first.CertPath()); err != nil || !bytes.Equal(onDisk, first.CertPEM()) {
		t.Errorf("CertPath does not hold CertPEM: %v", err)
	}
	if _, err := handshake(t, second.TLSConfig(), first.CertPEM(), "box.test"); err != nil {
		t.Errorf("trust in the first does not include the second: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestRenewal(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ca := open(t, dir)
		before, err := ca.current()
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(leafLife - renewBefore - time.Hour)
		if same, _ := ca.current(); same != before {
			t.Error("renewed too early")
		}
		time.Sleep(2 * time.Hour)
		if fresh, err := ca.current(); err != nil || fresh == before {
			t.Errorf("not renewed: %v", err)
		}
		time.Sleep(caLife - leafLife)
		if next := open(t, dir); bytes.Equal(next.CertPEM(), ca.CertPEM()) {
			t.Error("an authority at its end was not replaced")
		}
	})
}

func TestHalfAnAuthority(t *testing.T) {
	for _, gone := range []string{CertFile, KeyFile} {
		dir := t.TempDir()
		open(t, dir)
		if err := os.Remove(filepath.Join(dir, gone)); err != nil {
			t.Fatal(err)
		}
		_, err := Open(Config{Dir: dir})
		switch gone {
		case CertFile: // what a crash between the two writes leaves
			if err != nil {
				t.Errorf("a key without a certificate was not replaced: %v", err)
			}
		case KeyFile:
			if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), filepath.Join(dir, gone)) {
				t.Errorf("without %s: %v", gone, err)
			}
		}
	}
	dir := t.TempDir()
	open(t, dir)
	if err := os.WriteFile(filepath.Join(dir, CertFile), []byte("rubbish"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(Config{Dir: dir}); err == nil || !strings.Contains(err.Error(), filepath.Join(dir, CertFile)) {
		t.Errorf("rubbish in the file: %v", err)
	}
	if _, err := Open(Config{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("no directory: %v", err)
	}
}

// writePair puts a fresh certificate of the authority into files.
func writePair(t *testing.T, ca *CA, certPath, keyPath string) {
	t.Helper()
	leaf, err := ca.issue()
	if err != nil {
		t.Fatal(err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(leaf.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{certPath: {Type: pemCert, Bytes: leaf.Certificate[0]}, keyPath: {Type: pemKey, Bytes: key}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFilesAreReloaded(t *testing.T) {
	dir := t.TempDir()
	ca := open(t, dir)
	certPath, keyPath := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	if _, err := OpenFiles(certPath, keyPath, telemetry.Discard()); err == nil || !strings.Contains(err.Error(), certPath) {
		t.Errorf("missing file: %v", err)
	}
	writePair(t, ca, certPath, keyPath)
	f, err := OpenFiles(certPath, keyPath, telemetry.Discard())
	if err != nil {
		t.Fatal(err)
	}
	serial := func() string {
		f.mu.Lock()
		f.checked = time.Time{} // as if the time had come
		f.mu.Unlock()
		state, err := handshake(t, f.TLSConfig(), ca.CertPEM(), "box.test")
		if err != nil {
			t.Fatal(err)
		}
		return state.PeerCertificates[0].SerialNumber.String()
	}
	first := serial()
	if serial() != first {
		t.Error("it changed without a reload")
	}
	if err := os.WriteFile(keyPath, []byte("half written"), 0o600); err != nil {
		t.Fatal(err)
	}
	if serial() != first {
		t.Error("a broken pair was taken")
	}
	writePair(t, ca, certPath, keyPath)
	if serial() == first {
		t.Error("the new pair was not taken")
	}
}
