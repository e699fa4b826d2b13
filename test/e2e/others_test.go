package e2e

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed" //nolint:depguard // the etcd that exists already is the test's
	"go.uber.org/zap"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// startEtcd is an etcd that exists already; it returns its endpoint.
func startEtcd(t *testing.T) string {
	t.Helper()
	cfg := embed.NewConfig()
	cfg.Dir, cfg.ZapLoggerBuilder = t.TempDir(), embed.NewZapLoggerBuilder(zap.NewNop())
	endpoint, err := url.Parse("http://" + program.Address(t))
	if err != nil {
		t.Fatal(err)
	}
	peers, err := url.Parse("http://" + program.Address(t))
	if err != nil {
		t.Fatal(err)
	}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*endpoint}, []url.URL{*endpoint}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{*peers}, []url.URL{*peers}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatalf("start etcd: %v", err)
	}
	t.Cleanup(e.Close)
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(eventually.Patience):
		t.Fatal("etcd is not ready")
	}
	return endpoint.String()
}

// startContainerd is a containerd that exists already; it returns its socket. What is in
// namespace at the end is an error.
func startContainerd(t *testing.T, namespace string) string {
	t.Helper()
	program := ""
	for _, dir := range []string{os.Getenv("BARCHAN_CACHE"), "/var/cache/barchan"} {
		if path := filepath.Join(dir, "bin", "containerd"); dir != "" && program == "" {
			if _, err := os.Stat(path); err == nil {
				program = path
			}
		}
	}
	if program == "" {
		t.Fatal("containerd is not built; run `make runtimes`")
	}
	dir, err := os.MkdirTemp("/tmp", "bc-") //nolint:usetesting // short, for a socket lies in it
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "c.sock")
	config := fmt.Sprintf("version = 3\nroot = %q\nstate = %q\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\", \"io.containerd.cri.v1.images\", \"io.containerd.cri.v1.runtime\"]\n[grpc]\naddress = %q\n[ttrpc]\naddress = %q\n[debug]\nlevel = \"warn\"\n",
		filepath.Join(dir, "root"), filepath.Join(dir, "state"), socket, socket+".ttrpc")
	if err := os.WriteFile(filepath.Join(dir, "config.toml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	cmd := exec.Command(program, "--config", filepath.Join(dir, "config.toml"))
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("containerd's log:\n%s", log.String())
		}
		left, err := os.ReadDir(filepath.Join(dir, "root", "io.containerd.snapshotter.v1.overlayfs", "snapshots"))
		if err == nil && len(left) > 0 {
			t.Errorf("down --all left %d snapshots in the containerd that was there before (namespace %s)", len(left), namespace)
		}
		_ = os.RemoveAll(dir)
	})
	eventually.NoError(t, "containerd listens", func() error {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", socket)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	return socket
}

// TestTwoServers runs one on an etcd that exists, and one on a containerd that exists, side by
// side. Neither sees anything of the other, nor do their sandboxes.
func TestTwoServers(t *testing.T) {
	t.Parallel()
	skipInFast(t)
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: a whole server needs root")
	}
	endpoint := startEtcd(t)
	onEtcd, onContainerd := newServer(t), (*server)(nil)
	onEtcd.set("BARCHAN_ETCD_ENDPOINTS", endpoint)
	w := newOutside(t)
	onEtcd.set("BARCHAN_DNS_RESOLVERS", w.private)
	t.Run("start", func(t *testing.T) { onEtcd.in(t).start() })
	// Made second, and so removed first, while its containerd still runs.
	socket := startContainerd(t, "e2e")
	onContainerd = newServer(t)
	onContainerd.set("BARCHAN_CONTAINERD_ADDRESS", socket)
	onContainerd.start()
	for _, s := range []*server{onEtcd, onContainerd} {
		s.must("image", "build", "base")
	}
	a, _ := onEtcd.keep("base", "sh", "-c", "echo one > mark; nohup python3 -m http.server 8080 >/dev/null 2>&1 &")
	b, _ := onContainerd.keep("base", "sh", "-c", "echo two > mark; nohup python3 -m http.server 8080 >/dev/null 2>&1 &")
	for s, id := range map[*server]string{onEtcd: a, onContainerd: b} {
		if got := s.sandboxes(); len(got) != 1 || got[0] != id {
			t.Errorf("a server lists %v, has %s", got, id)
		}
		s.untilServed(id, "/mark")
	}
	if _, err := onEtcd.try("exec", b, "--", "true"); err == nil {
		t.Error("one server ran a command in a sandbox of the other")
	}
	t.Run("isolation", func(t *testing.T) { testIsolation(t, onEtcd.in(t), onContainerd.in(t), a, b, w) })
	t.Run("restart", func(t *testing.T) {
		for s, id := range map[*server]string{onEtcd: a, onContainerd: b} {
			s := s.in(t)
			s.stop(syscall.SIGKILL)
			s.start()
			if got := s.untilServed(id, "/mark"); got != "one\n" && got != "two\n" {
				t.Errorf("after a restart the sandbox returned %q", got)
			}
			if _, out := s.keep("base", "echo", "new"); out != "new\n" {
				t.Errorf("a new sandbox after the restart returned %q", out)
			}
		}
	})
	t.Run("one ends, the other stays", func(t *testing.T) {
		s := onContainerd.in(t)
		s.stop(syscall.SIGTERM)
		if got := onEtcd.in(t).exec(a, "cat mark"); got != "one" {
			t.Errorf("while the other is down: %q", got)
		}
		s.start()
	})
}

// outside is a network namespace that stands for the network beyond the machine, with a public
// and a private address.
type outside struct{ name, public, private string }

func newOutside(t *testing.T) *outside {
	t.Helper()
	n := os.Getpid() % 60
	w := &outside{name: fmt.Sprintf("bx%d", n), public: fmt.Sprintf("192.52.193.%d", 4*n+2), private: fmt.Sprintf("10.250.%d.2", n)}
	program := filepath.Join(t.TempDir(), "hello")
	if err := os.WriteFile(program, helloProgram(t), 0o755); err != nil { //nolint:gosec // it is run
		t.Fatal(err)
	}
	run := func(line string) error {
		out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip %s: %w %s", line, err, out)
		}
		return nil
	}
	t.Cleanup(func() {
		_ = run("link del " + w.name + "h") // with the namespace it may be gone already
		if err := run("netns del " + w.name); err != nil {
			t.Error(err)
		}
	})
	for _, line := range []string{
		"netns add " + w.name,
		"link add " + w.name + "h type veth peer name eth0 netns " + w.name,
		fmt.Sprintf("addr add 192.52.193.%d/30 dev %sh", 4*n+1, w.name),
		fmt.Sprintf("addr add 10.250.%d.1/30 dev %sh", n, w.name),
		"link set " + w.name + "h up",
		"-n " + w.name + " addr add " + w.public + "/30 dev eth0",
		"-n " + w.name + " addr add " + w.private + "/30 dev eth0",
		"-n " + w.name + " link set lo up",
		"-n " + w.name + " link set eth0 up",
		fmt.Sprintf("-n %s route add default via 192.52.193.%d", w.name, 4*n+1),
	} {
		if err := run(line); err != nil {
			t.Fatal(err)
		}
	}
	// Answers come back by this link; the server opens the way by the default route only.
	if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+w.name+"h/forwarding", []byte("1"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, port := range []string{"8080", "53"} {
		cmd := exec.Command("ip", "netns", "exec", w.name, program, "serve", ":"+port)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		for _, addr := range []string{w.public, w.private} {
			eventually.NoError(t, addr+":"+port+" answers the host", func() error {
				conn, err := net.DialTimeout("tcp", net.JoinHostPort(addr, port), time.Second)
				if err != nil {
					return err
				}
				return conn.Close()
			})
		}
	}
	return w
}

// dialProgram prints for each address whether it responds. Each is followed by how many seconds
// that may take.
const dialProgram = `
import concurrent.futures, socket, sys
def dial(a, patience):
    host, port = a.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), int(patience)).close()
        return a + " yes"
    except OSError as e:
        return a + " no"
with concurrent.futures.ThreadPoolExecutor(20) as pool:
    for line in pool.map(dial, sys.argv[1::2], sys.argv[2::2]):
        print(line)
`

// testIsolation verifies that sandboxes reach only public addresses and their resolver.
func testIsolation(t *testing.T, s, other *server, a, b string, w *outside) {
	neighbour, _ := s.keep("base", "sh", "-c", "nohup python3 -m http.server 8080 >/dev/null 2>&1 &")
	s.untilServed(neighbour, "/")
	addressOf := func(s *server, id string) string {
		return s.exec(id, "hostname -I | cut -d' ' -f1")
	}
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	gateway := addressOf(s, a)
	gateway = gateway[:strings.LastIndex(gateway, ".")] + ".1"
	want := map[string]string{
		w.public + ":8080":                         "yes",
		w.private + ":8080":                        "no", // private
		w.private + ":53":                          "no", // its resolver, which knows internal names
		w.public + ":53":                           "no", // a resolver that is not its own
		addressOf(s, neighbour) + ":8080":          "no", // another sandbox
		addressOf(other, b) + ":8080":              "no", // another server's sandbox
		addressOf(s, neighbour) + ":49983":         "no", // another sandbox's agent
		gateway + ":" + port:                       "no", // the host, by its address on the bridge
		strings.Split(s.http, ":")[0] + ":" + port: "no", // loopback is the sandbox's own
	}
	if ip := hostAddress(); ip != "" {
		want[ip+":"+port] = "no" // the host, by its own address
	}
	args := []string{"exec", a, "--", "python3", "-c", dialProgram}
	for addr, answer := range want {
		args = append(args, addr, map[string]string{"yes": "60", "no": "1"}[answer]) // no answer is no connection in any time
	}
	out := s.data(args...)
	for addr, answer := range want {
		if !strings.Contains(out, addr+" "+answer+"\n") {
			t.Errorf("from a sandbox, %s should answer: %s\n%s", addr, answer, out)
		}
	}
	// All of them respond to permitted clients.
	for _, addr := range []string{addressOf(s, neighbour) + ":8080", addressOf(other, b) + ":8080", w.private + ":8080", gateway + ":" + port} {
		conn, err := net.DialTimeout("tcp", addr, eventually.Patience)
		if err != nil {
			t.Errorf("from the host: %v", err)
			continue
		}
		_ = conn.Close()
	}
	if from := s.exec(a, "curl -s -m 60 http://"+w.public+":8080/ | head -c 5"); from != "proto" {
		t.Errorf("a whole answer from outside: %q", from)
	}
	if out := s.exec(a, "cat /etc/resolv.conf"); out != "nameserver "+gateway {
		t.Errorf("resolv.conf: %q", out)
	}
	// A sandbox that gives itself another's address gets nowhere with it.
	s.exec(a, "sudo -n true && command -v ip >/dev/null && sudo ip addr add "+addressOf(s, neighbour)+"/32 dev eth0 || true")
	if got := s.untilServed(neighbour, "/"); !strings.Contains(got, "Directory listing") {
		t.Errorf("the neighbour returned %q", got)
	}
}

// hostAddress is an address of this machine that is not loopback and of no bridge of ours.
func hostAddress() string {
	conn, err := (&net.Dialer{}).DialContext(context.Background(), "udp", "192.88.99.255:9") // sends nothing
	if err != nil {
		return ""
	}
	defer func() { _ = conn.Close() }()
	host, _, _ := net.SplitHostPort(conn.LocalAddr().String())
	return host
}
