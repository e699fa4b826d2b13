// Package cache reads objects from memory, typed and indexed, and waits for their changes by
// events. It never writes or polls.
//
// A read returns the caller's own copy. An errs.ErrNotFound means that the cache does not hold the
// object; before a caller stops or deletes anything for it, it reads the API server ([Cache.Live]).
//
// Locks: the mutexes of notifier, fresh, lookups, continuity and watchErrors are never held together.
package cache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// ErrStopped is returned by the waits of a cache that stops.
var ErrStopped = fmt.Errorf("the cache has stopped: %w", errs.ErrUnavailable)

// Config configures a cache.
type Config struct {
	// REST reaches the API server. Required.
	REST *rest.Config
	// Log receives the informers' entries. Their library has one logger for the process: the
	// first cache sets it. Nil: discarded.
	Log *slog.Logger
	// Kinds are those that the cache holds: what the process reads, and no more. Default: [ServerKinds].
	Kinds []client.Object
	// Trim leaves out managed fields, of all objects. Every write of an object that was read from the cache must then go through the
	// request handling of an API server, which takes none in an update for unchanged.
	Trim bool
	// Source has how informers list and watch the kinds in this process. Its objects are shared: they are not changed, but for what an object
	// itself has. Nil: by REST. Metadata alone is by REST in any case.
	Source func(client.Object) toolscache.ListerWatcher
}

// Cache holds all objects of some kinds.
type Cache struct {
	informers crcache.Cache
	live      client.Client
	waits     *notifier
	fresh     *fresh
	lookups   *lookups
	sandboxes *continuity
	kinds     []kind                  // set by New
	stores    map[reflect.Type]*store // by kind; set by New
	errors    *watchErrors
	running   atomic.Bool
}

