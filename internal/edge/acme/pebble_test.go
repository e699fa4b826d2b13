package acme_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// pebble is a real authority, which knows names by a DNS server of ours alone.
type pebble struct {
	directory  string
	management string
	roots      *x509.CertPool // for its own two listeners
	out        bytes.Buffer
	stop       func()
}

// startPebble starts one that issues certificates which last as long, and validates at the ports.
func startPebble(t *testing.T, dnsServer string, lasts time.Duration, tlsPort, httpPort int) *pebble {
	t.Helper()
	program := pebbleProgram(t)
	addrs := []string{freeAddr(), freeAddr()}
	dir := t.TempDir()
	p := &pebble{directory: "https://" + addrs[0] + "/dir", management: "https://" + addrs[1], roots: x509.NewCertPool()}
	certPEM, keyPEM := selfSigned(t)
	p.roots.AppendCertsFromPEM(certPEM)
	cert, key, config := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"), filepath.Join(dir, "config.json")
	settings, err := json.Marshal(map[string]any{"pebble": map[string]any{
		"listenAddress": addrs[0], "managementListenAddress": addrs[1], "certificate": cert, "privateKey": key,
		"httpPort": httpPort, "tlsPort": tlsPort, "keyAlgorithm": "ecdsa", "retryAfter": map[string]int{"authz": 1, "order": 1},
		"profiles": map[string]any{"default": map[string]any{"description": "of the test", "validityPeriod": int(lasts.Seconds())}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string][]byte{cert: certPEM, key: keyPEM, config: settings} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program, "-config", config, "-dnsserver", dnsServer)
	cmd.Env = append(os.Environ(), "PEBBLE_VA_NOSLEEP=1", "PEBBLE_AUTHZREUSE=0")
	cmd.Stdout, cmd.Stderr = &p.out, &p.out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.stop = sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	t.Cleanup(func() {
		p.stop()
		if t.Failed() {
			t.Logf("pebble's output:\n%s", p.out.String())
		}
	})
	p.await(t)
	return p
}

func pebbleProgram(t *testing.T) string {
	t.Helper()
	cache := os.Getenv("BARCHAN_CACHE")
	if cache == "" {
		cache = "/var/cache/barchan"
	}
	program := filepath.Join(cache, "bin", "pebble")
	if _, err := os.Stat(program); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s is missing: scripts/tool.sh pebble builds it", program)
		}
		t.Skipf("SKIPPED: %s is missing: scripts/tool.sh pebble builds it", program)
	}
	return program
}

// await returns when it answers.
func (p *pebble) await(t *testing.T) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.roots}, DisableKeepAlives: true}}
	eventually.NoError(t, "pebble answers", func() error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.directory, nil)
		if err != nil {
			return err
		}
		res, err := client.Do(req)
		if err != nil {
			return err
		}
		return res.Body.Close()
	})
}

// trusted is what a client trusts that believes in pebble's root. The port that serves it may open after
// the authority's.
func (p *pebble) trusted(t *testing.T) *x509.CertPool {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.roots}, DisableKeepAlives: true}}
	pool := x509.NewCertPool()
	eventually.NoError(t, "pebble serves its root", func() error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.management+"/roots/0", nil)
		if err != nil {
			return err
		}
		res, err := client.Do(req)
		if err != nil {
			return err
		}
		defer func() { _ = res.Body.Close() }()
		text, err := io.ReadAll(res.Body)
		if err == nil && !pool.AppendCertsFromPEM(text) {
			err = fmt.Errorf("no certificate: %s", text)
		}
		return err
	})
	return pool
}

// selfSigned is a certificate of our own address that is its own root.
func selfSigned(t *testing.T) (certPEM, keyPEM []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "pebble"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{ownIP()}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}

// ownIP is an address of loopback that no other process has.
func ownIP() net.IP {
	pid := os.Getpid()
	return net.IPv4(127, byte(64|pid>>16), byte(pid>>8), byte(pid))
}

// lastPort is the last that freeAddr gave away.
var lastPort atomic.Int32

// freeAddr is one that no other process takes, even without a listener.
func freeAddr() string {
	return net.JoinHostPort(ownIP().String(), strconv.Itoa(int(10_000+lastPort.Add(1)%10_000)))
}

