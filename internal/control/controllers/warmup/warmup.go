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
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

const (
	workers    = 4
	retryFirst = 200 * time.Millisecond
	retryMost  = time.Minute

	// firstPause and longestPause bound the pauses after warm-ups that failed.
	firstPause   = 5 * time.Second
	longestPause = 10 * time.Minute
	// startTime is how long a seed may take besides the warm-up itself.
	startTime = 10 * time.Minute
)

// Templates reads templates and their pools; package cache has it.
type Templates interface {
	// CurrentTemplate returns a template and its revision as the API server has them now.
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
}

// Made reads what warm-ups have led to; package cache has it.
type Made interface {
	WarmCheckpoints(ctx context.Context, namespace string, template types.NamespacedName) ([]barchan.Checkpoint, error)
	Members(ctx context.Context, pool types.UID) ([]agents.Sandbox, error)
	RestoringFrom(ctx context.Context, checkpoint types.NamespacedName) ([]agents.Sandbox, error)
}

// Objects is all that is read.
type Objects interface {
	Templates
	Made
}

// Config is what New needs; every field is required unless it says so.
type Config struct {
	Log *slog.Logger
	// Client asks the API server itself.
	Client client.Client
	// Cache is what is watched, and Objects reads it.
	Cache   crcache.Cache
	Objects Objects
	// Events records on templates what users should see; nil records nothing.
	Events events.EventRecorder
}

// New returns the controller of warm-ups. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if cfg.Log == nil || cfg.Client == nil || cfg.Cache == nil || cfg.Objects == nil {
		return nil, fmt.Errorf("warm-up controller: Log, Client, Cache and Objects are required: %w", errs.ErrInvalid)
	}
	r := &reconciler{
		log: cfg.Log.With("component", "warmup-controller"), client: cfg.Client, objects: cfg.Objects, events: cfg.Events,
		troubles: map[templateKey]*failureBackoff{},
	}
	return controllers.New(controllers.Work{
		Name: "warmup", Log: r.log, Workers: workers, RetryFirst: retryFirst, RetryMost: retryMost, Reconciler: r, Sources: r.sources(cfg.Cache),
	})
}

// templateKey is where the sandboxes of a template lie that are to be warm.
type templateKey struct {
	template  types.NamespacedName
	namespace string
}

type reconciler struct {
	log     *slog.Logger
	client  client.Client
	objects Objects
	events  events.EventRecorder

	mu       sync.Mutex
	troubles map[templateKey]*failureBackoff // each used by its own pass alone; +checklocks:mu
}

// failureBackoff is what the warm-ups of one revision have been through. It is lost with the process, which
// then tries once more.
type failureBackoff struct {
	revision string
	failures int
	retryAt  time.Time
	seen     map[types.UID]bool // the seeds and checkpoints whose failure is counted
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

// fail counts the failure of a seed or checkpoint once; the pause that follows it is set then.
func (t *failureBackoff) fail(of types.UID, now time.Time) (isNew bool) {
	if t.seen[of] {
		return false
	}
	t.seen[of] = true
	t.failures++
	t.retryAt = now.Add(min(firstPause<<min(t.failures-1, 20), longestPause))
	return true
}
