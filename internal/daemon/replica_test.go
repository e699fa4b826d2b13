package daemon

import (
	"net/netip"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/edge/peers"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// TestHeard: a server takes no hint that leads out of its sandboxes' subnets; a replica is not told
// them, and takes it.
func TestHeard(t *testing.T) {
	cfg := config.Default()
	cfg.Subnet, cfg.Subnet6 = netip.MustParsePrefix("10.87.0.0/16"), netip.MustParsePrefix("fd00:87::/64")
	for _, tt := range []struct {
		role, addr string
		want       bool
	}{
		{config.RoleServer, "10.87.3.4", true},
		{config.RoleServer, "fd00:87::5", true},
		{config.RoleServer, "10.88.0.1", false},
		{config.RoleServer, "169.254.169.254", false},
		{config.RoleServer, "", true},
		{config.RoleReplica, "10.88.0.1", true},
	} {
		d := &Daemon{cfg: Config{Config: cfg}, routes: route.NewTable()}
		d.cfg.Role = tt.role
		r := route.Route{ID: sandbox.IDOf("u"), UID: "u", Namespace: "default", Name: "a", ResourceVersion: "5", State: sandbox.Running}
		if tt.addr != "" {
			r.Address = netip.MustParseAddr(tt.addr)
		}
		d.applyHints("other", []peers.Route{{Route: r}})
		if _, got := d.routes.Lookup(r.ID); got != tt.want {
			t.Errorf("%s, %q: taken %v, want %v", tt.role, tt.addr, got, tt.want)
		}
		d.applyHints("other", []peers.Route{{Route: r, Deleted: true}})
	}
	if d := (&Daemon{}); !d.ours(netip.Addr{}) {
		t.Error("a hint without an address is refused")
	}
}
