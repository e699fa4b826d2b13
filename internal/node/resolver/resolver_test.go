package resolver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

type upstream struct {
	addr    netip.AddrPort
	queries atomic.Int32
}

// startUpstream answers with records in zone file format; "TC" truncates UDP responses.
func startUpstream(t *testing.T, zone map[string][]string) *upstream {
	t.Helper()
	u := &upstream{}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		u.queries.Add(1)
		a := new(dns.Msg).SetReply(q)
		a.RecursionAvailable = true
		lines, known := zone[strings.ToLower(q.Question[0].Name)+" "+dns.TypeToString[q.Question[0].Qtype]]
		if !known {
			a.Rcode = dns.RcodeNameError
		}
		for _, line := range lines {
			switch line {
			case "SERVFAIL":
				a.Rcode = dns.RcodeServerFailure
			case "TC":
				a.Truncated = w.LocalAddr().Network() == "udp"
			default:
				rr, err := dns.NewRR(line)
				if err != nil {
					t.Errorf("record %q: %v", line, err)
				}
				a.Answer = append(a.Answer, rr)
			}
		}
		if a.Truncated {
			a.Answer = nil
		}
		_ = w.WriteMsg(a)
	})
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", freeAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	p, err := (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	u.addr = netip.MustParseAddrPort(l.Addr().String())
	for _, s := range []*dns.Server{{Listener: l, Handler: handler}, {PacketConn: p, Handler: handler}} {
		begun, ended := make(chan struct{}), make(chan struct{})
		s.NotifyStartedFunc = func() { close(begun) }
		go func() {
			defer close(ended)
			_ = s.ActivateAndServe()
		}()
		<-begun
		t.Cleanup(func() {
			_ = s.Shutdown()
			<-ended
		})
	}
	return u
}

var lastPort atomic.Int32

// freeAddr returns an unused address, free for both protocols.
func freeAddr() netip.AddrPort {
	pid := os.Getpid()
	own := netip.AddrFrom4([4]byte{127, byte(64 | pid>>16), byte(pid >> 8), byte(pid)})
	return netip.AddrPortFrom(own, uint16(10_000+lastPort.Add(1)%10_000))
}

type fakeSandboxes struct {
	mu     sync.Mutex
	policy egress.Policy
	pins   map[string]time.Duration // name and address
	before func(*fakeSandboxes)     // called under mu
}

func (c *fakeSandboxes) EgressOf(netip.Addr) egress.Policy {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.policy
}

func (c *fakeSandboxes) Pin(_ context.Context, _ netip.Addr, name string, addrs []netip.Addr, keep time.Duration) (pinned []netip.Addr, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.before != nil {
		c.before(c)
	}
	if _, ok := c.policy.Match(name); !ok {
		return nil, fmt.Errorf("%s: %w", name, errs.ErrForbidden)
	}
	for _, a := range addrs {
		if !a.IsPrivate() {
			c.pins[strings.ToLower(name)+" "+a.String()] = keep
			pinned = append(pinned, a)
		}
	}
	return pinned, nil
}

// start runs a resolver and returns its address.
func start(t *testing.T, c *fakeSandboxes, change func(*Config), upstreams ...netip.AddrPort) string {
	t.Helper()
	c.pins = map[string]time.Duration{}
	at := freeAddr()
	cfg := Config{
		Listen: []netip.AddrPort{at}, Clients: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}, Upstreams: upstreams,
		Sandboxes: c, Log: telemetry.Discard(), questionTime: eventually.Patience, upstreamTime: eventually.Patience,
	}
	if change != nil {
		change(&cfg)
	}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	eventually.NoError(t, "it listens", func() error {
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at.String())
		if err == nil {
			_ = c.Close()
		}
		return err
	})
	return at.String()
}

