package registry

import (
	"context"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Tasks runs background functions of the node's sandboxes.
type Tasks struct {
	wake chan struct{}

	mu      sync.Mutex
	waiting []func(context.Context) // +checklocks:mu
}

// NewTasks starts nothing: see [Tasks.Run].
func NewTasks() *Tasks { return &Tasks{wake: make(chan struct{}, 1)} }

// Start makes Run run f; the context ends with Run.
func (t *Tasks) Start(f func(context.Context)) {
	t.mu.Lock()
	t.waiting = append(t.waiting, f)
	t.mu.Unlock()
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// Run runs the started functions until ctx and all of them have ended.
func (t *Tasks) Run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	for {
		t.mu.Lock()
		begin := t.waiting
		t.waiting = nil
		t.mu.Unlock()
		for _, f := range begin {
			running.Go(func() { f(ctx) })
		}
		select {
		case <-ctx.Done():
			return
		case <-t.wake:
		}
	}
}

// ChangeQueue collects the sandboxes that changed since the last read.
type ChangeQueue struct {
	wake chan struct{}

	mu   sync.Mutex
	refs []sandbox.Ref            // +checklocks:mu
	in   map[sandbox.Ref]struct{} // +checklocks:mu
}

// NewChangeQueue returns an empty queue.
func NewChangeQueue() *ChangeQueue {
	return &ChangeQueue{wake: make(chan struct{}, 1), in: map[sandbox.Ref]struct{}{}}
}

// Mark queues a change; a sandbox that is already queued is not added again.
func (d *ChangeQueue) Mark(ref sandbox.Ref) {
	d.mu.Lock()
	if _, already := d.in[ref]; !already {
		d.in[ref] = struct{}{}
		d.refs = append(d.refs, ref)
	}
	d.mu.Unlock()
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

func (d *ChangeQueue) next() (ref sandbox.Ref, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.refs) == 0 {
		return ref, false
	}
	ref = d.refs[0]
	d.refs = d.refs[1:]
	delete(d.in, ref)
	return ref, true
}

// Forward sends the queued changes until ctx ends.
func (d *ChangeQueue) Forward(ctx context.Context, to chan<- sandbox.Ref) {
	for {
		ref, ok := d.next()
		if !ok {
			select {
			case <-d.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		select {
		case to <- ref:
		case <-ctx.Done():
			return
		}
	}
}
