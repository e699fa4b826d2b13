package webhooks

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Time limits of a delivery.
const (
	dialTime    = 5 * time.Second
	deliverTime = 10 * time.Second
)

// reachable reports whether a webhook may have an address: a public one, or one that the operator allows.
func reachable(ip netip.Addr, allowed []netip.Prefix) bool {
	ip = ip.Unmap().WithZone("")
	for _, p := range allowed {
		if p.Contains(ip) {
			return true
		}
	}
	for _, r := range sandbox.NotPublic() {
		if r.Prefix.Contains(ip) {
			return false
		}
	}
	return true
}

// newClient returns a client that checks the address of each connection after the name is resolved, so that no answer of a DNS
// server gets around the check. It follows no redirect and uses no proxy. own returns the machine's addresses, which are not
// public to a tenant.
func newClient(allowed []netip.Prefix, own func() ([]net.Addr, error)) *http.Client {
	dialer := &net.Dialer{Timeout: dialTime, ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("address of a webhook: %w", err)
		}
		if !reachable(to.Addr(), allowed) || isOwn(to.Addr(), allowed, own) {
			return errs.Public(errs.ErrForbidden, fmt.Sprintf("the address %s is not public; an operator allows others with webhookAllow", to.Addr()))
		}
		return nil
	}}
	return &http.Client{
		Timeout:       deliverTime,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext: dialer.DialContext, TLSHandshakeTimeout: dialTime, ResponseHeaderTimeout: deliverTime, MaxIdleConnsPerHost: 1, MaxIdleConns: 32,
			IdleConnTimeout: 30 * time.Second, MaxResponseHeaderBytes: 16 << 10, ForceAttemptHTTP2: true,
		},
	}
}

// isOwn reports whether an address is the machine's, and not allowed. If the machine's are not known, each is.
func isOwn(ip netip.Addr, allowed []netip.Prefix, own func() ([]net.Addr, error)) bool {
	ip = ip.Unmap().WithZone("")
	for _, p := range allowed {
		if p.Contains(ip) {
			return false
		}
	}
	list, err := own()
	if err != nil {
		return true
	}
	for _, a := range list {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Unmap() == ip {
			return true
		}
	}
	return false
}
