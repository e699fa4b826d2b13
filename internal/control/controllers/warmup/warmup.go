package warmup

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
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

const (
	workers    = 4
	retryFirst = 200 * time.Millisecond
	retryMost  = time.Minute

	// firstPause and longestPause bound the backoff after failed warm-ups.
	firstPause   = 5 * time.Second
	longestPause = 10 * time.Minute
	// startTime bounds the start of a seed, without the warm-up itself.
	startTime = 10 * time.Minute
)

// Templates reads templates and their pools; package cache implements it.
type Templates interface {
	// CurrentTemplate returns a template and its revision from the API server.
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
}

// Made reads seeds and checkpoints; package cache implements it.
type Made interface {
	WarmCheckpoints(ctx context.Context, namespace string, template types.NamespacedName) ([]barchan.Checkpoint, error)
	Members(ctx context.Context, pool types.UID) ([]*agents.Sandbox, error)
	RestoringFrom(ctx context.Context, checkpoint types.NamespacedName) ([]agents.Sandbox, error)
}

// Objects combines all reads.
type Objects interface {
	Templates
	Made
}

// Config configures New. Fields are required unless documented otherwise.
type Config struct {
	Log *slog.Logger
	// Client reads and writes the API server directly.
	Client client.Client
	// Cache provides the watches, and Objects reads it.
	Cache   crcache.Cache
	Objects Objects
	// Events records Kubernetes events on templates; nil records none.
	Events events.EventRecorder
}

// New returns the controller of warm-ups. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if cfg.Log == nil || cfg.Client == nil || cfg.Cache == nil || cfg.Objects == nil {
		return nil, fmt.Errorf("warm-up controller: Log, Client, Cache and Objects are required: %w", errs.ErrInvalid)
	}
	cfg.Log = cfg.Log.With(telemetry.Component, "warmup-controller")
	r := &reconciler{Config: cfg, troubles: map[templateKey]*failureBackoff{}}
	return controllers.New(controllers.Work{
		Name: "warmup", Log: r.Log, Workers: workers, RetryFirst: retryFirst, RetryMost: retryMost, Reconciler: r, Sources: r.sources(cfg.Cache),
	})
}

// templateKey is a template and the namespace of its pools.
type templateKey struct {
	template  types.NamespacedName
	namespace string
}

type reconciler struct {
	Config

	mu       sync.Mutex
	troubles map[templateKey]*failureBackoff // an element belongs to its reconcile; +checklocks:mu
}

// failureBackoff is the backoff of one revision. It is not persisted: a new process retries once.
type failureBackoff struct {
	revision string
	failures int
	retryAt  time.Time
	seen     map[types.UID]bool // counted seeds and checkpoints
}

func (r *reconciler) trouble(at templateKey, revision string) *failureBackoff {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.troubles[at]
	if t == nil || t.revision != revision {
		t = &failureBackoff{revision: revision, seen: map[types.UID]bool{}}
		r.troubles[at] = t
	}
	return t
}

func (r *reconciler) forget(at templateKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.troubles, at)
}

// fail counts each failure once and sets the backoff.
func (t *failureBackoff) fail(of types.UID, now time.Time) (isNew bool) {
	if t.seen[of] {
		return false
	}
	t.seen[of] = true
	t.failures++
	t.retryAt = now.Add(min(firstPause<<min(t.failures-1, 20), longestPause))
	return true
}
