package claim

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/claiming"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

const (
	retryFirst = 100 * time.Millisecond
	retryMost  = time.Minute
	// waitForMember bounds the wait for a member in one reconcile.
	waitForMember   = 2 * time.Second
	defaultPatience = 30 * time.Second
	// bindTries is the number of sandboxes tried in one reconcile.
	bindTries = 3
	// quotaRetry is the retry interval of a claim that the quota refuses.
	quotaRetry = time.Minute

	defaultWorkers = 64
	// waitingShare is the share of the workers that may wait for one pool's members.
	waitingShare = 4
)

// Objects reads objects from memory; package cache implements it. The caller owns the results.
type Objects interface {
	Claim(ctx context.Context, key types.NamespacedName) (*extensions.SandboxClaim, error)
	Pool(ctx context.Context, key types.NamespacedName) (*extensions.SandboxWarmPool, error)
	Sandbox(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error)
	Owned(ctx context.Context, owner types.UID) ([]*agents.Sandbox, error)
}

// Relations finds the claims that a change affects; package cache implements it. The claims are shared.
type Relations interface {
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
	ClaimsOn(ctx context.Context, pool types.NamespacedName) ([]*extensions.SandboxClaim, error)
}

// Cache combines all reads.
type Cache interface {
	Objects
	Relations
	claiming.Reader
}

// Config configures New. Fields are required unless documented otherwise.
type Config struct {
	// Client reads and writes the API server directly.
	Client client.Client
	// Watched provides the watches.
	Watched crcache.Cache
	// Cache must be synced before the controller starts, so that it shows the writes of an earlier process.
	Cache  Cache
	Picker *picker.Picker
	// Binder is optional; without it each claim with variables starts cold.
	Binder claiming.Binder
	Quota  *quota.Quotas
	// Assumed holds written sandboxes that the cache may not show yet; cache events update it. Default: an
	// instance without events.
	Assumed *assumecache.Sandboxes
	// Events records Kubernetes events; nil records none.
	Events events.EventRecorder
	// Metrics is optional.
	Metrics prometheus.Registerer
	// UpstreamMetrics gets what agent-sandbox's dashboards look for; nil: none does.
	UpstreamMetrics prometheus.Registerer
	// Annotate has claims get agent-sandbox's annotations of which sandbox they have and when a controller first saw them: one more write
	// of each.
	Annotate bool
	// Tracing makes a trace of each time that a claim is served or found to wait; nil: none.
	Tracing trace.TracerProvider
	// Log is optional.
	Log *slog.Logger
	// Workers is the number of concurrent reconciles; at most a quarter of them wait for members of one
	// pool, and three quarters are of one namespace, see controllers.Fits. Default 64.
	Workers int
	// Patience bounds the wait for a member that is being created; a cold start follows. Default 30 s.
	Patience time.Duration
}

// New returns the controller of claims. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if cfg.Client == nil || cfg.Watched == nil || cfg.Cache == nil || cfg.Picker == nil || cfg.Quota == nil {
		return nil, fmt.Errorf("claim controller: Client, Watched, Cache, Picker and Quota are required: %w", errs.ErrInvalid)
	}
	cfg.Workers, cfg.Patience = cmp.Or(cfg.Workers, defaultWorkers), cmp.Or(cfg.Patience, defaultPatience)
	if cfg.Assumed == nil {
		cfg.Assumed = assumecache.New(cfg.Cache.Sandbox)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Log = cfg.Log.With(telemetry.Component, "claim-controller")
	r, err := newReconciler(&cfg)
	if err != nil {
		return nil, err
	}
	return controllers.New(controllers.Work{
		Name: "sandboxclaim", Log: r.Log, Workers: cfg.Workers, Share: cfg.Workers * 3 / 4, RetryFirst: retryFirst, RetryMost: retryMost,
		Reconciler: r, Sources: r.sources(cfg.Watched),
	})
}
