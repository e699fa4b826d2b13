// Package adminops implements the operations of the admin API: status, doctor, diagnostics, removal of all sandboxes, images, addresses, peers, transfers of
// checkpoints.
//
// It starts nothing and holds no state: what a phase of the boot makes is read from [Config.Ready], after the boot only.
package adminops

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/barchan-dev/barchan/internal/adminapi"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/feeds"
	"github.com/barchan-dev/barchan/internal/daemon/imagegc"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/daemon/nodesocket"
	"github.com/barchan-dev/barchan/internal/edge/acme"
	"github.com/barchan-dev/barchan/internal/edge/peers"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Config is what [New] needs.
type Config struct {
	Config  *config.Config
	Version string
	Started time.Time
	Log     *slog.Logger
	// Wrap is around the handler of all routes; nil: nothing is.
	Wrap func(http.Handler) http.Handler
	// Progress reports whether Ready may be called.
	Progress *boot.Progress
	Gate     *health.Gate
	// Stop ends the server.
	Stop func()
	// Process is the server's that this node has started; nil: none.
	Process ServerProcess
	// Early returns what exists from the first listener on.
	Early func() Early
	// Ready returns what exists after the boot.
	Ready func() Parts
}

// Early are the parts of a server that boots.
type Early struct {
	HTTP, TLS, SSH, CAFile string
	// ACME is nil without ACME.
	ACME *acme.Manager
}

// Parts are those of a server that is ready.
type Parts struct {
	// Machine is nil where no sandboxes run.
	Machine *machine.Machine
	// Images removes images; nil where Machine is.
	Images *imagegc.Collector
	// Apart is the node of a server whose sandboxes run by a process of its own; else nil.
	Apart *nodesocket.Client
	Cache *cache.Cache
	// Phases counts the sandboxes of Cache; nil in a node that is a process of its own, which lists them.
	Phases *feeds.Phases
	Routes *route.Table
	// Peers is nil where there are none.
	Peers *peers.Replica
	// RotateSecrets replaces the key of Secrets; nil where there is no API server.
	RotateSecrets func(context.Context) (int, error)
	// Kube and Kubeconfig reach the API server.
	Kube, Kubeconfig string
}

// Server does the operations on one server.
type Server struct {
	cfg Config
	log *slog.Logger
}

// New returns the operations; it starts nothing.
func New(cfg Config) Server { return Server{cfg: cfg, log: cfg.Log.With(telemetry.Component, "admin")} }

// API returns the admin API over the operations.
func (s Server) API() (*adminapi.API, error) {
	return adminapi.New(adminapi.Config{
		Socket: s.cfg.Config.AdminSocket(), Server: s, Images: imageStore{s}, Build: imageStore{s}, Log: s.cfg.Log,
		Audit: s.Audit, Diagnostics: s.diagnostics, Addresses: network{s}, Egress: network{s}, Peers: s.peers(), Checkpoints: transfers{s}, RotateSecrets: s.rotateSecrets, Wrap: s.cfg.Wrap,
	})
}

// rotateSecrets replaces the key of Secrets. A client that disconnects does not end it.
func (s Server) rotateSecrets(ctx context.Context) (int, error) {
	p, err := s.ready()
	if err == nil && p.RotateSecrets == nil {
		err = errs.Public(errs.ErrNotFound, "this role has no object store; use the server whose API it serves")
	}
	if err != nil {
		return 0, err
	}
	n, err := p.RotateSecrets(context.WithoutCancel(ctx))
	if err == nil {
		s.log.InfoContext(ctx, "key of Secrets replaced", "secrets", n)
	}
	return n, err
}

// ready returns the parts of a server that is ready.
func (s Server) ready() (Parts, error) {
	if err := s.cfg.Progress.Err(); err != nil {
		return Parts{}, err
	}
	return s.cfg.Ready(), nil
}

// own returns the parts of a server that is ready and runs sandboxes. A replica runs none.
func (s Server) own(ctx context.Context) (Parts, error) {
	p, err := s.ready()
	switch {
	case err != nil || p.Machine != nil:
		return p, err
	case p.Apart == nil:
		return p, errs.Public(errs.ErrNotFound, "a replica runs no sandboxes; use the server whose API it serves")
	}
	state, err := p.Apart.State(ctx)
	if err != nil {
		return p, errs.Public(err, "the node of this server, a process of its own, does not answer at "+s.cfg.Config.NodeSocket)
	}
	return p, errs.Public(errs.ErrNotFound, fmt.Sprintf("the node of this server is a process of its own; repeat the command with `--data-dir %s`", state.DataDir))
}
