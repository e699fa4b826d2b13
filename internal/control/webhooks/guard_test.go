package webhooks

import (
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestReachable(t *testing.T) {
	allowed := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
	for text, want := range map[string]bool{
		"8.8.8.8": true, "2606:4700::1": true, "10.1.2.3": true, "::ffff:10.1.2.3": true,
		"10.2.0.1": false, "127.0.0.1": false, "::1": false, "::ffff:127.0.0.1": false, "169.254.169.254": false, "fe80::1": false, "fd00::1": false,
		"192.168.0.1": false, "172.16.0.1": false, "100.64.0.1": false, "0.0.0.0": false, "0.1.2.3": false, "::": false, "224.0.0.1": false, "ff02::1": false,
		"255.255.255.255": false, "168.63.129.16": false, "64:ff9b::a83f:8110": false, "3fff::1": false, "64:ff9b::7f00:1": false, "2002:7f00:1::": false, "198.18.0.1": false,
	} {
		if got := reachable(netip.MustParseAddr(text), allowed); got != want {
			t.Errorf("%s: %t, want %t", text, got, want)
		}
	}
}

// TestClientRefusesAddresses resolves localhost: a name is no way around the check of addresses.
func TestClientRefusesAddresses(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	defer server.Close()
	get := func(c *http.Client, url string) error {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		res, err := c.Do(req)
		if err == nil {
			err = res.Body.Close()
		}
		c.CloseIdleConnections()
		return err
	}
	named := strings.Replace(server.URL, "127.0.0.1", "localhost", 1)
	if err := get(newClient(nil, net.InterfaceAddrs), named); !errors.Is(err, errs.ErrForbidden) {
		t.Errorf("a name of the loopback: %v", err)
	}
	loopback := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
	if err := get(newClient(loopback, net.InterfaceAddrs), named); err != nil {
		t.Errorf("where it is allowed: %v", err)
	}
	own := func() ([]net.Addr, error) {
		return []net.Addr{&net.IPNet{IP: net.IPv4(192, 0, 2, 7), Mask: net.CIDRMask(24, 32)}}, nil
	}
	if !isOwn(netip.MustParseAddr("192.0.2.7"), nil, own) || isOwn(netip.MustParseAddr("192.0.2.8"), nil, own) || isOwn(netip.MustParseAddr("192.0.2.7"), []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, own) {
		t.Error("the machine's own addresses are mistaken")
	}
}
