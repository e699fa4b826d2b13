package warmpool

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

const (
	defaultWorkers    = 4
	defaultStuckAfter = 5 * time.Minute
	defaultGoneAfter  = 5 * time.Minute
	defaultCoalesce   = 20 * time.Millisecond
	defaultColdAfter  = 2 * time.Minute
	retryFirst        = 200 * time.Millisecond
	retryMost         = time.Minute
)

// Objects are the reads that a pool needs beside the API server's; package cache has them.
type Objects interface {
	// CurrentTemplate returns a template and its revision as the API server has them now. It is
	// an errs.ErrNotFound if there is none, and an errs.ErrInvalid if it has no revision.
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
	// PoolsOf returns the pools of a template in a namespace, or in all if that is empty.
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
	// Members returns the unclaimed members of a pool; ClaimedFrom what was claimed through it.
	Members(ctx context.Context, pool types.UID) ([]agents.Sandbox, error)
	ClaimedFrom(ctx context.Context, pool types.UID) ([]agents.Sandbox, error)
}

// WarmUps reads what a template's warm-up has led to; package cache has it.
type WarmUps interface {
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
	Sandbox(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error)
}

// Config is what New needs; every field is required unless it says so.
type Config struct {
	Log *slog.Logger
	// Client asks the API server itself, for reads as for writes.
	Client client.Client
	// Cache is what is watched, and Objects reads it.
	Cache   crcache.Cache
	Objects Objects
	// WarmUps lets members start from the checkpoint of their template's warm-up; nil has each run it.
	WarmUps WarmUps
	// ColdAfter is how long a pool waits for that checkpoint before it makes members without. Default 2
	// minutes.
	ColdAfter time.Duration
	// Events records what users should see beside the object; nil records nothing.
	Events events.EventRecorder
	// Workers bounds how many pools are worked on at once. Default 4.
	Workers int
	// StuckAfter is how long a member may take to get ready before it is replaced. Default 5 minutes.
	StuckAfter time.Duration
	// GoneAfter is how long a member may take to be removed before it is not counted any more. Default
	// 5 minutes.
	GoneAfter time.Duration
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
	if c.GoneAfter == 0 {
		c.GoneAfter = defaultGoneAfter
	}
	if c.ColdAfter == 0 {
		c.ColdAfter = defaultColdAfter
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
	return controllers.New(controllers.Work{
		Name: "warmpool", Log: log, Workers: cfg.Workers, RetryFirst: retryFirst, RetryMost: retryMost,
		Reconciler: r, Sources: r.sources(cfg.Cache),
	})
}

// reconciler works on pools, one pass at a time on each.
type reconciler struct {
	log        *slog.Logger
	client     client.Client
	objects    Objects
	warmUps    WarmUps // nil: members are not waited for
	coldAfter  time.Duration
	events     events.EventRecorder
	stuckAfter time.Duration
	goneAfter  time.Duration
	coalesce   time.Duration
	ledger     *expectations
	names      *names

	mu       sync.Mutex
	troubles map[types.UID]*failureBackoff // by pool, each used by its own pass alone; +checklocks:mu
}

func newReconciler(cfg Config, log *slog.Logger) *reconciler {
	return &reconciler{
		log: log, client: cfg.Client, objects: cfg.Objects, warmUps: cfg.WarmUps, coldAfter: cfg.ColdAfter, events: cfg.Events, stuckAfter: cfg.StuckAfter, goneAfter: cfg.GoneAfter, coalesce: cfg.Coalesce,
		ledger: newLedger(), names: &names{keys: map[types.UID]types.NamespacedName{}}, troubles: map[types.UID]*failureBackoff{},
	}
}

func (r *reconciler) trouble(pool types.UID) *failureBackoff {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.troubles[pool]
	if t == nil {
		t = &failureBackoff{}
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