func ask(t *testing.T, network, at, name string, kind uint16) *dns.Msg {
	t.Helper()
	q := new(dns.Msg).SetQuestion(name, kind)
	q.SetEdns0(4096, false)
	var a *dns.Msg
	eventually.NoError(t, "an answer", func() (err error) { // UDP may listen slightly later than TCP
		a, _, err = (&dns.Client{Net: network, Timeout: eventually.Patience}).ExchangeContext(t.Context(), q, at)
		var no *net.OpError
		if err != nil && (!errors.As(err, &no) || no.Op == "dial") {
			t.Fatal(err)
		}
		return err
	})
	return a
}

func texts(a *dns.Msg) (list []string) {
	for _, rr := range a.Answer {
		list = append(list, strings.TrimPrefix(strings.ReplaceAll(rr.String(), "\t", " "), rr.Header().Name+" "))
	}
	return list
}

var closed = egress.Policy{
	Closed: "internet: false",
	Names:  []egress.Name{{Pattern: "example.com", From: "allowOut[0] example.com"}, {Pattern: "*.example.org", From: "allowOut[1] *.example.org"}},
}

func TestForward(t *testing.T) {
	good := startUpstream(t, map[string][]string{
		"example.com. A": {"example.com. 60 IN A 192.0.2.7"}, "big.test. TXT": {"TC", "big.test. 60 IN TXT " + strings.Repeat("x", 200)},
		"long.test. TXT": append(slices.Repeat([]string{`long.test. 60 IN TXT "` + strings.Repeat("y", 200) + `"`}, 20), "TC"),
	})
	sick := startUpstream(t, map[string][]string{"example.com. A": {"SERVFAIL"}, "big.test. TXT": {"SERVFAIL"}, "long.test. TXT": {"SERVFAIL"}})
	dead := netip.MustParseAddrPort("127.0.0.1:1")
	at := start(t, &fakeSandboxes{}, nil, dead, sick.addr, good.addr)
	for _, network := range []string{"udp", "tcp"} {
		a := ask(t, network, at, "ExAmple.com.", dns.TypeA)
		if got := texts(a); len(got) != 1 || got[0] != "60 IN A 192.0.2.7" || !a.RecursionAvailable || a.Question[0].Name != "ExAmple.com." {
			t.Errorf("over %s: %v", network, a)
		}
		if a := ask(t, network, at, "big.test.", dns.TypeTXT); len(a.Answer) != 1 {
			t.Errorf("what needs TCP, over %s: %v", network, a)
		}
		if a := ask(t, network, at, "none.test.", dns.TypeA); a.Rcode != dns.RcodeNameError {
			t.Errorf("a name that is not, over %s: %v", network, a)
		}
		if a := ask(t, network, at, "long.test.", dns.TypeTXT); a.Truncated != (network == "udp") || (network == "tcp") != (len(a.Answer) == 20) {
			t.Errorf("a long answer, over %s: truncated %t, %d records", network, a.Truncated, len(a.Answer))
		}
	}
	before := sick.queries.Load()
	ask(t, "udp", at, "example.com.", dns.TypeA)
	if sick.queries.Load() != before {
		t.Error("queried a failed server before the last one that responded")
	}
	at = start(t, &fakeSandboxes{}, nil, dead)
	if a := ask(t, "udp", at, "example.com.", dns.TypeA); a.Rcode != dns.RcodeServerFailure {
		t.Errorf("no server answers: %v", a)
	}
	at = start(t, &fakeSandboxes{}, nil, sick.addr)
	if a := ask(t, "udp", at, "example.com.", dns.TypeA); a.Rcode != dns.RcodeServerFailure {
		t.Errorf("the only server fails: %v", a)
	}
}

