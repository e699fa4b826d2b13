package claim

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/claiming"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

const (
	retryFirst = 100 * time.Millisecond
	retryMost  = time.Minute
	// waitForMember bounds how long one look at a claim waits for a member.
	waitForMember   = 2 * time.Second
	defaultPatience = 30 * time.Second
	// bindTries is how many sandboxes are tried in one reconcile.
	bindTries = 3
	// quotaRetry is when a claim that the quota refused is looked at again if nothing of its
	// namespace ends before.
	quotaRetry = time.Minute

	defaultWorkers = 64
	// waitingShare is the share of the workers that may wait for one pool's members.
	waitingShare = 4
)

// Objects reads objects from memory; package cache has it. What it returns is the caller's own.
type Objects interface {
	Claim(ctx context.Context, key types.NamespacedName) (*extensions.SandboxClaim, error)
	Pool(ctx context.Context, key types.NamespacedName) (*extensions.SandboxWarmPool, error)
	Sandbox(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error)
	Owned(ctx context.Context, owner types.UID) ([]agents.Sandbox, error)
}

// Relations tells which claims a change may concern; package cache has it.
type Relations interface {
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
	ClaimsOn(ctx context.Context, pool types.NamespacedName) ([]extensions.SandboxClaim, error)
}

// Templates reads a template and its revision from the API server, not from memory; package
// cache has it.
type Templates interface {
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
}

// WarmUps reads what a template's warm-up has led to; package cache has it.
type WarmUps interface {
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
}

// Cache is all that is read.
type Cache interface {
	Objects
	WarmUps
	Relations
	Templates
}

// Config is what New needs; every field is required unless it says so.
type Config struct {
	// Client asks the API server itself.
	Client client.Client
	// Watched is what the controller is woken by.
	Watched crcache.Cache
	// Cache has been synced before the controller is started: what an earlier one wrote is in it.
	Cache  Cache
	Picker *picker.Picker
	// Binder; nil starts each claim with variables cold.
	Binder claiming.Binder
	Quota  *quota.Quotas
	// Assumed has the sandboxes that the cache may not show yet; the events of the cache feed it. Default: one
	// that no event feeds.
	Assumed *assumecache.Sandboxes
	// Events records what users should see beside the claim; nil records nothing.
	Events events.EventRecorder
	// Metrics; nil keeps them to itself.
	Metrics prometheus.Registerer
	// Log; nil discards.
	Log *slog.Logger
	// Workers bounds how many claims are worked on at once; a quarter of them at most waits for
	// members of one pool. Default 64.
	Workers int
	// Patience is how long a claim waits for a member before a sandbox is started cold although members
	// are in the making. Default 30 s.
	Patience time.Duration
}

// New returns the controller of claims. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if cfg.Client == nil || cfg.Watched == nil || cfg.Cache == nil || cfg.Picker == nil || cfg.Quota == nil {
		return nil, fmt.Errorf("claim controller: Client, Watched, Cache, Picker and Quota are required: %w", errs.ErrInvalid)
	}
	if cfg.Workers == 0 {
		cfg.Workers = defaultWorkers
	}
	if cfg.Patience == 0 {
		cfg.Patience = defaultPatience
	}
	if cfg.Assumed == nil {
		cfg.Assumed = assumecache.New(cfg.Cache.Sandbox)
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	r, err := newReconciler(&cfg)
	if err != nil {
		return nil, err
	}
	return controllers.New(controllers.Work{
		Name: "sandboxclaim", Log: r.log, Workers: cfg.Workers, RetryFirst: retryFirst, RetryMost: retryMost,
		Reconciler: r, Sources: r.sources(cfg.Watched),
	})
}
