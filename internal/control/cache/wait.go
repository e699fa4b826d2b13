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

// awaited names one object.
type awaited struct {
	kind reflect.Type
	key  types.NamespacedName
}

// waits knows who waits for which object.
type notifier struct {
	mu sync.Mutex
	// +checklocks:mu
	bells map[awaited]map[chan struct{}]struct{}
	// stopped is closed once, when the cache stops.
	stopped chan struct{}
	once    sync.Once
}

func newWaits() *notifier {
	return &notifier{bells: map[awaited]map[chan struct{}]struct{}{}, stopped: make(chan struct{})}
}

func (w *notifier) stop() { w.once.Do(func() { close(w.stopped) }) }

// join returns a channel that holds a token after each change of the object, and its undo.
func (w *notifier) join(what awaited) (<-chan struct{}, func()) {
	bell := make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.bells[what] == nil {
		w.bells[what] = map[chan struct{}]struct{}{}
	}
	w.bells[what][bell] = struct{}{}
	return bell, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.bells[what], bell)
		if len(w.bells[what]) == 0 {
			delete(w.bells, what)
		}
	}
}

func (w *notifier) notify(what awaited) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ringLocked(what)
}

// ringLocked wakes who waits for an object.
// +checklocks:w.mu
func (w *notifier) ringLocked(what awaited) {
	for bell := range w.bells[what] {
		select {
		case bell <- struct{}{}:
		default: // a token is there already, and its reader will see this change too
		}
	}
}

// ringAll wakes all who wait for an object of a kind: each looks for itself what has become of it.
func (w *notifier) ringAll(kind reflect.Type) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for what := range w.bells {
		if what.kind == kind {
			w.ringLocked(what)
		}
	}
}

// Wait blocks until done says so or returns an error, which Wait returns as it is. T is any
// kind that the cache holds. done gets a copy of the object as the cache holds it, at the start
// and after each change; it gets nil once the object is gone, or if there is none: what the
// cache does not hold yet is asked of the API server, and asked again after each new list, which
// an object that was deleted meanwhile is not in. ctx bounds the wait: its end is an
// errs.ErrTimeout. The object returned is the caller's own, and the one that satisfied done.
func Wait[T client.Object](ctx context.Context, c *Cache, key types.NamespacedName, done func(T) (bool, error)) (T, error) {
	var none T
	if !holds[T]() {
		return none, fmt.Errorf("wait for %T %s: the cache does not hold that kind: %w", none, key, errs.ErrInvalid)
	}
	bell, leave := c.waits.join(awaited{kind: reflect.TypeFor[T](), key: key})
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
			if seen, err = missed[T](ctx, c, key); err != nil {
				return none, err
			}
		}
		if seen {
			if ok, err := done(now); ok || err != nil {
				return now, err
			}
		}
		select {
		case <-bell:
		case <-c.waits.stopped:
			return none, ErrStopped
		case <-ctx.Done():
			return none, fmt.Errorf("wait for %s %s: %w: %w", nameOf(newOf[T]()), name(key), errs.ErrTimeout, ctx.Err())
		}
	}
}

// missed tells an object that is gone from one that the cache does not hold yet.
func missed[T client.Object](ctx context.Context, c *Cache, key types.NamespacedName) (bool, error) {
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

func holds[T client.Object]() bool {
	for _, o := range kinds() {
		if _, ok := o.(T); ok {
			return reflect.TypeFor[T]() == reflect.TypeOf(o)
		}
	}
	return false
}