// New returns a cache that is empty until Run. It sends nothing to the API server.
func New(ctx context.Context, cfg Config) (*Cache, error) {
	if cfg.REST == nil {
		return nil, fmt.Errorf("cache: REST config is required: %w", errs.ErrInvalid)
	}
	scheme, err := NewScheme()
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("make the object cache: %w", withKind(err))
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	routeLog(cfg.Log)
	failures := &watchErrors{log: cfg.Log.With(telemetry.Component, "cache"), last: map[string]error{}}
	if cfg.Kinds == nil {
		cfg.Kinds = ServerKinds()
	}
	mapper := fixedMapper(scheme)
	watched := rest.CopyConfig(cfg.REST)
	watched.Wrap(failures.listen)
	waits, sandboxes := newNotifier(), &continuity{}
	informers, err := crcache.New(watched, crcache.Options{
		ByObject: map[client.Object]crcache.ByObject{
			&corev1.Pod{}: podSelection(), &corev1.Service{}: serviceSelection(), &networkingv1.NetworkPolicy{}: ourSelection(), &policyv1.PodDisruptionBudget{}: ourSelection(),
		},
		DefaultTransform: newTransform(cfg.Trim),
		Scheme:           scheme, Mapper: mapper, ReaderFailOnMissingInformer: true, DefaultWatchErrorHandler: failures.note,
		NewInformer: func(from toolscache.ListerWatcher, o runtime.Object, resync time.Duration, by toolscache.Indexers) toolscache.SharedIndexInformer {
			if x, ok := o.(client.Object); ok && cfg.Source != nil && !isMetadata(x) {
				from = cfg.Source(x)
			}
			r := &relisting{ListerWatcher: from, relisted: func() { waits.notifyAll(reflect.TypeOf(o)) }}
			if _, is := o.(*agents.Sandbox); is {
				r.watches = sandboxes
			}
			return toolscache.NewSharedIndexInformer(r, o, resync, by)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("make the object cache: %w", err)
	}
	live, err := client.New(cfg.REST, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("make the API client: %w", err)
	}
	c := &Cache{informers: informers, live: live, waits: waits, errors: failures, sandboxes: sandboxes, stores: map[reflect.Type]*store{}}
	c.fresh = newFresh(func(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, error) {
		return read(ctx, live, key, &extensions.SandboxTemplate{})
	})
	c.lookups = newLookups(c.names)
	if err := c.watch(ctx, cfg.Kinds); err != nil {
		return nil, err
	}
	return c, nil
}

var routeOnce sync.Once

func routeLog(log *slog.Logger) {
	routeOnce.Do(func() { crlog.SetLogger(logr.FromSlogHandler(log.With("component", "cache").Handler())) })
}

// Run fills the cache and updates it until ctx is done; every wait then returns [ErrStopped].
// It runs once. While the API server cannot be reached or refuses, Run retries, and
// [Cache.WaitSynced] returns the error.
func (c *Cache) Run(ctx context.Context) error {
	if c.running.Swap(true) {
		return fmt.Errorf("run the object cache: it runs once: %w", errs.ErrConflict)
	}
	defer c.fresh.stop()
	defer c.waits.stop()
	defer context.AfterFunc(ctx, c.waits.stop)()
	if err := c.informers.Start(ctx); err != nil {
		return fmt.Errorf("run the object cache: %w", err)
	}
	return nil
}

// Live returns a client of the API server: for writes, and for reads before a caller stops or
// deletes anything.
func (c *Cache) Live() client.Client { return c.live }

// Informers returns the informers that controllers watch.
func (c *Cache) Informers() crcache.Cache { return c.informers }

// Sandbox returns one sandbox by name.
func (c *Cache) Sandbox(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error) {
	return read(ctx, c.memory(), key, &agents.Sandbox{})
}

// SandboxByID returns the sandbox that has the ID.
func (c *Cache) SandboxByID(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error) {
	found, err := shared[*agents.Sandbox](ctx, c, indexSandboxID, string(id))
	if err != nil {
		return nil, fmt.Errorf("find sandbox %s: %w", id, err)
	}
	return first(found, "sandbox "+string(id))
}

// Sandboxes returns the sandboxes of a namespace, or of all if it is empty; spare members of
// pools are among them. The cache shares them: the caller must not change them.
func (c *Cache) Sandboxes(ctx context.Context, namespace string) ([]*agents.Sandbox, error) {
	return shared[*agents.Sandbox](ctx, c, toolscache.NamespaceIndex, namespace)
}

// Members returns the unclaimed members of a pool, of any revision and in any state. The cache shares them: the caller must not
// change them.
func (c *Cache) Members(ctx context.Context, pool types.UID) ([]*agents.Sandbox, error) {
	return shared[*agents.Sandbox](ctx, c, indexMember, string(pool))
}

// ClaimedFrom returns the sandboxes that were claimed through a pool: its former members, and those
// started cold because it had none. The cache shares them: the caller must not change them.
func (c *Cache) ClaimedFrom(ctx context.Context, pool types.UID) ([]*agents.Sandbox, error) {
	return shared[*agents.Sandbox](ctx, c, indexOrigin, string(pool))
}

// Owned returns the sandboxes that an object controls by its owner reference.
func (c *Cache) Owned(ctx context.Context, owner types.UID) ([]*agents.Sandbox, error) {
	return clones(shared[*agents.Sandbox](ctx, c, indexOwner, string(owner)))
}

// SandboxesByIdempotency returns the sandboxes of a namespace that were made for a request with
// this hash of its key.
func (c *Cache) SandboxesByIdempotency(ctx context.Context, namespace, hash string) ([]*agents.Sandbox, error) {
	found, err := shared[*agents.Sandbox](ctx, c, indexIdempotency, hash)
	return clones(in(namespace, found), err)
}

// Referring returns the sandboxes of a namespace that refer to a Secret or ConfigMap of it. The cache shares them: the
// caller must not change them.
func (c *Cache) Referring(ctx context.Context, kind string, key types.NamespacedName) ([]*agents.Sandbox, error) {
	found, err := shared[*agents.Sandbox](ctx, c, indexReference, kind+"/"+key.Name)
	return in(key.Namespace, found), err
}

// Template returns one template by name.
func (c *Cache) Template(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, error) {
	return read(ctx, c.memory(), key, &extensions.SandboxTemplate{})
}

// Templates returns the templates of a namespace, or of all if it is empty.
func (c *Cache) Templates(ctx context.Context, namespace string) ([]extensions.SandboxTemplate, error) {
	return copies(shared[*extensions.SandboxTemplate](ctx, c, toolscache.NamespaceIndex, namespace))
}

// TemplatesNamed returns the objects of a namespace whose template has a name, an alias or an ID.
func (c *Cache) TemplatesNamed(ctx context.Context, namespace, name string) ([]extensions.SandboxTemplate, error) {
	found, err := shared[*extensions.SandboxTemplate](ctx, c, indexTemplateName, name)
	return copies(in(namespace, found), err)
}

// CurrentTemplates reads the templates of a namespace from the API server.
func (c *Cache) CurrentTemplates(ctx context.Context, namespace string) ([]extensions.SandboxTemplate, error) {
	var list extensions.SandboxTemplateList
	if err := c.Live().List(ctx, &list, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	return list.Items, nil
}

// TemplateRevisions returns the history of a template, in no order.
func (c *Cache) TemplateRevisions(ctx context.Context, template types.NamespacedName) ([]barchan.TemplateRevision, error) {
	found, err := shared[*barchan.TemplateRevision](ctx, c, indexRevisionOf, template.Name)
	return copies(in(template.Namespace, found), err)
}

// TemplateBuilds returns the builds of a namespace, or of all if it is empty.
func (c *Cache) TemplateBuilds(ctx context.Context, namespace string) ([]barchan.TemplateBuild, error) {
	return copies(shared[*barchan.TemplateBuild](ctx, c, toolscache.NamespaceIndex, namespace))
}

// Pool returns one warm pool by name.
func (c *Cache) Pool(ctx context.Context, key types.NamespacedName) (*extensions.SandboxWarmPool, error) {
	return read(ctx, c.memory(), key, &extensions.SandboxWarmPool{})
}

// PoolsOf returns the warm pools of a template in a namespace, or in all if that is empty.
func (c *Cache) PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error) {
	found, err := shared[*extensions.SandboxWarmPool](ctx, c, indexPoolTemplate, template.String())
	return copies(in(namespace, found), err)
}

// Claim returns one claim by name.
func (c *Cache) Claim(ctx context.Context, key types.NamespacedName) (*extensions.SandboxClaim, error) {
	return read(ctx, c.memory(), key, &extensions.SandboxClaim{})
}

// ClaimsOn returns the claims on a pool. The cache shares them: the caller must not change them.
func (c *Cache) ClaimsOn(ctx context.Context, pool types.NamespacedName) ([]*extensions.SandboxClaim, error) {
	found, err := shared[*extensions.SandboxClaim](ctx, c, indexClaimPool, pool.Name)
	return in(pool.Namespace, found), err
}

// APIKeyByHash returns the key whose SHA-256, in hex, is hash.
func (c *Cache) APIKeyByHash(ctx context.Context, hash string) (*barchan.APIKey, error) {
	found, err := shared[*barchan.APIKey](ctx, c, indexKeyHash, hash)
	if err != nil {
		return nil, fmt.Errorf("find API key: %w", err)
	}
	return first(found, "API key")
}

// APIKeysBySSHKey returns the keys that hold the SSH key with a fingerprint. The cache shares them: the caller must not change them.
func (c *Cache) APIKeysBySSHKey(ctx context.Context, fingerprint string) ([]*barchan.APIKey, error) {
	return shared[*barchan.APIKey](ctx, c, indexSSHKey, fingerprint)
}

// APIKeys returns the keys of a namespace, or of all if it is empty.
func (c *Cache) APIKeys(ctx context.Context, namespace string) ([]barchan.APIKey, error) {
	return copies(shared[*barchan.APIKey](ctx, c, toolscache.NamespaceIndex, namespace))
}

// getter reads single objects.
type getter interface {
	Get(ctx context.Context, key types.NamespacedName, into client.Object, opts ...client.GetOption) error
}

// read fills into with one object, of the cache or of the API server.
func read[T client.Object](ctx context.Context, from getter, key types.NamespacedName, into T) (T, error) {
	if err := from.Get(ctx, key, into); err != nil {
		var none T
		if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
			return none, fmt.Errorf("%s %s: %w", nameOf(into), name(key), errs.ErrNotFound)
		}
		if ended := ctx.Err(); ended != nil && !errors.Is(err, ended) {
			err = fmt.Errorf("%w: %w", ended, err) // the server may have been first to notice
		}
		return none, fmt.Errorf("read %s %s: %w", nameOf(into), name(key), withKind(err))
	}
	return into, nil
}

// memory reads from the cache once every kind has been listed.
type memory struct{ c *Cache }

func (c *Cache) memory() memory { return memory{c} }

func (m memory) Get(ctx context.Context, key types.NamespacedName, into client.Object, opts ...client.GetOption) error {
	if err := m.c.ready(ctx); err != nil {
		return err
	}
	return m.c.informers.Get(ctx, key, into, opts...)
}

// ready returns once the cache can answer.
func (c *Cache) ready(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return withKind(err)
	}
	if !c.running.Load() {
		return fmt.Errorf("the cache does not run yet: %w", errs.ErrUnavailable)
	}
	return c.WaitSynced(ctx)
}

