package acme_test

import (
	"context"
	"crypto/x509"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/acme"
	"github.com/barchan-dev/barchan/internal/edge/acme/dnsrecords"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func TestMain(m *testing.M) { eventually.LeaveNoGoroutines(m) }

const domain = "box.test"

// server serves TLS as the daemon does, with a manager that runs, and plain HTTP beside it.
type server struct {
	m         *acme.Manager
	ca        *localca.CA
	tls, http string
	stop      func()
}

// listenAt takes an address that a server before may have had.
func listenAt(t *testing.T, addr string) net.Listener {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func startServer(t *testing.T, m *acme.Manager, dir, tlsAddr, httpAddr string) *server {
	t.Helper()
	ca, err := localca.Open(localca.Config{Dir: filepath.Join(dir, "tls"), Domains: []string{domain}})
	if err != nil {
		t.Fatal(err)
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !m.ServeChallenge(w, r) {
			_, _ = w.Write([]byte("served"))
		}
	})
	s := &server{m: m, ca: ca, tls: tlsAddr, http: httpAddr}
	secure := &http.Server{Handler: handler, TLSConfig: ca.TLSConfigBehind(m.Certificate, acme.Protocol), ReadHeaderTimeout: eventually.Patience, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	plain := &http.Server{Handler: handler, ReadHeaderTimeout: eventually.Patience}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	secureAt, plainAt := listenAt(t, tlsAddr), listenAt(t, httpAddr)
	wg.Go(func() { _ = secure.ServeTLS(secureAt, "", "") })
	wg.Go(func() { _ = plain.Serve(plainAt) })
	wg.Go(func() {
		if err := m.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	s.stop = sync.OnceFunc(func() {
		cancel()
		_ = secure.Close()
		_ = plain.Close()
		wg.Wait()
	})
	t.Cleanup(s.stop)
	return s
}

func port(t *testing.T, addr string) int {
	t.Helper()
	a, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return a.Port
}

func manager(t *testing.T, cfg acme.Config) *acme.Manager {
	t.Helper()
	cfg.Log = telemetry.Discard()
	if cfg.Domains == nil {
		cfg.Domains = []string{domain + ":8443", "barchan.localhost"}
	}
	m, err := acme.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// issued waits until each name is served with a certificate that the pool vouches for.
func issued(t *testing.T, s *server, trust *x509.CertPool, names ...string) (last *x509.Certificate) {
	t.Helper()
	for _, name := range names {
		eventually.NoError(t, "certificate of "+name, func() (err error) {
			last, err = hello(t.Context(), s.tls, name, trust)
			if err != nil {
				for _, state := range s.m.States() {
					err = errors.Join(err, errors.New(state.Failure))
				}
			}
			return err
		})
	}
	return last
}

func zoneAt(addr string) dnsrecords.Zone {
	return dnsrecords.Zone{Server: addr, Name: domain, KeyName: "barchan-key", Algorithm: "hmac-sha256", Secret: keySecret}
}

// TestWildcard has the real authority certify a domain by DNS updates; the certificate outlasts the
// server and the authority.
func TestWildcard(t *testing.T) {
	ns := startNameserver(t)
	tlsAddr, httpAddr := freeAddr(), freeAddr()
	p := startPebble(t, ns.addr, 90*24*time.Hour, port(t, tlsAddr), port(t, httpAddr))
	trust := p.trusted(t)
	dir := t.TempDir()
	cfg := acme.Config{Dir: filepath.Join(dir, "acme"), Directory: p.directory, Roots: p.roots, Email: "op@box.test", DNS: zoneAt(ns.addr)}
	s := startServer(t, manager(t, cfg), dir, tlsAddr, httpAddr)

	names := []string{domain, "api." + domain, "8000-iabc." + domain}
	first := issued(t, s, trust, names...)
	if _, err := hello(t.Context(), s.tls, "a.b."+domain, trust); err == nil {
		t.Error("a name two levels below was certified")
	}
	local := x509.NewCertPool()
	local.AppendCertsFromPEM(s.ca.CertPEM())
	if _, err := hello(t.Context(), s.tls, "localhost", local); err != nil {
		t.Errorf("other names lost the local CA's certificate: %v", err)
	}
	if left, added := ns.left(); len(left) > 0 || added != 2 {
		t.Errorf("%d records were added, want one for each name; left behind: %v", added, left)
	}
	checkFiles(t, cfg.Dir)
	states := s.m.States()
	third := first.NotAfter.Sub(first.NotBefore) / 3
	if len(states) != 1 || states[0].Failures != 0 || !states[0].Expires.Equal(first.NotAfter) ||
		states[0].Next.After(first.NotAfter.Add(-third)) || states[0].Next.Before(first.NotAfter.Add(-third-third/10)) {
		t.Errorf("states: %+v", states)
	}
	s.stop()
	p.stop()

	again := startServer(t, manager(t, cfg), dir, tlsAddr, httpAddr)
	kept, err := hello(t.Context(), again.tls, names[2], trust)
	if err != nil || kept.SerialNumber.Cmp(first.SerialNumber) != 0 {
		t.Errorf("after a restart, without the authority: %v", err)
	}
	if states := again.m.States(); states[0].Failures != 0 || time.Until(states[0].Next) < 24*time.Hour {
		t.Errorf("after a restart it is ordered again: %+v", states)
	}
}

// checkFiles: what is kept is for its owner alone. A certificate is served before it is noted that the
// try was a success, which is the last to be written.
func checkFiles(t *testing.T, dir string) {
	t.Helper()
	eventually.True(t, "the try is noted", func() bool {
		found, _ := filepath.Glob(filepath.Join(dir, "*", "tries.json"))
		return len(found) > 0
	})
	var found []string
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err == nil && info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		found = append(found, e.Name())
		return err
	})
	if err != nil || strings.Join(found, " ") != "account.key box.test.pem tries.json" {
		t.Errorf("files: %v, %v", found, err)
	}
}

// TestRenewal: certificates that last for seconds are renewed while the server serves.
func TestRenewal(t *testing.T) {
	ns := startNameserver(t)
	tlsAddr, httpAddr := freeAddr(), freeAddr()
	p := startPebble(t, ns.addr, 9*time.Second, port(t, tlsAddr), port(t, httpAddr))
	trust := p.trusted(t)
	dir := t.TempDir()
	m := manager(t, acme.Config{Dir: filepath.Join(dir, "acme"), Directory: p.directory, Roots: p.roots, DNS: zoneAt(ns.addr)})
	acme.SetPause(m, time.Millisecond)
	s := startServer(t, m, dir, tlsAddr, httpAddr)
	first := issued(t, s, trust, domain)
	eventually.NoError(t, "another certificate", func() error {
		next, err := hello(t.Context(), s.tls, domain, trust)
		if err == nil && next.SerialNumber.Cmp(first.SerialNumber) == 0 {
			err = errors.New("it is the same")
		}
		return err
	})
}

// TestNamesWithoutDNS has the names of the API certified over TLS and, where that port leads
// elsewhere, over HTTP.
func TestNamesWithoutDNS(t *testing.T) {
	for _, way := range []string{"tls", "http"} {
		t.Run(way, func(t *testing.T) {
			ns := startNameserver(t)
			tlsAddr, httpAddr := freeAddr(), freeAddr()
			askTLS, askHTTP := port(t, tlsAddr), port(t, httpAddr)
			if way == "http" {
				askTLS = port(t, freeAddr())
			}
			p := startPebble(t, ns.addr, 90*24*time.Hour, askTLS, askHTTP)
			trust := p.trusted(t)
			dir := t.TempDir()
			m := manager(t, acme.Config{Dir: filepath.Join(dir, "acme"), Directory: p.directory, Roots: p.roots})
			if way == "http" { // the first try, over TLS, fails
				acme.SetFailures(m, "api."+domain, 1)
				acme.SetFailures(m, "sandbox."+domain, 1)
				acme.SetFailures(m, domain, 1)
			}
			s := startServer(t, m, dir, tlsAddr, httpAddr)
			issued(t, s, trust, domain, "api."+domain, "sandbox."+domain)
			if _, err := hello(t.Context(), s.tls, "8000-iabc."+domain, trust); err == nil {
				t.Error("a sandbox's host was certified")
			}
			local := x509.NewCertPool()
			local.AppendCertsFromPEM(s.ca.CertPEM())
			if _, err := hello(t.Context(), s.tls, "8000-iabc."+domain, local); err != nil {
				t.Errorf("a sandbox's host has no certificate of the local CA: %v", err)
			}
		})
	}
}

// TestAuthorityIsDown: the server serves with what it has, and the next attempt is reported and kept over
// a restart, unless the settings change.
func TestAuthorityIsDown(t *testing.T) {
	dir := t.TempDir()
	cfg := acme.Config{Dir: filepath.Join(dir, "acme"), Directory: "https://" + freeAddr() + "/dir", DNS: zoneAt(freeAddr()), Settings: "a"}
	s := startServer(t, manager(t, cfg), dir, freeAddr(), freeAddr())
	local := x509.NewCertPool()
	local.AppendCertsFromPEM(s.ca.CertPEM())
	if _, err := hello(t.Context(), s.tls, "api."+domain, local); err != nil {
		t.Errorf("not served meanwhile: %v", err)
	}
	var state acme.State
	eventually.NoError(t, "the failure is reported", func() error {
		if state = s.m.States()[0]; state.Failures == 0 {
			return errors.New("no failure")
		}
		return nil
	})
	if !strings.Contains(state.Failure, cfg.Directory) || time.Until(state.Next) < time.Minute {
		t.Errorf("state: %+v", state)
	}
	s.stop()
	if again := manager(t, cfg).States()[0]; again.Failures != 1 || !again.Next.Equal(state.Next) {
		t.Errorf("after a restart: %+v, was %+v", again, state)
	}
	cfg.Settings = "b"
	if again := manager(t, cfg).States()[0]; !again.Next.IsZero() {
		t.Errorf("with other settings it still waits: %+v", again)
	}
}

// TestWrongKey: the DNS server's error reaches the operator.
func TestWrongKey(t *testing.T) {
	ns := startNameserver(t)
	tlsAddr, httpAddr := freeAddr(), freeAddr()
	p := startPebble(t, ns.addr, time.Hour, port(t, tlsAddr), port(t, httpAddr))
	dir := t.TempDir()
	zone := zoneAt(ns.addr)
	zone.Secret = "d3Jvbmc="
	m := manager(t, acme.Config{Dir: filepath.Join(dir, "acme"), Directory: p.directory, Roots: p.roots, DNS: zone})
	startServer(t, m, dir, tlsAddr, httpAddr)
	eventually.NoError(t, "the failure is reported", func() error {
		if failure := m.States()[0].Failure; !strings.Contains(failure, "_acme-challenge.box.test") || !strings.Contains(failure, "NOTAUTH") {
			return errors.New("failure: " + failure)
		}
		return nil
	})
}

// TestHook: what a program is run with, and what is reported when it fails.
func TestHook(t *testing.T) {
	dir := t.TempDir()
	written := filepath.Join(dir, "log")
	program := filepath.Join(dir, "hook")
	script := "#!/bin/sh\necho \"$@\" >>" + written + "\n[ \"$3\" != bad ] || { echo no such luck; exit 3; }\n"
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	h := acme.Hook{Program: program}
	if err := h.Add(t.Context(), "_acme-challenge.box.test", "good"); err != nil {
		t.Error(err)
	}
	if err := h.Remove(t.Context(), "_acme-challenge.box.test", "good"); err != nil {
		t.Error(err)
	}
	if err := h.Add(t.Context(), "_acme-challenge.box.test", "bad"); !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(err.Error(), "no such luck") {
		t.Errorf("a hook that fails: %v", err)
	}
	text, err := os.ReadFile(written)
	if want := "present _acme-challenge.box.test good\ncleanup _acme-challenge.box.test good\npresent _acme-challenge.box.test bad\n"; err != nil || string(text) != want {
		t.Errorf("the hook was run with %q, %v", text, err)
	}
}

func TestDomainsThatNobodyCertifies(t *testing.T) {
	_, err := acme.New(acme.Config{Dir: t.TempDir(), Log: telemetry.Discard(), Domains: []string{"barchan.localhost:7743", "host"}})
	if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "barchan.localhost") {
		t.Errorf("got %v", err)
	}
}

// TestBrokenFiles: a certificate that cannot be read is ordered again; the account's key is not
// replaced.
func TestBrokenFiles(t *testing.T) {
	dir := t.TempDir()
	cfg := acme.Config{Dir: dir, Directory: "https://" + freeAddr() + "/dir", DNS: zoneAt(freeAddr())}
	manager(t, cfg)
	folder, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(folder) != 1 {
		t.Fatal(folder, err)
	}
	for _, name := range []string{"account.key", "box.test.pem", "tries.json"} {
		if err := os.WriteFile(filepath.Join(folder[0], name), []byte("rubbish"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := manager(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = m.Run(ctx) })
	defer wg.Wait()
	defer cancel()
	eventually.NoError(t, "the failure is reported", func() error {
		if failure := m.States()[0].Failure; !strings.Contains(failure, "account.key") {
			return errors.New("failure: " + failure)
		}
		return nil
	})
}
