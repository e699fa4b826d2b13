package warmpool

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/errs"
)

const (
	defaultWorkers    = 4
	defaultStuckAfter = 5 * time.Minute
	defaultCoalesce   = 20 * time.Millisecond
	retryFirst        = 200 * time.Millisecond
	retryMost         = time.Minute
)

// Objects are the reads that a pool needs beside the API server's; package cache has them.
type Objects interface {
	// CurrentTemplate returns a template and its revision as the API server has them now. It is
	// an errs.ErrNotFound if there is none, and an errs.ErrInvalid if it has no revision.
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
	// PoolsOf returns the pools of a template, of all namespaces.
	PoolsOf(ctx context.Context, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
	// Members returns the unclaimed members of a pool; ClaimedFrom what was claimed through it.
	Members(ctx context.Context, pool types.UID) ([]agents.Sandbox, error)
	ClaimedFrom(ctx context.Context, pool types.UID) ([]agents.Sandbox, error)
}

// Config is what New needs; every field is required unless it says so.
type Config struct {
	Log *slog.Logger
	// Client asks the API server itself, for reads as for writes.
	Client client.Client
	// Cache is what is watched, and Objects reads it.
	Cache   crcache.Cache
	Objects Objects
	// Events records what users should see beside the object; nil records nothing.
	Events events.EventRecorder
	// Workers bounds how many pools are worked on at once. Default 4.
	Workers int
	// StuckAfter is how long a member may take to get ready before it is replaced, and to be
	// removed before it is not counted any more. Default 5 minutes.
	StuckAfter time.Duration
	// Coalesce is how long a sandbox's event waits for more of its pool. Default 20 ms; less than
	// nothing lets it wait for none.
	Coalesce time.Duration
}

func (c *Config) complete() error {
	if c.Log == nil || c.Client == nil || c.Cache == nil || c.Objects == nil {
		return fmt.Errorf("warm pool controller: Log, Client, Cache and Objects are required: %w", errs.ErrInvalid)
	}
	if c.Workers == 0 {
		c.Workers = defaultWorkers
	}
	if c.StuckAfter == 0 {
		c.StuckAfter = defaultStuckAfter
	}
	if c.Coalesce == 0 {
		c.Coalesce = defaultCoalesce
	}
	return nil
}

// New returns the controller of warm pools. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	log := cfg.Log.With("component", "warmpool-controller")
	r := newReconciler(cfg, log)
	unique := true // several servers may run in one process, in tests
	c, err := controller.NewUnmanaged("warmpool", controller.Options{
		MaxConcurrentReconciles: cfg.Workers,
		SkipNameValidation:      &unique,
		Reconciler:              r,
		RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](retryFirst, retryMost),
		LogConstructor:          func(*reconcile.Request) logr.Logger { return logr.FromSlogHandler(log.Handler()) },
	})
	if err != nil {
		return nil, fmt.Errorf("make the warm pool controller: %w", err)
	}
	for _, s := range r.sources(cfg.Cache) {
		if err := c.Watch(s); err != nil {
			return nil, fmt.Errorf("watch for warm pools: %w", err)
		}
	}
	return c, nil
}

// reconciler works on pools, one pass at a time on each.
type reconciler struct {
	log        *slog.Logger
	client     client.Client
	objects    Objects
	events     events.EventRecorder
	stuckAfter time.Duration
	coalesce   time.Duration
	ledger     *ledger
	names      *names

	mu       sync.Mutex
	troubles map[types.UID]*trouble // by pool, each used by its own pass alone; +checklocks:mu
}

func newReconciler(cfg Config, log *slog.Logger) *reconciler {
	return &reconciler{
		log: log, client: cfg.Client, objects: cfg.Objects, events: cfg.Events, stuckAfter: cfg.StuckAfter, coalesce: cfg.Coalesce,
		ledger: newLedger(), names: &names{keys: map[types.UID]types.NamespacedName{}}, troubles: map[types.UID]*trouble{},
	}
}

func (r *reconciler) trouble(pool types.UID) *trouble {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.troubles[pool]
	if t == nil {
		t = &trouble{}
		r.troubles[pool] = t
	}
	return t
}

// forget drops what is remembered of a pool that is no more.
func (r *reconciler) forget(pool types.UID) {
	r.ledger.forget(pool)
	r.names.forget(pool)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.troubles, pool)
}

// names knows the pools' names by UID.
type names struct {
	mu   sync.Mutex
	keys map[types.UID]types.NamespacedName // +checklocks:mu
}

func (n *names) learn(uid types.UID, key types.NamespacedName) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.keys[uid] = key
}

func (n *names) of(uid types.UID) (types.NamespacedName, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	key, ok := n.keys[uid]
	return key, ok
}

// others are the UIDs of earlier pools of a name; but not itself.
func (n *names) others(key types.NamespacedName, itself types.UID) (uids []types.UID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for uid, k := range n.keys {
		if k == key && uid != itself {
			uids = append(uids, uid)
		}
	}
	return uids
}

func (n *names) forget(uid types.UID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.keys, uid)
}