// name formats a key; that of a cluster-scoped kind has no namespace.
func name(key types.NamespacedName) string {
	return strings.TrimPrefix(key.String(), string(types.Separator))
}

// nameOf is the kind of an object.
func nameOf(o client.Object) string { return reflect.TypeOf(o).Elem().Name() }

// withKind wraps the API server's errors with their errs kind.
func withKind(err error) error {
	kind := error(nil)
	switch {
	case errs.Kind(err) != nil:
	case apierrors.IsForbidden(err):
		kind = errs.ErrForbidden
	case apierrors.IsUnauthorized(err):
		kind = errs.ErrUnauthenticated
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled), apierrors.IsTimeout(err):
		kind = errs.ErrTimeout
	case apierrors.ReasonForError(err) == metav1.StatusReasonUnknown, apierrors.IsTooManyRequests(err),
		apierrors.IsServiceUnavailable(err), apierrors.IsServerTimeout(err), apierrors.IsInternalError(err):
		kind = errs.ErrUnavailable
	}
	if kind == nil {
		return err
	}
	return fmt.Errorf("%w: %w", kind, err)
}

// Namespace returns one namespace by name.
func (c *Cache) Namespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	return read(ctx, c.memory(), types.NamespacedName{Name: name}, &corev1.Namespace{})
}

// first returns a copy of the first object.
func first[T any, P copied[T]](found []P, what string) (*T, error) {
	if len(found) == 0 {
		return nil, fmt.Errorf("%s: %w", what, errs.ErrNotFound)
	}
	return found[0].DeepCopy(), nil
}
