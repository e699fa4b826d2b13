package warmpool

import (
	"cmp"
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
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

const (
	retryFirst = 200 * time.Millisecond
	retryMost  = time.Minute
	// statusInterval is the least time between two writes of a pool's status that differ in numbers alone.
	statusInterval = 500 * time.Millisecond
)

// Objects reads what a pool needs besides the API server; package cache has it.
type Objects interface {
	// CurrentTemplate returns a template and its revision from the API server. A missing template is an
	// errs.ErrNotFound, one without a revision an errs.ErrInvalid.
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
	// PoolsOf returns the pools of a template in a namespace, or in all if that is empty.
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
	// Members returns the unclaimed members of a pool; ClaimedFrom the sandboxes claimed through it. Both are shared.
	Members(ctx context.Context, pool types.UID) ([]*agents.Sandbox, error)
	ClaimedFrom(ctx context.Context, pool types.UID) ([]*agents.Sandbox, error)
}

// WarmUps reads the results of a template's warm-up; package cache has it.
type WarmUps interface {
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
	Sandbox(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error)
}

// Config is what New needs; every field is required unless its comment allows nil.
type Config struct {
	Log *slog.Logger
	// Client reads and writes the API server itself.
	Client client.Client
	// Cache is watched, and Objects reads it.
	Cache   crcache.Cache
	Objects Objects
	// WarmUps has members start from the checkpoint of their template's warm-up; with nil each runs it.
	WarmUps WarmUps
	// ColdAfter is how long a pool waits for that checkpoint before it creates members without. Default 2
	// minutes.
	ColdAfter time.Duration
	// Events records changes of the status for users; nil records none.
	Events events.EventRecorder
	// Workers bounds the pools that are reconciled at once. Default 4.
	Workers int
	// StuckAfter bounds the time until a member is ready; then it is replaced. Default 5 minutes.
	StuckAfter time.Duration
	// GoneAfter is how long the deletion of a member counts as a member. Default 5 minutes.
	GoneAfter time.Duration
	// Coalesce is how long a sandbox's event waits for more of its pool. Default 50 ms; negative: not at all.
	Coalesce time.Duration
}

func (c *Config) complete() error {
	if c.Log == nil || c.Client == nil || c.Cache == nil || c.Objects == nil {
		return fmt.Errorf("warm pool controller: Log, Client, Cache and Objects are required: %w", errs.ErrInvalid)
	}
	c.Workers = cmp.Or(c.Workers, 4)
	c.StuckAfter = cmp.Or(c.StuckAfter, 5*time.Minute)
	c.GoneAfter = cmp.Or(c.GoneAfter, 5*time.Minute)
	c.ColdAfter = cmp.Or(c.ColdAfter, 2*time.Minute)
	c.Coalesce = max(cmp.Or(c.Coalesce, 50*time.Millisecond), 0)
	return nil
}

// New returns the controller of warm pools. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	cfg.Log = cfg.Log.With(telemetry.Component, "warmpool-controller")
	r := &reconciler{Config: cfg, expected: newExpectations()}
	return controllers.New(controllers.Work{
		Name: "warmpool", Log: cfg.Log, Workers: cfg.Workers, RetryFirst: retryFirst, RetryMost: retryMost,
		Reconciler: r, Sources: r.sources(cfg.Cache),
	})
}

// reconciler reconciles pools, one pass at a time on each.
type reconciler struct {
	Config
	expected *expectations
	names    sync.Map // of pools: types.UID to types.NamespacedName
	states   sync.Map // of pools: types.UID to *poolState, which only the pool's pass uses
}

// poolState is what one pass over a pool leaves to the next.
type poolState struct {
	backoff failureBackoff
	written time.Time // the last write of the status
	delayed time.Time // since when a refill is delayed; zero: it is not
}

// forget drops the state of a deleted pool.
func (r *reconciler) forget(pool types.UID) {
	r.expected.forget(pool)
	r.names.Delete(pool)
	r.states.Delete(pool)
}

// predecessors returns the UIDs of earlier pools of a name.
func (r *reconciler) predecessors(key types.NamespacedName, now types.UID) (uids []types.UID) {
	r.names.Range(func(uid, k any) bool {
		if k == key && uid != now {
			uids = append(uids, uid.(types.UID)) //nolint:forcetypeassert // all keys are UIDs
		}
		return true
	})
	return uids
}
