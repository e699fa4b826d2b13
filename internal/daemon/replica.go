package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/discovery"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/keyfile"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/replicated"
	"github.com/barchan-dev/barchan/internal/daemon/staleness"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
)

// connect has a replica or controller use the API server of its kubeconfig, or of the cluster whose Pod it is.
// A replica waits until that answers; a controller's caches do.
func (d *Daemon) connect(ctx context.Context) (err error) {
	if err := d.openTokens(); err != nil {
		return err
	}
	d.rest, err = clientcmd.BuildConfigFromFlags("", d.cfg.APIKubeconfig)
	if err != nil {
		return fmt.Errorf("apiKubeconfig: %w", err)
	}
	d.rest.QPS = -1 // no limit of the client's own; the server has its flow control
	d.rest.UserAgent = "barchan-" + d.cfg.Role + "/" + d.cfg.Version
	switch d.cfg.Role { // neither routes requests
	case config.RoleController:
		d.verifier = identity.NewVerifier(d.tokens)
		return nil
	case config.RoleNode:
		return nil
	}
	if d.stale, err = staleness.Limit(); err != nil {
		return err
	}
	staleness.Dial(d.rest, d.stale)
	if err := d.findCluster(ctx); err != nil {
		return err
	}
	d.watches = staleness.NewShortWatches(d.stale)
	d.rest.Wrap(d.watches.Wrap)
	return nil
}

// findCluster has a replica verify agents if its API server is a cluster's, and not another server of ours: there an address
// rests before another sandbox gets it.
func (d *Daemon) findCluster(ctx context.Context) error {
	api, err := discovery.NewDiscoveryClientForConfig(d.rest)
	if err != nil {
		return fmt.Errorf("client of the API server's version: %w", err)
	}
	for last := ""; ; {
		info, err := api.ServerVersionWithContext(ctx)
		if err == nil {
			if !apiserver.IsOurs(info) {
				d.verifier = identity.NewVerifier(d.tokens)
			}
			return nil
		}
		if text := err.Error(); text != last {
			d.log.WarnContext(ctx, "API server version not read", telemetry.Error, err)
			last = text
		}
		if !lifecycle.Sleep(ctx, time.Second) {
			return fmt.Errorf("read the API server's version: %w", errors.Join(context.Cause(ctx), err))
		}
	}
}

// secretBytes is the size of the secret of all tokens.
const secretBytes = 32

// openTokens reads the secret of all tokens, once. A server makes it; the other roles must be given theirs.
func (d *Daemon) openTokens() error {
	if d.tokens != nil {
		return nil
	}
	// The server of a node may have another user.
	file := keyfile.File{Path: d.cfg.TokenSecret, What: "secret of all tokens", Size: secretBytes, Max: 1, AnyOwner: d.cfg.Role == config.RoleNode}
	open := file.Read
	if d.cfg.Role == config.RoleServer {
		if err := os.MkdirAll(filepath.Dir(file.Path), 0o700); err != nil {
			return fmt.Errorf("make the directory of tokenSecret: %w", err)
		}
		open = file.Open
	}
	keys, err := open()
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("tokenSecret: all replicas, controllers and nodes need the same one; that of a server is <dataDir>/credentials/token-secret: %w: %w", err, errs.ErrInvalid)
	}
	if err != nil {
		return err
	}
	d.tokens, err = sandbox.NewTokens(keys[0])
	return err
}

// makePeers makes the connection to the other replicas, if there are to be any.
func (d *Daemon) makePeers(context.Context) (err error) {
	d.peers, err = replicated.Open(replicated.Config{
		Config: &d.cfg.Config, Tokens: d.tokens, Cluster: d.ofCluster(), Table: d.routes, Log: d.cfg.Log, Metrics: d.metrics,
	})
	return err
}

func (d *Daemon) peerServices() services {
	if d.peers == nil {
		return nil
	}
	return services{boot.Awaited("peers", d.peers.Run, boot.Closed(d.peers.Ready()))}
}

func (d *Daemon) replicatedRoutes() replicated.Routes {
	if d.peers == nil {
		return replicated.Routes{Table: d.routes}
	}
	return replicated.Routes{Table: d.routes, Peers: d.peers}
}
