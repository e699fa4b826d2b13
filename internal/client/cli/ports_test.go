package cli

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// TestPorts lists the listeners of the real agent: here, of this test.
func TestPorts(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	s.add(id2, "paused", nil)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	port := netip.MustParseAddrPort(l.Addr().String()).Port()

	got := s.run("", "ports", "iaaa")
	lines := strings.Split(got.stdout, "\n")
	mine := ""
	for _, line := range lines {
		if strings.HasPrefix(line, fmt.Sprint(port, " ")) {
			mine = line
		}
	}
	if f := strings.Fields(mine); len(f) < 4 || f[1] != "127.0.0.1" || f[2] != fmt.Sprint(os.Getpid()) || strings.Join(strings.Fields(lines[0]), " ") != "PORT ADDRESS PID PROCESS" {
		t.Errorf("got %d, %q, %s", got.code, mine, got.stderr)
	}
	got = s.run("", "ports", "iaaa", "--json")
	var list []envd.ListeningPort
	if err := json.Unmarshal([]byte(got.stdout), &list); err != nil {
		t.Fatalf("%v: %s", err, got.stdout)
	}
	found := false
	for _, p := range list {
		found = found || p.Port == port && p.PID == os.Getpid()
	}
	if !found {
		t.Errorf("port %d is not among %+v", port, list)
	}
	s.run("", "ports", id2).want(t, 1, "", "is paused")
	s.run("", "ports").want(t, 2, "", "SANDBOX is missing")
}
