package agent_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// listen answers each line with itself, and the end of a connection with "bye".
func listen(t *testing.T, network, address string) (l net.Listener, port uint16) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), network, address)
	noError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				_, _ = io.Copy(c, c)
				_, _ = io.WriteString(c, "bye")
			}()
		}
	}()
	return l, netip.MustParseAddrPort(l.Addr().String()).Port()
}

// connect opens a port of the agent's loopback.
func (a *testAgent) connect(ctx context.Context, token string, port uint16) (net.Conn, error) {
	a.t.Helper()
	return envd.ConnectLocal(ctx, a.dial(), token, port)
}

// TestConnect reaches what listens on the agent's loopback, with every byte and both ends kept.
func TestConnect(t *testing.T) {
	a := start(t, envd.Config{AccessToken: "secret"})
	for network, address := range map[string]string{"tcp4": "127.0.0.1:0", "tcp6": "[::1]:0"} {
		_, port := listen(t, network, address)
		nc, err := a.connect(t.Context(), "secret", port)
		noError(t, err)
		defer func() { _ = nc.Close() }()
		_, err = io.WriteString(nc, "hello\n")
		noError(t, err)
		br := bufio.NewReader(nc)
		if line, err := br.ReadString('\n'); err != nil || line != "hello\n" {
			t.Errorf("%s: got %q, %v", network, line, err)
		}
		noError(t, nc.(interface{ CloseWrite() error }).CloseWrite())
		if rest, err := io.ReadAll(br); err != nil || string(rest) != "bye" {
			t.Errorf("%s: after the end: %q, %v", network, rest, err)
		}
	}

	l, port := listen(t, "tcp4", "127.0.0.1:0")
	_, err := a.connect(t.Context(), "guessed", port)
	if refused, ok := errors.AsType[*envd.Error](err); !ok || refused.Status != http.StatusUnauthorized {
		t.Errorf("without the token: %v", err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := a.connect(gone, "secret", port); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
	open, err := a.connect(t.Context(), "secret", port)
	noError(t, err)
	noError(t, l.Close())
	if _, err := a.connect(t.Context(), "secret", port); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a port without a listener: %v", err)
	}
	for query, want := range map[string]int{"": http.StatusBadRequest, "?port=0": http.StatusBadRequest, "?port=65536": http.StatusBadRequest, "?port=80": http.StatusUpgradeRequired} {
		if status, _, body := a.do(http.MethodGet, envd.PathConnect+query, "", envd.HeaderAccessToken, "secret"); status != want {
			t.Errorf("%q: %d %s, want %d", query, status, body, want)
		}
	}
	a.stop() // it must not wait for what it carries
	if b, err := io.ReadAll(open); len(b) > 0 {
		t.Errorf("a connection through an agent that has ended: %q, %v", b, err)
	}
}

// TestPorts finds the owner of each listener.
func TestPorts(t *testing.T) {
	a := start(t, envd.Config{})
	_, four := listen(t, "tcp4", "127.0.0.1:0")
	_, all := listen(t, "tcp", ":0")
	_, six := listen(t, "tcp6", "[::1]:0")
	own := netip.MustParseAddrPort(strings.TrimPrefix(a.base, "http://"))
	list, err := a.client("").Ports(t.Context())
	noError(t, err)
	want := map[netip.AddrPort]bool{} // another program may listen on the port at another address
	for address, port := range map[string]uint16{"127.0.0.1": four, "::": all, "::1": six} {
		want[netip.AddrPortFrom(netip.MustParseAddr(address), port)] = true
	}
	comm, err := os.ReadFile("/proc/self/comm")
	noError(t, err)
	for _, p := range list {
		address, err := netip.ParseAddr(p.Address)
		if p.Port == 0 || err != nil {
			t.Errorf("what is %+v? %v", p, err)
		}
		at := netip.AddrPortFrom(address, p.Port)
		if at == own {
			t.Errorf("the agent lists itself: %+v", p)
		}
		if !want[at] {
			continue // another program's
		}
		delete(want, at)
		if p.PID != os.Getpid() || p.Process != strings.TrimSpace(string(comm)) {
			t.Errorf("got %+v, want it of process %d", p, os.Getpid())
		}
	}
	if len(want) > 0 {
		t.Errorf("not listed: %v", want)
	}
}
