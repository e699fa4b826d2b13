package daemon

import (
	"context"
	"net/http"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/edge/dashboard"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// makeDashboard makes the handler of /ui, before the gateway by which it visits sandboxes.
func (d *Daemon) makeDashboard(ctx context.Context, rest http.Handler) (err error) {
	cfg := dashboard.Config{
		Keys: d.manager.Keys, Cache: d.cache, Objects: d.cache.Informers(), Live: d.cache.Live(), REST: rest, View: d.manager.Sandboxes.View, Template: d.manager.Templates.Get,
		Quotas: d.quotas, Conditions: d.health.Conditions, Domain: d.cfg.Domains[0], Log: d.cfg.Log, Audit: d.audit,
		Visit:     func(ctx context.Context, id sandbox.ID) (*gateway.Visit, error) { return d.gateway.Visit(ctx, id) },
		Agent:     func(s *agents.Sandbox) (*envd.Client, error) { return d.binder.Agent(s) },
		About:     dashboard.About{Version: d.cfg.Version, Node: d.cfg.NodeName, Role: d.cfg.Role, StartedAt: d.started},
		Reachable: d.cfg.Reachable,
	}
	if d.podLogs != nil {
		cfg.FollowLog = d.podLogs.Follow
	}
	d.dashboard, err = dashboard.New(cfg)
	if err == nil {
		_, err = cache.On(ctx, d.cache, d.dashboard.Observe)
	}
	return err
}