// The key that the DNS server takes updates with.
const (
	keyName   = "barchan-key."
	keySecret = "c2VjcmV0IG9mIHRoZSB0ZXN0LCBvZiB0aGlydHktdHdvIGJ5dGVz"
)

// nameserver is a DNS server with one zone: all names are our own address, and TXT records are taken by
// signed updates alone; added counts those that added one.
type nameserver struct {
	addr string

	mu    sync.Mutex
	texts map[string][]string // +checklocks:mu
	added int                 // +checklocks:mu
}

func startNameserver(t *testing.T) *nameserver {
	t.Helper()
	n := &nameserver{texts: map[string][]string{}}
	var lc net.ListenConfig
	tcp, err := lc.Listen(t.Context(), "tcp", freeAddr())
	if err != nil {
		t.Fatal(err)
	}
	n.addr = tcp.Addr().String()
	udp, err := lc.ListenPacket(t.Context(), "udp", n.addr)
	if err != nil {
		t.Fatal(err)
	}
	mux := dns.NewServeMux()
	mux.HandleFunc(domain+".", n.serve)
	for _, s := range []*dns.Server{{Listener: tcp}, {PacketConn: udp}} {
		s.Handler, s.TsigSecret = mux, map[string]string{keyName: keySecret}
		// The library's default refuses updates.
		s.MsgAcceptFunc = func(dns.Header) dns.MsgAcceptAction { return dns.MsgAccept }
		done, started := make(chan struct{}), make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go func() {
			defer close(done)
			_ = s.ActivateAndServe()
		}()
		<-started
		t.Cleanup(func() {
			_ = s.Shutdown()
			<-done
		})
	}
	return n
}

func (n *nameserver) serve(w dns.ResponseWriter, r *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(r)
	m.Authoritative = true
	if r.Opcode == dns.OpcodeUpdate {
		n.update(w, r, m)
		return
	}
	q := r.Question[0]
	name := strings.ToLower(q.Name)
	switch q.Qtype {
	case dns.TypeA:
		m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: ownIP()})
	case dns.TypeTXT:
		n.mu.Lock()
		for _, text := range n.texts[name] {
			m.Answer = append(m.Answer, &dns.TXT{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeTXT, Class: dns.ClassINET}, Txt: []string{text}})
		}
		n.mu.Unlock()
	}
	_ = w.WriteMsg(m)
}

func (n *nameserver) update(w dns.ResponseWriter, r, m *dns.Msg) {
	if r.IsTsig() == nil || w.TsigStatus() != nil {
		m.Rcode = dns.RcodeNotAuth
		_ = w.WriteMsg(m)
		return
	}
	n.mu.Lock()
	for _, rr := range r.Ns {
		text, ok := rr.(*dns.TXT)
		if !ok {
			continue
		}
		name := strings.ToLower(text.Hdr.Name)
		if text.Hdr.Class == dns.ClassNONE {
			var kept []string
			for _, have := range n.texts[name] {
				if have != text.Txt[0] {
					kept = append(kept, have)
				}
			}
			n.texts[name] = kept
		} else {
			n.texts[name] = append(n.texts[name], text.Txt[0])
			n.added++
		}
	}
	n.mu.Unlock()
	m.SetTsig(keyName, r.IsTsig().Algorithm, 300, time.Now().Unix())
	_ = w.WriteMsg(m)
}

// left are the records that were not removed, and how many there were.
func (n *nameserver) left() (left []string, added int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for name, texts := range n.texts {
		for range texts {
			left = append(left, name)
		}
	}
	return left, n.added
}

// hello connects to a server as a client that trusts a pool, and returns what it was shown.
func hello(ctx context.Context, addr, name string, trust *x509.CertPool) (*x509.Certificate, error) {
	d := tls.Dialer{Config: &tls.Config{RootCAs: trust, ServerName: name}}
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	c, ok := conn.(*tls.Conn)
	if !ok {
		return nil, errors.New("no TLS")
	}
	req := fmt.Sprintf("GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", name)
	if _, err := c.Write([]byte(req)); err != nil {
		return nil, err
	}
	answer, err := io.ReadAll(c)
	if err != nil || !strings.HasSuffix(string(answer), "served") {
		return nil, fmt.Errorf("answer %q: %w", answer, err)
	}
	return c.ConnectionState().PeerCertificates[0], nil
}
