package templatebuild

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/layers"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

const (
	// workers is how many builds run at once, perNamespace how many of one namespace, by the rule of controllers.Fits.
	workers      = 4
	perNamespace = 2
	// waitSlot is how long a build waits before it looks again whether it may run.
	waitSlot   = time.Second
	retryFirst = time.Second
	retryMost  = time.Minute

	// buildTimeout bounds a build.
	buildTimeout = 6 * time.Hour
	// maxAttempts bounds how often a build is tried after a fault that is none of its steps', imageAttempts after an image could not be
	// pulled: its name is mostly wrong.
	maxAttempts   = 8
	imageAttempts = 3
)

// Objects reads what builds depend on; package cache implements it.
type Objects interface {
	layers.Objects
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
	Checkpoints(ctx context.Context, namespace string) ([]barchan.Checkpoint, error)
	Templates(ctx context.Context, namespace string) ([]extensions.SandboxTemplate, error)
	TemplateBuilds(ctx context.Context, namespace string) ([]barchan.TemplateBuild, error)
}

// Config configures New. Fields are required unless documented otherwise.
type Config struct {
	Log *slog.Logger
	// Client reads and writes the API server directly.
	Client client.Client
	// Cache provides the watches, and Objects reads it.
	Cache   crcache.Cache
	Objects Objects
	Agents  layers.Agents
	Quota   *quota.Quotas
	// Store has the uploaded files and the logs.
	Store *builds.Store
	// PublicNamespace has the templates that builds of all namespaces may start from, if they are public.
	PublicNamespace string
	// ImageDigest returns the digest of an image for a namespace, with the credentials of Secrets of it. It pulls the image if it is missing. Nil: builds know images by name alone, and
	// take kept layers of an image that has changed.
	ImageDigest func(ctx context.Context, namespace, ref string, secrets []string) (string, error)
	// Events records Kubernetes events on builds; nil records none.
	Events events.EventRecorder
}

// New returns the controller of template builds. Its Start blocks until ctx is done; builds that run then go on in the next process.
func New(cfg Config) (controller.Controller, error) {
	if cfg.Log == nil || cfg.Client == nil || cfg.Cache == nil || cfg.Objects == nil || cfg.Agents == nil || cfg.Quota == nil || cfg.Store == nil || cfg.PublicNamespace == "" {
		return nil, fmt.Errorf("template build controller: Log, Client, Cache, Objects, Agents, Quota, Store and PublicNamespace are required: %w", errs.ErrInvalid)
	}
	cfg.Log = cfg.Log.With(telemetry.Component, "template-build-controller")
	runner, err := layers.New(layers.Config{Log: cfg.Log, Client: cfg.Client, Objects: cfg.Objects, Agents: cfg.Agents, Quota: cfg.Quota, Store: cfg.Store})
	if err != nil {
		return nil, err
	}
	r := &reconciler{Config: cfg, layers: runner, running: map[types.UID]*running{}, attempts: map[types.UID]int{}}
	return controllers.New(controllers.Work{
		Name: "template-build", Log: r.Log, Workers: workers + controllers.Reserve, RetryFirst: retryFirst, RetryMost: retryMost, Reconciler: r, Sources: r.sources(cfg.Cache),
	})
}

type reconciler struct {
	Config
	layers *layers.Runner

	mu       sync.Mutex
	running  map[types.UID]*running // +checklocks:mu
	attempts map[types.UID]int      // of builds that faults have interrupted; +checklocks:mu
}

// running is a build that runs.
type running struct {
	namespace string
	cancel    context.CancelCauseFunc
}

// errCanceled ends a build whose object is deleted.
var errCanceled = errors.New("the build was deleted")

// sources returns the watches. A deletion ends a running build at once: its reconcile would wait for it.
func (r *reconciler) sources(from crcache.Cache) []source.Source {
	return []source.Source{
		controllers.Watch(from, &barchan.TemplateBuild{}, func(_ context.Context, old, now *barchan.TemplateBuild, q controllers.Queue) {
			b := cmp.Or(now, old)
			if now == nil || now.DeletionTimestamp != nil {
				r.cancel(b.UID)
			}
			if old == nil || now == nil || old.Generation != now.Generation || now.DeletionTimestamp != nil {
				q.Add(controllers.RequestFor(b))
			}
		}),
	}
}

func (r *reconciler) cancel(uid types.UID) {
	r.Store.DropSecrets(uid)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.attempts, uid)
	if b := r.running[uid]; b != nil {
		b.cancel(errCanceled)
	}
}

// begin records that a build runs. It returns false while too many of its namespace do.
func (r *reconciler) begin(b *barchan.TemplateBuild, cancel context.CancelCauseFunc) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, other := range r.running {
		if other.namespace == b.Namespace {
			n++
		}
	}
	if !controllers.Fits(n, len(r.running), workers, perNamespace) {
		return false
	}
	r.running[b.UID] = &running{b.Namespace, cancel}
	return true
}

func (r *reconciler) end(uid types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.running, uid)
}

// attempt counts a failed attempt, and reports whether there may be another.
func (r *reconciler) attempt(uid types.UID, cause error) bool {
	limit := maxAttempts
	if errors.Is(cause, sandbox.ErrImage) {
		limit = imageAttempts
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.attempts[uid]++
	return r.attempts[uid] < limit
}

// tried reports whether this process has tried a build before.
func (r *reconciler) tried(uid types.UID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.attempts[uid] > 0
}

// Reconcile runs a build to its end.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	b := &barchan.TemplateBuild{}
	if err := r.Client.Get(ctx, req.NamespacedName, b); err != nil {
		if apierrors.IsNotFound(err) {
			return reconcile.Result{}, r.prune(ctx, req.Namespace)
		}
		return reconcile.Result{}, fmt.Errorf("read build %s: %w", req, err)
	}
	if b.Ended() {
		r.Store.DropSecrets(b.UID)
	}
	switch {
	case b.DeletionTimestamp != nil || b.Spec.From == nil:
		return reconcile.Result{}, nil
	case b.Ended():
		return reconcile.Result{}, r.dropCredentials(ctx, b)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if !r.begin(b, cancel) {
		return reconcile.Result{RequeueAfter: waitSlot}, nil
	}
	defer r.end(b.UID)
	ctx, stop := context.WithTimeout(ctx, buildTimeout)
	defer stop()
	err := r.run(ctx, b)
	switch {
	case errors.Is(context.Cause(ctx), errCanceled):
		return reconcile.Result{}, nil
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return reconcile.Result{RequeueAfter: retryFirst}, nil
	case err != nil:
		return reconcile.Result{}, fmt.Errorf("build %s: %w", req, err)
	}
	r.Store.DropSecrets(b.UID)
	return reconcile.Result{}, errors.Join(r.dropCredentials(ctx, b), r.prune(ctx, req.Namespace))
}
