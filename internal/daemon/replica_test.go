package daemon

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/replicated"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestConnectFindsACluster has a replica verify agents where its API server is a cluster's, and a controller always. A server
// that does not answer yet is waited for.
func TestConnectFindsACluster(t *testing.T) {
	for _, tt := range []struct {
		role, version string
		want          bool
	}{
		{config.RoleReplica, "v1.36.0", true},
		{config.RoleReplica, "v1.34.1-gke.3899001", true},
		{config.RoleReplica, "v1.36.0+barchan", false},
		{config.RoleController, "", true},
	} {
		var asked atomic.Int64
		api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if asked.Add(1) == 1 || r.URL.Path != "/version" {
				http.Error(w, "not yet", http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintf(w, `{"gitVersion":%q}`, tt.version)
		}))
		t.Cleanup(api.Close)
		d := wired(t, tt.role)
		d.cfg.APIKubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
		kubeconfig := fmt.Sprintf("{clusters: [{name: c, cluster: {server: %q}}], contexts: [{name: x, context: {cluster: c}}], current-context: x}", api.URL)
		for file, text := range map[string]string{d.cfg.APIKubeconfig: kubeconfig, d.cfg.TokenSecret: strings.Repeat("s", 32)} {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.connect(t.Context()); err != nil {
			t.Fatal(err)
		}
		if verifies := d.verifier != nil; verifies != tt.want {
			t.Errorf("%s of %q: agents are verified: %v", tt.role, tt.version, verifies)
		}
	}
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
		d := wired(t, tt.role)
		d.cfg.Subnet, d.cfg.Subnet6 = netip.MustParsePrefix("10.87.0.0/16"), netip.Prefix{}
		if tt.subnet6 != "" {
			d.cfg.Subnet6 = netip.MustParsePrefix(tt.subnet6)
		}
		r := route.Route{ID: sandbox.IDOf("u"), UID: "u", Namespace: "default", Name: "a", ResourceVersion: "5", State: sandbox.Running}
		if tt.addr != "" {
			r.Address = netip.MustParseAddr(tt.addr)
		}
		other := r
		other.ID, other.UID, other.Name, other.Address = sandbox.IDOf("v"), "v", "b", netip.MustParseAddr("10.87.0.9")
		found := func(r route.Route) bool {
			_, ok := d.routes.Lookup(r.ID)
			return ok
		}
		d.hints().Apply("other", []push.Route{{Route: r}, {Route: other}})
		if got := found(r); got != tt.want {
			t.Errorf("%+v: found after a hint %v", tt, got)
		}
		if !found(other) {
			t.Errorf("%+v: the rest of the batch is lost", tt)
		}
		older := other
		older.ResourceVersion = "4"
		if !d.routes.Upsert(older) {
			t.Errorf("%+v: a hint replaces the base record, which only the watch writes", tt)
		}
		d.routes.Upsert(r) // the watch confirms it
		d.hints().Apply("other", []push.Route{{Route: r, Deleted: true}})
		if !found(r) {
			t.Errorf("%+v: a deletion that is not newer than the watch hides the route", tt)
		}
		r.ResourceVersion = "6"
		d.hints().Apply("other", []push.Route{{Route: r, Deleted: true}})
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
	routes := replicated.Routes{Table: route.NewTable(), Peers: sent}
	s, dead := runningSandbox("s"), runningSandbox("dead")
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

// startPeers runs the phase of peers until the test ends.
func startPeers(t *testing.T, d *Daemon) {
	t.Helper()
	d.cfg.PeerAddr = "127.0.0.1:0"
	var stack lifecycle.Stack
	t.Cleanup(func() {
		if err := stack.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := boot.Run(t.Context(), []boot.Phase{phase(t, d, "peers")}, d.progress, &stack); err != nil {
		t.Fatal(err)
	}
}

// TestPeersPhase has a server receive over the network what a replica applies.
func TestPeersPhase(t *testing.T) {
	dir := t.TempDir()
	start := func(role, name string, seeds ...string) *Daemon {
		d := wired(t, role)
		d.cfg.NodeName, d.cfg.PeerDir, d.cfg.PeerSeeds = name, dir, seeds
		d.cfg.Subnet = netip.MustParsePrefix("10.87.0.0/16")
		startPeers(t, d)
		return d
	}
	from := start(config.RoleReplica, "from")
	to := start(config.RoleServer, "to", from.peers.Self().Gossip.String())
	eventually.True(t, "the replicas find each other", func() bool { return len(from.peers.Members()) == 1 && len(to.peers.Members()) == 1 })
	at := func(name, address string) *agents.Sandbox {
		s := runningSandbox(name)
		s.Status.PodIPs = []string{address}
		return s
	}
	lookup := func(s *agents.Sandbox) bool {
		_, ok := to.routes.Lookup(sandbox.IDOf(s.UID))
		return ok
	}
	foreign, ours := at("foreign", "10.88.0.1"), at("ours", "10.87.0.5")
	from.replicatedRoutes().Apply(foreign)
	from.replicatedRoutes().Apply(ours)
	eventually.True(t, "the server has the route", func() bool { return lookup(ours) })
	if lookup(foreign) {
		t.Error("the server routes to an address outside of its subnets")
	}
	ours.ResourceVersion = "8"
	from.replicatedRoutes().ApplyDelete(ours)
	eventually.True(t, "the server has dropped the route", func() bool { return !lookup(ours) })
}

// TestPeersOfACluster has replicas of a cluster derive their keys from the secret of all tokens, and keep nothing.
func TestPeersOfACluster(t *testing.T) {
	start := func(name, secret string, seeds ...string) *Daemon {
		d := wired(t, config.RoleReplica)
		d.cfg.NodeName, d.cfg.PeerSeeds = name, seeds
		var err error
		if d.tokens, err = sandbox.NewTokens([]byte(strings.Repeat(secret, 32))); err != nil {
			t.Fatal(err)
		}
		d.verifier = identity.NewVerifier(d.tokens)
		startPeers(t, d)
		return d
	}
	from := start("from", "s")
	gossip := from.peers.Self().Gossip.String()
	stranger := start("stranger", "t", gossip)
	to := start("to", "s", gossip)
	eventually.True(t, "the replicas find each other", func() bool { return len(from.peers.Members()) == 1 && len(to.peers.Members()) == 1 })
	s := runningSandbox("s")
	from.replicatedRoutes().Apply(s)
	eventually.True(t, "the other has the route", func() bool {
		_, ok := to.routes.Lookup(sandbox.IDOf(s.UID))
		return ok
	})
	if members := stranger.peers.Members(); len(members) != 0 {
		t.Errorf("with another secret: members %v", members)
	}
	for _, name := range []string{"peers", "members.json"} {
		if _, err := os.Stat(filepath.Join(from.cfg.DataDir, name)); err == nil {
			t.Errorf("%s in the data directory", name)
		}
	}
}
