package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"reflect"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// ServerKinds returns what a server reads: all of our kinds, and Secrets without their values.
func ServerKinds() []client.Object {
	return append(ReplicaKinds(), &extensions.SandboxClaim{}, &barchan.TemplateRevision{}, &barchan.TemplateBuild{}, &barchan.Volume{}, &corev1.Secret{})
}

// ReplicaKinds returns what a replica reads.
func ReplicaKinds() []client.Object {
	return []client.Object{
		&agents.Sandbox{}, &extensions.SandboxTemplate{}, &extensions.SandboxWarmPool{}, &barchan.APIKey{}, &barchan.Checkpoint{}, &corev1.Namespace{},
	}
}

// ControllerKinds returns what the controllers of a cluster read: also the Pods of sandboxes, without what no controller of ours
// reads, their Services, and the NetworkPolicies and PodDisruptionBudgets that select them.
func ControllerKinds() []client.Object {
	return []client.Object{
		&agents.Sandbox{}, &extensions.SandboxTemplate{}, &extensions.SandboxWarmPool{}, &extensions.SandboxClaim{}, &barchan.TemplateRevision{}, &barchan.Checkpoint{}, &corev1.Namespace{},
		&corev1.Pod{}, &corev1.Service{}, &networkingv1.NetworkPolicy{}, &policyv1.PodDisruptionBudget{},
	}
}

// NodeKinds returns what a node in a process of its own runs and keeps, what names its images, and what has the quotas of volumes.
func NodeKinds() []client.Object {
	return []client.Object{&agents.Sandbox{}, &barchan.Checkpoint{}, &extensions.SandboxTemplate{}, &barchan.Volume{}, &corev1.Namespace{}}
}

// kind is a watched kind.
type kind struct {
	name   string
	synced <-chan struct{} // closed when it has been listed once
}

// watch makes the informers of all kinds, which notify the waits.
func (c *Cache) watch(ctx context.Context, held []client.Object) error {
	for _, o := range held {
		informer, err := c.informer(ctx, o)
		if err != nil {
			return err
		}
		what := reflect.TypeOf(o)
		notify := func(old, now client.Object) {
			if now == nil {
				now = old
			}
			c.waits.notify(awaited{kind: what, key: client.ObjectKeyFromObject(now)})
		}
		if _, err := handle(informer, notify); err != nil {
			return fmt.Errorf("watch %s: %w", nameOf(o), err)
		}
		c.kinds = append(c.kinds, kind{name: nameOf(o), synced: informer.HasSyncedChecker().Done()})
		c.stores[what] = newStore(informer)
	}
	return nil
}

// informer returns the informer of a kind, which may not be synced yet.
func (c *Cache) informer(ctx context.Context, o client.Object) (toolscache.SharedIndexInformer, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("watch %s: %w", nameOf(o), withKind(err))
	}
	informer, err := c.informers.GetInformer(ctx, o, crcache.BlockUntilSynced(false))
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", nameOf(o), err)
	}
	return informer.(toolscache.SharedIndexInformer), nil //nolint:forcetypeassert // as NewInformer makes it
}

// Watchable returns what an informer of an object's metadata is made for: the object itself if the cache holds its kind, whose watch is then
// shared, otherwise the metadata alone.
func (c *Cache) Watchable(o client.Object) client.Object {
	if c.stores[reflect.TypeOf(o)] != nil {
		return o
	}
	m := &metav1.PartialObjectMetadata{}
	if kind, err := c.live.GroupVersionKindFor(o); err == nil { // an unknown kind fails as it is watched
		m.SetGroupVersionKind(kind)
	}
	return m
}

// handle calls do for each object and change; old is nil for a new object, now for a deleted one.
func handle[T client.Object](informer toolscache.SharedIndexInformer, do func(old, now T)) (toolscache.ResourceEventHandlerRegistration, error) {
	as := func(o any) T {
		if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
			o = gone.Obj
		}
		x, _ := o.(T)
		return x
	}
	var none T
	return informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { do(none, as(o)) },
		UpdateFunc: func(old, o any) { do(as(old), as(o)) },
		DeleteFunc: func(o any) { do(as(o), none) },
	})
}

