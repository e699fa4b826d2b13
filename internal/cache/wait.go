package cache

import (
	"context"
	"errors"
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/errs"
)

// waits knows who waits for which sandbox.
type waits struct {
	mu sync.Mutex
	// +checklocks:mu
	byKey map[types.NamespacedName]map[chan struct{}]struct{}
	// stopped is closed once, when the cache stops.
	stopped chan struct{}
	once    sync.Once
}

func newWaits() *waits {
	return &waits{byKey: map[types.NamespacedName]map[chan struct{}]struct{}{}, stopped: make(chan struct{})}
}

func (w *waits) stop() { w.once.Do(func() { close(w.stopped) }) }

// join returns a channel that holds a token after each change of the object, and its undo.
func (w *waits) join(key types.NamespacedName) (<-chan struct{}, func()) {
	bell := make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.byKey[key] == nil {
		w.byKey[key] = map[chan struct{}]struct{}{}
	}
	w.byKey[key][bell] = struct{}{}
	return bell, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.byKey[key], bell)
		if len(w.byKey[key]) == 0 {
			delete(w.byKey, key)
		}
	}
}

func (w *waits) ring(key types.NamespacedName) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for bell := range w.byKey[key] {
		select {
		case bell <- struct{}{}:
		default: // a token is there already, and its reader will see this change too
		}
	}
}

func (c *Cache) wakeOn(ctx context.Context, obj client.Object) error {
	informer, err := c.informers.GetInformer(ctx, obj)
	if err != nil {
		return fmt.Errorf("watch %T: %w", obj, err)
	}
	ring := func(o any) {
		if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
			o = gone.Obj
		}
		if x, ok := o.(client.Object); ok {
			c.waits.ring(client.ObjectKeyFromObject(x))
		}
	}
	_, err = informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc: ring, UpdateFunc: func(_, o any) { ring(o) }, DeleteFunc: ring,
	})
	if err != nil {
		return fmt.Errorf("watch %T: %w", obj, err)
	}
	return nil
}

// WaitSandbox blocks until done says so or returns an error, which WaitSandbox returns as it
// is. done gets a copy of the sandbox as the cache holds it, at the start and after each
// change; it gets nil once the sandbox is gone. ctx bounds the wait: its end is an
// errs.ErrTimeout. The sandbox returned is the one that satisfied done.
func (c *Cache) WaitSandbox(ctx context.Context, key types.NamespacedName, done func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error) {
	bell, leave := c.waits.join(key)
	defer leave()
	seen := false
	for {
		s, err := c.Sandbox(ctx, key)
		switch {
		case err == nil:
			seen = true
		case !errors.Is(err, errs.ErrNotFound):
			return nil, err
		case !seen:
			if seen, err = c.missed(ctx, key); err != nil {
				return nil, err
			}
		}
		if seen {
			if ok, err := done(s); ok || err != nil {
				return s, err
			}
		}
		select {
		case <-bell:
		case <-c.waits.stopped:
			return nil, ErrStopped
		case <-ctx.Done():
			return nil, fmt.Errorf("wait for sandbox %s: %w: %w", key, errs.ErrTimeout, ctx.Err())
		}
	}
}

// missed tells a sandbox that is gone from one that the cache does not hold yet.
func (c *Cache) missed(ctx context.Context, key types.NamespacedName) (bool, error) {
	err := c.live.Get(ctx, key, &agents.Sandbox{})
	if err == nil {
		return false, nil
	}
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	return false, fmt.Errorf("read sandbox %s: %w", key, err)
}

// SandboxEvent tells one change. New is nil when the sandbox is gone, Old when it is new here.
type SandboxEvent struct{ Old, New *agents.Sandbox }

// OnSandbox calls do for every sandbox and then for each change, one after the other, until
// the cache stops. Both objects are shared: do must not change them, and must not block.
// The function returned reports whether do has been called for all that the first list held.
func (c *Cache) OnSandbox(ctx context.Context, do func(SandboxEvent)) (synced func() bool, err error) {
	informer, err := c.informers.GetInformer(ctx, &agents.Sandbox{})
	if err != nil {
		return nil, fmt.Errorf("watch sandboxes: %w", err)
	}
	as := func(o any) *agents.Sandbox {
		if gone, ok := o.(toolscache.DeletedFinalStateUnknown); ok {
			o = gone.Obj
		}
		s, _ := o.(*agents.Sandbox)
		return s
	}
	reg, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { do(SandboxEvent{New: as(o)}) },
		UpdateFunc: func(old, o any) { do(SandboxEvent{Old: as(old), New: as(o)}) },
		DeleteFunc: func(o any) { do(SandboxEvent{Old: as(o)}) },
	})
	if err != nil {
		return nil, fmt.Errorf("watch sandboxes: %w", err)
	}
	return reg.HasSynced, nil
}