func TestOnlyAllowedNames(t *testing.T) {
	up := startUpstream(t, map[string][]string{
		"example.com. A":    {"example.com. 5 IN A 8.8.8.8", "other.com. 5 IN A 6.6.6.6", "example.com. 5 IN A 10.0.0.1"},
		"example.com. AAAA": {}, "evil.com. A": {"evil.com. 5 IN A 6.6.6.6"}, "example.com. HTTPS": {"example.com. 5 IN HTTPS 1 . ipv4hint=6.6.6.6"},
		"a.b.example.org. A": {"cdn.net. 7200 IN A 7.7.7.7", "mid.net. 5 IN CNAME cdn.net.", "a.b.example.org. 5 IN CNAME mid.net."},
		"old.example.org. A": {"old.example.org. 999999 IN A 7.7.7.8"}, "in.example.org. A": {"in.example.org. 5 IN A 192.168.1.1"},
	})
	c := &fakeSandboxes{policy: closed}
	at := start(t, c, nil, up.addr)
	for _, tt := range []struct {
		name  string
		kind  uint16
		rcode int
		want  []string
	}{
		{"example.com.", dns.TypeA, dns.RcodeSuccess, []string{"5 IN A 8.8.8.8"}},
		{"EXAMPLE.com.", dns.TypeA, dns.RcodeSuccess, []string{"5 IN A 8.8.8.8"}},
		{"example.com.", dns.TypeAAAA, dns.RcodeSuccess, nil},
		{"example.com.", dns.TypeHTTPS, dns.RcodeSuccess, nil},
		{"a.b.example.org.", dns.TypeA, dns.RcodeSuccess, []string{"7200 IN A 7.7.7.7", "5 IN CNAME cdn.net.", "5 IN CNAME mid.net."}},
		{"old.example.org.", dns.TypeA, dns.RcodeSuccess, []string{"86400 IN A 7.7.7.8"}},
		{"in.example.org.", dns.TypeA, dns.RcodeNameError, nil},
		{"example.org.", dns.TypeA, dns.RcodeNameError, nil},
		{"evil.com.", dns.TypeA, dns.RcodeNameError, nil},
		{"example.com.evil.com.", dns.TypeA, dns.RcodeNameError, nil},
		{"notexample.com.", dns.TypeA, dns.RcodeNameError, nil},
		{"example.com.", dns.TypeANY, dns.RcodeNotImplemented, nil},
	} {
		a := ask(t, "udp", at, tt.name, tt.kind)
		if got := texts(a); a.Rcode != tt.rcode || !slices.Equal(got, tt.want) {
			t.Errorf("%s %s = %s %q, want %s %q", tt.name, dns.TypeToString[tt.kind], dns.RcodeToString[a.Rcode], got, dns.RcodeToString[tt.rcode], tt.want)
		}
	}
	want := map[string]time.Duration{
		"example.com. 8.8.8.8": minPin, "a.b.example.org. 7.7.7.7": 2 * time.Hour, "old.example.org. 7.7.7.8": maxPin,
	}
	c.mu.Lock()
	if fmt.Sprint(c.pins) != fmt.Sprint(want) {
		t.Errorf("pinned %v, want %v", c.pins, want)
	}
	c.mu.Unlock()
	a := ask(t, "udp", at, "evil.com.", dns.TypeA)
	if opt := a.IsEdns0(); opt == nil || len(opt.Option) != 1 || !strings.Contains(opt.Option[0].String(), "may look up") {
		t.Errorf("refusal without a reason: %v", a)
	}

	// The policy changes during the question.
	c.mu.Lock()
	c.before = func(c *fakeSandboxes) { c.policy = egress.Policy{Closed: "internet: false"} }
	c.mu.Unlock()
	if a := ask(t, "udp", at, "example.com.", dns.TypeA); a.Rcode != dns.RcodeNameError || len(a.Answer) > 0 {
		t.Errorf("a name removed meanwhile: %v", a)
	}
}

