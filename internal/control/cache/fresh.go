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
	// readTimeout bounds one shared read of a template. Callers have their own deadlines, so it only
	// ends reads that hang.
	readTimeout = 30 * time.Second
	maxHashed   = 1024 // revisions
)

// CurrentTemplate returns a template and its revision from a read of the API server that began
// after the call. Calls for one template share reads: at most one is in flight, and calls during
// it share the next. ctx ends only the caller's wait; a read without callers is cancelled.
//
// It returns an errs.ErrNotFound if there is no such template, and an errs.ErrInvalid with the
// field if the stored one has no revision.
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

// fresh shares reads of templates that must not be older than the call.
type fresh struct {
	get     func(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, error)
	hash    func(*extensions.SandboxTemplate) (revision string, canonical []byte, err error)
	reading sync.WaitGroup // goroutines of the reads in flight

	mu      sync.Mutex
	queues  map[types.NamespacedName]*queue // +checklocks:mu
	hashed  map[types.NamespacedName]hashed // +checklocks:mu
	stopped bool                            // +checklocks:mu
}

// queue is the read in flight for a template, and the next one if it has callers.
type queue struct{ now, next *sharedRead }

// sharedRead is one read of the API server. Its results are set once done is closed.
type sharedRead struct {
	get     func() (*extensions.SandboxTemplate, error)
	cancel  context.CancelFunc
	done    chan struct{}
	callers int // that wait; guarded by the mutex of fresh

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
		r := f.newRead(ctx, key)
		f.queues[key] = &queue{now: r}
		f.reading.Go(func() { f.run(key, r) })
		return r, nil
	}
	if q.next == nil {
		q.next = f.newRead(ctx, key)
	} else {
		q.next.callers++
	}
	return q.next, nil
}

// newRead returns a read for a first caller; it has the values of its context, not its deadline.
func (f *fresh) newRead(ctx context.Context, key types.NamespacedName) *sharedRead {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	get := func() (*extensions.SandboxTemplate, error) {
		ctx, cancel := context.WithTimeout(ctx, readTimeout)
		defer cancel()
		return f.get(ctx, key)
	}
	return &sharedRead{get: get, cancel: cancel, done: make(chan struct{}), callers: 1}
}

// leave removes a caller from a read. The last one cancels it, and drops one that has not begun.
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

// run does a read and those that callers request meanwhile, one after the other.
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

// revision returns the hash of a template, which it computes once for each version.
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

// stop cancels all reads, refuses new ones, and returns once all have ended.
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