func informerOf[T client.Object](ctx context.Context, c *Cache) (toolscache.SharedIndexInformer, error) {
	if c.stores[reflect.TypeFor[T]()] == nil {
		return nil, fmt.Errorf("watch: %w", notHeld[T]())
	}
	return c.informer(ctx, newOf[T]())
}

// On calls do for every object of a kind and then for each change, one after the other, until
// the cache stops. old is nil for a new object, now for a deleted one. Both are shared: do must
// neither change them nor block. synced is closed once do has been called for all objects of
// the first list.
func On[T client.Object](ctx context.Context, c *Cache, do func(old, now T)) (synced <-chan struct{}, err error) {
	informer, err := informerOf[T](ctx, c)
	if err != nil {
		return nil, err
	}
	handler, err := handle(informer, do)
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", nameOf(newOf[T]()), err)
	}
	return handler.HasSyncedChecker().Done(), nil
}

// Passed returns the version up to which the cache holds all changes of a kind, by events and by
// the watch's bookmarks. It is empty before the first list. On may not have called do yet for
// the last changes.
func Passed[T client.Object](ctx context.Context, c *Cache) (version string, err error) {
	informer, err := informerOf[T](ctx, c)
	if err != nil {
		return "", err
	}
	return informer.GetStore().LastStoreSyncResourceVersion(), nil
}

// WaitSynced blocks until every kind has been listed once. If ctx ends first, or the cache stops,
// the error has the kinds that were not listed, the API server's last error and its errs kind
// (errs.ErrForbidden, errs.ErrUnavailable).
func (c *Cache) WaitSynced(ctx context.Context) error {
	for _, k := range c.kinds {
		if closed(k.synced) {
			continue
		}
		select {
		case <-k.synced:
		case <-c.waits.stopped:
			return c.unsynced(ErrStopped)
		case <-ctx.Done():
			return c.unsynced(ctx.Err())
		}
	}
	return nil
}

// unsynced returns why not every kind has been listed.
func (c *Cache) unsynced(why error) error {
	var missing []string
	var all []error
	c.errors.mu.Lock()
	defer c.errors.mu.Unlock()
	for _, k := range c.kinds {
		if closed(k.synced) {
			continue
		}
		missing = append(missing, k.name)
		if err := c.errors.last[k.name]; err != nil {
			all = append(all, fmt.Errorf("list %s: %w", k.name, withKind(err)))
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if err := c.errors.reach; len(all) == 0 && err != nil {
		all = append(all, withKind(err))
	}
	all = append(all, why)
	if errs.Kind(errors.Join(all...)) == nil {
		all = append(all, errs.ErrUnavailable)
	}
	return fmt.Errorf("not listed yet: %s: %w", strings.Join(missing, ", "), errors.Join(all...))
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// watchErrors holds the last error of each kind's list or watch, and logs them.
type watchErrors struct {
	log *slog.Logger

	mu    sync.Mutex
	last  map[string]error // by kind; +checklocks:mu
	reach error            // of the last request, if it had no response; +checklocks:mu
}

// note is called when a list fails or a watch ends; the informer retries.
func (t *watchErrors) note(ctx context.Context, r *toolscache.Reflector, err error) {
	if errors.Is(err, io.EOF) || ctx.Err() != nil {
		return
	}
	what := r.TypeDescription()
	what = what[strings.LastIndexByte(what, '.')+1:]
	t.mu.Lock()
	t.last[what] = err
	t.mu.Unlock()
	level := slog.LevelWarn
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || errors.Is(err, io.ErrUnexpectedEOF) {
		level = slog.LevelDebug
	}
	t.log.Log(ctx, level, "list or watch failed", "kind", what, "error", err)
}

// listen records requests without a response, since informers do not report refused connections.
func (t *watchErrors) listen(next http.RoundTripper) http.RoundTripper {
	return roundTrip(func(req *http.Request) (*http.Response, error) {
		resp, err := next.RoundTrip(req)
		if req.Context().Err() != nil {
			return resp, err
		}
		t.mu.Lock()
		isNew := err != nil && t.reach == nil
		t.reach = err
		t.mu.Unlock()
		if isNew {
			t.log.WarnContext(req.Context(), "API server not reached, retrying", "error", err)
		}
		return resp, err
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }
