// Package replicated keeps the route tables of several replicas alike, ahead of their watches.
package replicated

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/edge/peers"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Hints are what other replicas push.
type Hints struct {
	Table *route.Table
	// Subnets have all addresses of sandboxes. None: they are not known here, and a hint may name any.
	Subnets []netip.Prefix
}

// Apply applies another replica's batch as hints; the watch has the base routes.
func (h Hints) Apply(_ string, batch []push.Route) {
	for _, r := range batch {
		switch {
		case !h.allows(r.Address):
		case r.Deleted:
			h.Table.HintDelete(r.ID, r.ResourceVersion)
		default:
			h.Table.Hint(r.Route)
		}
	}
}

func (h Hints) allows(addr netip.Addr) bool {
	return !addr.IsValid() || h.Subnets == nil || slices.ContainsFunc(h.Subnets, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// Config is what Open needs. All of it is required.
type Config struct {
	*config.Config
	Tokens *sandbox.Tokens
	// Cluster is set on a Kubernetes cluster.
	Cluster bool
	// Table gets the routes of the other replicas as hints.
	Table   *route.Table
	Log     *slog.Logger
	Metrics prometheus.Registerer
}

// Open returns the connection to the other replicas, which the caller runs; nil where the settings name no address for it.
func Open(cfg Config) (*peers.Replica, error) {
	if cfg.PeerAddr == "" {
		return nil, nil //nolint:nilnil // see above
	}
	gossip, err := config.ParsePeer(cfg.PeerAddr)
	if err != nil {
		return nil, fmt.Errorf("peerAddr: %w", err)
	}
	push := netip.AddrPortFrom(gossip.Addr(), 0)
	if cfg.PeerPushAddr != "" {
		if push, err = config.ParsePeer(cfg.PeerPushAddr); err != nil {
			return nil, fmt.Errorf("peerPushAddr: %w", err)
		}
	}
	of := peers.Config{
		Name: cfg.NodeName, Bind: gossip, PushBind: push, Seeds: cfg.PeerSeeds,
		OnRoutes: cfg.hints().Apply, Log: cfg.Log, Metrics: cfg.Metrics, FlushDelay: -1,
	}
	if cfg.Cluster && cfg.PeerDir == "" {
		of.Key, err = cfg.Tokens.Derive("barchan peers gossip key")
		if err == nil {
			of.TLS.Seed, err = cfg.Tokens.Derive("barchan peers authority")
		}
		if err != nil {
			return nil, err
		}
	} else {
		dir := cmp.Or(cfg.PeerDir, filepath.Join(cfg.DataDir, "peers"))
		of.KeyFile, of.TLS.Dir = filepath.Join(dir, "gossip.key"), filepath.Join(dir, "authority")
	}
	if !cfg.Cluster { // a cluster may give the address of an absent member to another Pod; the seeds have those that are present
		of.StateFile = filepath.Join(cfg.DataDir, "members.json")
	}
	return peers.New(of)
}

// hints are the routes of other replicas that may be applied here. A server knows the subnets of its sandboxes.
func (cfg *Config) hints() Hints {
	h := Hints{Table: cfg.Table}
	if cfg.Role == config.RoleServer {
		h.Subnets = []netip.Prefix{cfg.Subnet, cfg.Subnet6}
	}
	return h
}

// Routes is the table here, which pushes every write of the manager to the other replicas: also one that the watch has brought
// here first, since the watches of the others may be behind.
type Routes struct {
	*route.Table
	Peers Pusher // nil without replicas
}

// Pusher sends a route to the other replicas.
type Pusher interface {
	Push(r route.Route)
	PushDelete(r route.Route)
}

// Apply implements sandboxes.Routes.
func (t Routes) Apply(s *agents.Sandbox) bool {
	changed := t.Table.Apply(s)
	if t.Peers != nil {
		if r, keep := route.FromSandbox(s); keep {
			t.Peers.Push(r)
		} else {
			t.Peers.PushDelete(r)
		}
	}
	return changed
}

// ApplyDelete implements sandboxes.Routes.
func (t Routes) ApplyDelete(s *agents.Sandbox) bool {
	changed := t.Table.ApplyDelete(s)
	if t.Peers != nil {
		r, _ := route.FromSandbox(s)
		t.Peers.PushDelete(r)
	}
	return changed
}
