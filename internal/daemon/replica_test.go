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

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
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
