package cache

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

const (
	// readTimeout bounds one read of a template for all that share it. It is no measure of speed: whoever
	// notifier has a bound of their own, and machines stand still for seconds.
	readTimeout = 30 * time.Second
	// maxHashed is how many templates' revisions are remembered.
	maxHashed = 1024
)

// CurrentTemplate returns a template and its revision as a read of the API server had them that
// began after the call. Calls for one template share their reads: at most one is in flight, and
// who comes while it is shares the next. ctx ends the caller's wait alone; a read that nobody
// waits for any more is given up.
//
// It is an errs.ErrNotFound if there is no such template, and an errs.ErrInvalid with the field
// if what is stored has no revision.
func (c *Cache) CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error) {
	r, err := c.fresh.join(ctx, key)
	if err != nil {
		return nil, "", err
	}
	defer c.fresh.leave(key, r)
	select {
	case <-r.done:
	case <-ctx.Done():
		return nil, "", fmt.Errorf("read template %s: %w: %w", key, errs.ErrTimeout, ctx.Err())
	}
	if r.err != nil {
		return nil, "", r.err
	}
	return r.template.DeepCopy(), r.revision, nil
}

// fresh shares reads of templates that must not be older than the call that asks.
type fresh struct {
	get  func(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, error)
	hash func(*extensions.SandboxTemplate) (revision string, canonical []byte, err error)
	// reading are the reads in flight, as goroutines.
	reading sync.WaitGroup

	mu      sync.Mutex
	queues  map[types.NamespacedName]*queue // +checklocks:mu
	hashed  map[types.NamespacedName]hashed // +checklocks:mu
	stopped bool                            // +checklocks:mu
}

// queue is the read in flight for a template, and the one that follows it if anybody wants it.
type queue struct{ now, next *sharedRead }

// sharedRead is one read of the API server. What it found is there once done is closed.
type sharedRead struct {
	get    func() (*extensions.SandboxTemplate, error)
	cancel context.CancelFunc
	done   chan struct{}
	// callers is how many wait; guarded by the mutex of fresh.
	callers int

	template *extensions.SandboxTemplate
	revision string
	err      error
}

// hashed is the revision of a template at one version.
type hashed struct {
	uid      types.UID
	version  string
	revision string
}

func newFresh(get func(context.Context, types.NamespacedName) (*extensions.SandboxTemplate, error)) *fresh {
	return &fresh{get: get, hash: pool.Revision, queues: map[types.NamespacedName]*queue{}, hashed: map[types.NamespacedName]hashed{}}
}

// join returns a read that has not begun yet, or begins now. The caller leaves it.
func (f *fresh) join(ctx context.Context, key types.NamespacedName) (*sharedRead, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("read template %s: %w: %w", key, errs.ErrTimeout, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopped {
		return nil, ErrStopped
	}
	q := f.queues[key]
	if q == nil {
		r := f.newFlight(ctx, key)
		f.queues[key] = &queue{now: r}
		f.reading.Go(func() { f.run(key, r) })
		return r, nil
	}
	if q.next == nil {
		q.next = f.newFlight(ctx, key)
	} else {
		q.next.callers++
	}
	return q.next, nil
}

// newFlight returns a read for a first caller, whose context gives it its values and no end.
func (f *fresh) newFlight(ctx context.Context, key types.NamespacedName) *sharedRead {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	get := func() (*extensions.SandboxTemplate, error) {
		ctx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()
		return f.get(ctx, key)
	}
	return &sharedRead{get: get, cancel: cancel, done: make(chan struct{}), callers: 1}
}

// leave takes a caller off a read. The last one ends it, and one not begun is struck out.
func (f *fresh) leave(key types.NamespacedName, r *sharedRead) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.callers--; r.callers > 0 {
		return
	}
	r.cancel()
	if q := f.queues[key]; q != nil && q.next == r {
		q.next = nil
	}
}

// run does a read and all that are wanted meanwhile, one after the other.
func (f *fresh) run(key types.NamespacedName, r *sharedRead) {
	for r != nil {
		f.do(key, r)
		f.mu.Lock()
		q := f.queues[key]
		q.now, q.next = q.next, nil
		if r = q.now; r == nil {
			delete(f.queues, key)
		}
		f.mu.Unlock()
	}
}

func (f *fresh) do(key types.NamespacedName, r *sharedRead) {
	defer close(r.done)
	if r.template, r.err = r.get(); r.err == nil {
		r.revision, r.err = f.revision(key, r.template)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopped {
		r.err = ErrStopped
	}
	if errors.Is(r.err, errs.ErrNotFound) {
		delete(f.hashed, key)
	}
}

// revision hashes a template that it does not remember at this version.
func (f *fresh) revision(key types.NamespacedName, t *extensions.SandboxTemplate) (string, error) {
	f.mu.Lock()
	known := f.hashed[key]
	f.mu.Unlock()
	if known.uid == t.UID && known.version == t.ResourceVersion && known.revision != "" {
		return known.revision, nil
	}
	revision, _, err := f.hash(t)
	if err != nil {
		text := fmt.Sprintf("spec: template %s has no revision: %v", key, err)
		return "", errs.Public(fmt.Errorf("%w: %w", errs.ErrInvalid, err), text)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.hashed) >= maxHashed {
		for any := range f.hashed {
			delete(f.hashed, any)
			break
		}
	}
	f.hashed[key] = hashed{uid: t.UID, version: t.ResourceVersion, revision: revision}
	return revision, nil
}

// stop ends all reads and takes no more. It returns once none is left.
func (f *fresh) stop() {
	f.mu.Lock()
	f.stopped = true
	for _, q := range f.queues {
		for _, r := range []*sharedRead{q.now, q.next} {
			if r != nil {
				r.cancel()
			}
		}
	}
	f.mu.Unlock()
	f.reading.Wait()
}
