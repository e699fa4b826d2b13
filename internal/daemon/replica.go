package daemon

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"k8s.io/client-go/tools/clientcmd"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/defaults"
	"github.com/barchan-dev/barchan/internal/daemon/staleness"
	"github.com/barchan-dev/barchan/internal/edge/peers"
	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/peers/trust"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// connect has a replica or controller use the API server of its kubeconfig, or of the cluster whose Pod it is.
// Whether that answers is seen by the caches, which wait for it.
func (d *Daemon) connect(context.Context) (err error) {
	if err := d.openTokens(); err != nil {
		return err
	}
	d.rest, err = clientcmd.BuildConfigFromFlags("", d.cfg.APIKubeconfig)
	if err != nil {
		return fmt.Errorf("apiKubeconfig: %w", err)
	}
	d.rest.QPS = -1 // no limit of the client's own; the server has its flow control
	d.rest.UserAgent = "barchan-" + d.cfg.Role + "/" + d.cfg.Version
	if d.cfg.Role == config.RoleController { // it routes no requests
		return nil
	}
	if d.stale, err = staleness.Limit(); err != nil {
		return err
	}
	d.watches = staleness.NewShortWatches(d.stale)
	d.rest.Wrap(d.watches.Wrap)
	staleness.Dial(d.rest, d.stale)
	return nil
}

// openTokens reads the secret of all tokens. A server makes it; the other roles must be given theirs.
func (d *Daemon) openTokens() error {
	if d.cfg.Role != config.RoleServer {
		if _, err := os.Stat(d.cfg.TokenSecret); err != nil {
			return fmt.Errorf("tokenSecret: all replicas and controllers need the same one; that of a server is <dataDir>/credentials/token-secret: %w: %w", err, errs.ErrInvalid)
		}
	}
	secret, err := defaults.LoadSecret(d.cfg.TokenSecret)
	if err != nil {
		return err
	}
	d.tokens, err = sandbox.NewTokens(secret)
	return err
}

// makePeers configures the connection to the other replicas, if there are to be any.
func (d *Daemon) makePeers(context.Context) error {
	if d.cfg.PeerAddr == "" {
		return nil
	}
	gossip, err := netip.ParseAddrPort(d.cfg.PeerAddr)
	if err != nil {
		return fmt.Errorf("peerAddr: %w", err)
	}
	push := netip.AddrPortFrom(gossip.Addr(), 0)
	if d.cfg.PeerPushAddr != "" {
		if push, err = netip.ParseAddrPort(d.cfg.PeerPushAddr); err != nil {
			return fmt.Errorf("peerPushAddr: %w", err)
		}
	}
	d.peers, err = peers.New(peers.Config{
		Name: d.cfg.NodeName, Bind: gossip, PushBind: push, Seeds: d.cfg.PeerSeeds,
		KeyFile: filepath.Join(d.cfg.PeerDir, "gossip.key"), TLS: trust.Source{Dir: filepath.Join(d.cfg.PeerDir, "authority")},
		StateFile: filepath.Join(d.cfg.DataDir, "members.json"), OnRoutes: d.applyHints, Log: d.cfg.Log, Metrics: d.metrics, FlushDelay: -1,
	})
	return err
}

func (d *Daemon) peerServices() services {
	if d.peers == nil {
		return nil
	}
	return services{boot.Awaited("peers", d.peers.Run, boot.Closed(d.peers.Ready()))}
}

// applyHints applies another replica's batch as hints; the watch has the base routes.
func (d *Daemon) applyHints(_ string, batch []push.Route) {
	for _, r := range batch {
		if !d.ours(r.Address) {
			continue
		}
		if r.Deleted {
			d.routes.HintDelete(r.ID, r.ResourceVersion)
		} else {
			d.routes.Hint(r.Route)
		}
	}
}

// ours reports whether a hint may name an address: none, or one of the sandboxes' subnets where
// those are known. A replica does not have them.
func (d *Daemon) ours(addr netip.Addr) bool {
	if !addr.IsValid() || d.cfg.Role != config.RoleServer {
		return true
	}
	return d.cfg.Subnet.Contains(addr) || d.cfg.Subnet6.IsValid() && d.cfg.Subnet6.Contains(addr)
}

// replicatedRoutes is the table here, which pushes every change of the manager to the other replicas.
type replicatedRoutes struct {
	*route.Table
	peers pusher // nil without replicas
}

// pusher sends a route to the other replicas.
type pusher interface {
	Push(r route.Route)
	PushDelete(r route.Route)
}

func (d *Daemon) replicatedRoutes() replicatedRoutes {
	if d.peers == nil {
		return replicatedRoutes{Table: d.routes}
	}
	return replicatedRoutes{d.routes, d.peers}
}

// Apply implements sandboxes.Routes.
func (t replicatedRoutes) Apply(s *agents.Sandbox) bool {
	changed := t.Table.Apply(s)
	if changed && t.peers != nil {
		if r, keep := route.FromSandbox(s); keep {
			t.peers.Push(r)
		} else {
			t.peers.PushDelete(r)
		}
	}
	return changed
}

// ApplyDelete implements sandboxes.Routes.
func (t replicatedRoutes) ApplyDelete(s *agents.Sandbox) bool {
	changed := t.Table.ApplyDelete(s)
	if changed && t.peers != nil {
		r, _ := route.FromSandbox(s)
		t.peers.PushDelete(r)
	}
	return changed
}
