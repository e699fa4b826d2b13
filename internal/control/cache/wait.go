package cache

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// awaited identifies one object.
type awaited struct {
	kind reflect.Type
	key  types.NamespacedName
}

// notifier notifies the callers that wait for an object.
type notifier struct {
	mu sync.Mutex
	// +checklocks:mu
	waiters map[awaited]map[chan struct{}]struct{}
	stopped chan struct{} // closed when the cache stops
	once    sync.Once
}

func newNotifier() *notifier {
	return &notifier{waiters: map[awaited]map[chan struct{}]struct{}{}, stopped: make(chan struct{})}
}

func (w *notifier) stop() { w.once.Do(func() { close(w.stopped) }) }

// join returns a channel that holds a token after each change of the object, and its undo.
func (w *notifier) join(what awaited) (<-chan struct{}, func()) {
	changed := make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiters[what] == nil {
		w.waiters[what] = map[chan struct{}]struct{}{}
	}
	w.waiters[what][changed] = struct{}{}
	return changed, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.waiters[what], changed)
		if len(w.waiters[what]) == 0 {
			delete(w.waiters, what)
		}
	}
}

func (w *notifier) notify(what awaited) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.notifyLocked(what)
}

// notifyLocked notifies the callers that wait for an object.
// +checklocks:w.mu
func (w *notifier) notifyLocked(what awaited) {
	for changed := range w.waiters[what] {
		select {
		case changed <- struct{}{}:
		default: // its reader will also see this change
		}
	}
}

// notifyAll notifies all callers that wait for an object of a kind; each reads its object again.
func (w *notifier) notifyAll(kind reflect.Type) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for what := range w.waiters {
		if what.kind == kind {
			w.notifyLocked(what)
		}
	}
}

// Wait blocks until done returns true or an error, which Wait returns. T is any kind that the cache
// holds. done gets a copy of the cached object at the start and after each change; nil if there
// is none. An object that the cache does not hold yet is read from the API server, and again
// after each new list, which lacks an object that was deleted meanwhile. If ctx ends, Wait
// returns an errs.ErrTimeout. The result is the caller's own copy that satisfied done.
func Wait[T client.Object](ctx context.Context, c *Cache, key types.NamespacedName, done func(T) (bool, error)) (T, error) {
	var none T
	if c.stores[reflect.TypeFor[T]()] == nil {
		return none, fmt.Errorf("wait for %s: %w", key, notHeld[T]())
	}
	changed, leave := c.waits.join(awaited{kind: reflect.TypeFor[T](), key: key})
	defer leave()
	seen := false
	for {
		now, err := read(ctx, c.memory(), key, newOf[T]())
		switch {
		case err == nil:
			seen = true
		case !errors.Is(err, errs.ErrNotFound):
			return none, err
		case !seen:
			if seen, err = isGone[T](ctx, c, key); err != nil {
				return none, err
			}
		}
		if seen {
			if ok, err := done(now); ok || err != nil {
				return now, err
			}
		}
		select {
		case <-changed:
		case <-c.waits.stopped:
			return none, ErrStopped
		case <-ctx.Done():
			return none, fmt.Errorf("wait for %s %s: %w: %w", nameOf(newOf[T]()), name(key), errs.ErrTimeout, ctx.Err())
		}
	}
}

// isGone distinguishes an object that is gone from one that the cache does not hold yet.
func isGone[T client.Object](ctx context.Context, c *Cache, key types.NamespacedName) (bool, error) {
	_, err := read(ctx, c.live, key, newOf[T]())
	if errors.Is(err, errs.ErrNotFound) {
		return true, nil
	}
	return false, err
}

// WaitSandbox is [Wait] for a sandbox.
func (c *Cache) WaitSandbox(ctx context.Context, key types.NamespacedName, done func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error) {
	return Wait(ctx, c, key, done)
}

// WaitCheckpoint is [Wait] for a checkpoint.
func (c *Cache) WaitCheckpoint(ctx context.Context, key types.NamespacedName, done func(*barchan.Checkpoint) (bool, error)) (*barchan.Checkpoint, error) {
	return Wait(ctx, c, key, done)
}

// newOf returns an empty object of a kind.
func newOf[T client.Object]() T {
	o, _ := reflect.TypeAssert[T](reflect.New(reflect.TypeFor[T]().Elem()))
	return o
}
