package ports

import (
	"cmp"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// inside marks this test's program in a sandbox.
const inside = "BARCHAN_TEST_IN_SANDBOX"

func TestMain(m *testing.M) { eventually.LeaveNoGoroutines(m) }

func TestParseSocket(t *testing.T) {
	const tail = " 00:00000000 00000000  1000        0 4711 1 0000000000000000 100 0 0 10 0"
	for name, c := range map[string]struct{ line, want string }{
		"IPv4":        {"   0: 0100007F:1FBB 00000000:0000 0A 00000000:00000000" + tail, "127.0.0.1:8123"},
		"all":         {"   1: 00000000:0050 00000000:0000 0A 00000000:00000000" + tail, "0.0.0.0:80"},
		"IPv6":        {"   2: 00000000000000000000000001000000:1FBC 00000000000000000000000000000000:0000 0A 0:0" + tail, "[::1]:8124"},
		"established": {"   3: 0100007F:1FBB 0100007F:8000 01 00000000:00000000" + tail, ""},
		"head":        {"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode", ""},
		"short":       {"   0: 0100007F:1FBB 00000000:0000 0A", ""},
		"no port":     {"   0: 0100007F 00000000:0000 0A 00000000:00000000" + tail, ""},
		"odd address": {"   0: 01007F:1FBB 00000000:0000 0A 00000000:00000000" + tail, ""},
		"no address":  {"   0: :1FBB 00000000:0000 0A 00000000:00000000" + tail, ""},
		"large port":  {"   0: 0100007F:11FBB 00000000:0000 0A 00000000:00000000" + tail, ""},
	} {
		s, ok := parseSocket(c.line)
		if ok != (c.want != "") || ok && (s.at.String() != c.want || s.inode != "4711") {
			t.Errorf("%s: got %v %+v, want %q", name, ok, s, c.want)
		}
	}
}

func FuzzParseSocket(f *testing.F) {
	f.Add("   0: 0100007F:1FBB 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 0 4711 1 0")
	f.Fuzz(func(t *testing.T, line string) {
		if s, ok := parseSocket(line); ok && !s.at.IsValid() {
			t.Errorf("%q is %+v", line, s)
		}
	})
}

func TestListWithoutProc(t *testing.T) {
	list, err := List(t.TempDir(), 0, nil)
	if err != nil || len(list) > 0 {
		t.Errorf("got %v, %v", list, err)
	}
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "net", "tcp"), 0o700); err != nil {
		t.Fatal(err)
	}
	if list, err := List(dir, 0, nil); err == nil {
		t.Errorf("a directory is read as %v", list)
	}
}

// TestInGVisor runs this test's program in gVisor, whose network and proc are not the kernel's.
func TestInGVisor(t *testing.T) {
	if os.Getenv(inside) == "" {
		runInGVisor(t)
		return
	}
	one, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = one.Close() }()
	six, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp6", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = six.Close() }()
	list, err := List("/proc", 1<<30, nil)
	if err != nil || len(list) != 2 {
		t.Fatalf("got %+v, %v", list, err)
	}
	for _, p := range list {
		if p.PID != os.Getpid() || p.Process == "" {
			t.Errorf("whose is %+v? Ours is %d", p, os.Getpid())
		}
		at := netip.AddrPortFrom(netip.MustParseAddr(p.Address), p.Port).String()
		if at != one.Addr().String() && at != six.Addr().String() {
			t.Errorf("listed %s, want %s and %s", at, one.Addr(), six.Addr())
		}
		nc, err := Dial(t.Context(), p.Port)
		if err != nil {
			t.Errorf("dial %s: %v", at, err)
			continue
		}
		_ = nc.Close()
	}
	if list, err := List("/proc", os.Getpid(), nil); err != nil || len(list) > 0 {
		t.Errorf("without our own: %+v, %v", list, err)
	}
}

func runInGVisor(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for gVisor")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), runsc(t), "--root", t.TempDir(), "--network=none", "--ignore-cgroups", "do", self, "-test.run=^TestInGVisor$", "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestInGVisor") {
		t.Errorf("in gVisor: %v:\n%s", err, out)
	}
}

// runsc finds gVisor, or skips loudly; under CI a missing one is a failure.
func runsc(t *testing.T) string {
	t.Helper()
	path := filepath.Join(cmp.Or(os.Getenv("BARCHAN_CACHE"), "/var/cache/barchan"), "bin", "runsc")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	path, err := exec.LookPath("runsc")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skipf("SKIPPED: %v", err)
	}
	return path
}

func TestLongNames(t *testing.T) {
	for name, want := range map[string]string{"": "", "sh": "sh", strings.Repeat("x", 1<<20): strings.Repeat("x", maxName), strings.Repeat("ü", 10): strings.Repeat("ü", 7)} {
		if got := short(name); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