func TestBounds(t *testing.T) {
	up := startUpstream(t, map[string][]string{"example.com. A": {"example.com. 60 IN A 192.0.2.7"}})
	metrics := prometheus.NewRegistry()
	at := start(t, &fakeSandboxes{}, func(c *Config) { c.Metrics = metrics }, up.addr)
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	eventually.True(t, "one client exceeds its connections", func() bool { // idle ones are closed too
		for range maxPerClient {
			c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			open = append(open, c)
		}
		return count(t, metrics, dropped) > 0
	})
	for _, c := range open {
		_ = c.Close()
	}
	open = nil
	for { // closed connections are uncounted
		c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		a, _, err := (&dns.Client{Net: "tcp", Timeout: time.Second}).ExchangeWithConnContext(t.Context(), new(dns.Msg).SetQuestion("example.com.", dns.TypeA), &dns.Conn{Conn: c})
		_ = c.Close()
		if err == nil && len(a.Answer) == 1 {
			break
		}
	}
	foreign := start(t, &fakeSandboxes{}, func(c *Config) { c.Clients = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} }, up.addr)
	if _, _, err := (&dns.Client{Timeout: 200 * time.Millisecond}).ExchangeContext(t.Context(), new(dns.Msg).SetQuestion("example.com.", dns.TypeA), foreign); err == nil {
		t.Error("a foreign client is answered")
	}
}

// count returns the number of questions and connections with a result.
func count(t *testing.T, metrics *prometheus.Registry, result string) (n float64) {
	t.Helper()
	families, err := metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if labels := m.GetLabel(); len(labels) == 1 && labels[0].GetValue() == result {
				n += m.GetCounter().GetValue()
			}
		}
	}
	return n
}

// TestAdmission: a client is admitted up to its limit, independent of others, and again after a
// release.
func TestAdmission(t *testing.T) {
	r, err := New(Config{Upstreams: []netip.AddrPort{freeAddr()}, Sandboxes: &fakeSandboxes{}, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	one, other := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	for i := range maxPerClient {
		if !r.admit(one) {
			t.Fatalf("only %d places", i)
		}
	}
	if r.admit(one) || !r.admit(other) {
		t.Error("admitted above the limit, or refused another client")
	}
	r.done(one)
	if !r.admit(one) {
		t.Error("refused after a release")
	}
}

// TestAdmissionBesideMany: a hundred sandboxes that take all that they can leave a place for another one.
func TestAdmissionBesideMany(t *testing.T) {
	r, err := New(Config{Upstreams: []netip.AddrPort{freeAddr()}, Sandboxes: &fakeSandboxes{}, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	client := netip.MustParseAddr("10.0.0.1")
	for range 100 {
		for r.admit(client) {
		}
		client = client.Next()
	}
	if !r.admit(client) {
		t.Error("100 sandboxes took all places")
	}
}

func TestLookup(t *testing.T) {
	up := startUpstream(t, map[string][]string{
		"www.test. A": {"www.test. 60 IN CNAME x.test.", "x.test. 60 IN A 192.0.2.7", "y.test. 60 IN A 192.0.2.8"}, "www.test. AAAA": {"www.test. 60 IN AAAA 2001:db8::1"},
	})
	r, err := New(Config{
		Upstreams: []netip.AddrPort{up.addr}, Sandboxes: &fakeSandboxes{}, Log: telemetry.Discard(), questionTime: eventually.Patience, upstreamTime: eventually.Patience,
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := r.Lookup(t.Context(), "www.test"); err != nil || fmt.Sprint(got) != "[192.0.2.7 2001:db8::1]" {
		t.Errorf("Lookup = %v, %v", got, err)
	}
	if _, err := r.Lookup(t.Context(), "none.test"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("Lookup of nothing: %v", err)
	}
	if _, err := New(Config{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("New of nothing: %v", err)
	}
}

// The resolver listens on a port when another server has released it, without a failure meanwhile.
func TestRunRetriesListen(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	r, err := New(Config{
		Listen: []netip.AddrPort{netip.MustParseAddrPort(l.Addr().String())}, Upstreams: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")},
		Sandboxes: &fakeSandboxes{}, Log: telemetry.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Run(ctx); err != nil {
		t.Error(err)
	}
}
