package replicated

import (
	"fmt"
	"net/netip"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// running is the object of a running sandbox.
func running(name string) *agents.Sandbox {
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name), ResourceVersion: "7"}}
	s.Status.PodIPs = []string{"10.0.0.2"}
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	return s
}

// TestApplyHints checks which hints change a lookup. A server refuses addresses outside of its sandboxes' subnets; a replica
// does not have the subnets.
func TestApplyHints(t *testing.T) {
	for _, tt := range []struct {
		role, subnet6, addr string
		want                bool
	}{
		{config.RoleServer, "fd00:87::/64", "10.87.3.4", true},
		{config.RoleServer, "fd00:87::/64", "fd00:87::5", true},
		{config.RoleServer, "fd00:87::/64", "fd00:88::5", false},
		{config.RoleServer, "", "10.87.3.4", true},
		{config.RoleServer, "", "fd00:87::5", false},
		{config.RoleServer, "fd00:87::/64", "10.88.0.1", false},
		{config.RoleServer, "fd00:87::/64", "169.254.169.254", false},
		{config.RoleServer, "fd00:87::/64", "", true},
		{config.RoleReplica, "", "10.88.0.1", true},
		{config.RoleReplica, "fd00:87::/64", "10.88.0.1", true},
		{config.RoleReplica, "", "", true},
	} {
		table := route.NewTable()
		cfg := Config{Config: &config.Config{Role: tt.role, Subnet: netip.MustParsePrefix("10.87.0.0/16")}, Table: table}
		if tt.subnet6 != "" {
			cfg.Subnet6 = netip.MustParsePrefix(tt.subnet6)
		}
		r := route.Route{ID: sandbox.IDOf("u"), UID: "u", Namespace: "default", Name: "a", ResourceVersion: "5", State: sandbox.Running}
		if tt.addr != "" {
			r.Address = netip.MustParseAddr(tt.addr)
		}
		other := r
		other.ID, other.UID, other.Name, other.Address = sandbox.IDOf("v"), "v", "b", netip.MustParseAddr("10.87.0.9")
		found := func(r route.Route) bool {
			_, ok := table.Lookup(r.ID)
			return ok
		}
		cfg.hints().Apply("other", []push.Route{{Route: r}, {Route: other}})
		if got := found(r); got != tt.want {
			t.Errorf("%+v: found after a hint %v", tt, got)
		}
		if !found(other) {
			t.Errorf("%+v: the rest of the batch is lost", tt)
		}
		older := other
		older.ResourceVersion = "4"
		if !table.Upsert(older) {
			t.Errorf("%+v: a hint replaces the base record, which only the watch writes", tt)
		}
		table.Upsert(r) // the watch confirms it
		cfg.hints().Apply("other", []push.Route{{Route: r, Deleted: true}})
		if !found(r) {
			t.Errorf("%+v: a deletion that is not newer than the watch hides the route", tt)
		}
		r.ResourceVersion = "6"
		cfg.hints().Apply("other", []push.Route{{Route: r, Deleted: true}})
		if got := found(r); got == tt.want {
			t.Errorf("%+v: found after the hint of a deletion %v", tt, got)
		}
	}
}

// pushes records what a pusher sends, deletions with a minus.
type pushes []string

func (p *pushes) Push(r route.Route)       { *p = append(*p, r.Name) }
func (p *pushes) PushDelete(r route.Route) { *p = append(*p, "-"+r.Name) }

// TestReplicatedRoutes checks that a write is pushed as what it is, whether or not the watch was first.
func TestReplicatedRoutes(t *testing.T) {
	sent := &pushes{}
	routes := Routes{Table: route.NewTable(), Peers: sent}
	s, dead := running("s"), running("dead")
	for _, step := range []struct {
		do   func() bool
		want string
	}{
		{func() bool { return routes.Apply(s) }, "[s]"},
		{func() bool { return !routes.Apply(s) }, "[s s]"},
		{func() bool { return routes.ApplyDelete(s) }, "[s s -s]"},
		{func() bool { return !routes.ApplyDelete(s) }, "[s s -s -s]"},
		{func() bool { *sent = nil; return routes.Apply(dead) }, "[dead]"},
		{func() bool {
			dead.ResourceVersion = "9"
			dead.DeletionTimestamp = new(metav1.Now())
			return routes.Apply(dead)
		}, "[dead -dead]"},
	} {
		if ok := step.do(); !ok || fmt.Sprint(*sent) != step.want {
			t.Errorf("pushed %v, as expected %v; want %s", *sent, ok, step.want)
		}
	}
}
