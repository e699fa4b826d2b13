package e2b_test

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/e2b"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// controlPlane is a server's real API server, cache, picker, quotas, manager and REST API. It has no node.
type controlPlane struct {
	api     *apiserver.Server
	objects *cache.Cache
	picker  *picker.Picker
	quotas  *quota.Quotas
	assumed *assumecache.Sandboxes
	web     http.Handler
}

// startControlPlane runs one until ctx is done; stop waits for its end, also after an error.
func startControlPlane(ctx context.Context, cfg apiserver.Config) (p *controlPlane, stop func(), err error) {
	p, stop = &controlPlane{}, func() {}
	if p.api, err = apiserver.New(cfg); err != nil {
		return nil, stop, err
	}
	if err := p.api.Start(ctx); err != nil {
		return nil, stop, err
	}
	var wg sync.WaitGroup
	stop = func() { wg.Wait(); p.api.Stop() }
	p.objects, err = cache.New(ctx, cache.Config{REST: p.api.RESTConfig(apiserver.UserController)})
	if err != nil {
		return nil, stop, err
	}
	direct, routes := p.api.Direct(apiserver.UserController), route.NewTable()
	listing := sandboxes.NewListing()
	p.assumed = assumecache.New(listing.Sandbox)
	var failed error
	p.picker, failed = picker.New(picker.Config{Writer: direct})
	p.quotas, err = quota.New(quota.Config{Reader: p.objects, Log: telemetry.Discard()})
	if err = errors.Join(err, failed); err != nil {
		return nil, stop, err
	}
	_, err = cache.On(ctx, p.objects, func(older, newer *agents.Sandbox) {
		listing.Observe(older, newer)
		p.assumed.Observe(older, newer)
		p.picker.Observe(older, newer)
		p.quotas.Observe(older, newer)
		if newer != nil {
			routes.Apply(newer)
		}
	})
	if err != nil {
		return nil, stop, err
	}
	wg.Go(func() { _ = p.objects.Run(ctx) })
	if err := p.objects.WaitSynced(ctx); err != nil {
		return nil, stop, err
	}
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		return nil, stop, err
	}
	byAddress := agentclient.New(agentclient.Config{Tokens: tokens})
	m, err := manager.New(manager.Config{
		Binder: byAddress, Agents: byAddress,
		Objects: direct, Cache: p.objects, Picker: p.picker, Quota: p.quotas, Assumed: p.assumed, Listing: listing, Routes: routes, Tokens: tokens, Log: telemetry.Discard(),
	})
	if err != nil {
		return nil, stop, err
	}
	p.web, err = e2b.New(e2b.Config{Manager: m, Log: telemetry.Discard()})
	return p, stop, err
}
