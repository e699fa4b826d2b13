package checkpoint

import (
	"context"
	"fmt"
	"runtime"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Origin is the checkpoint that a sandbox is being created from. It is not removed before release.
type Origin struct {
	*Row
	Release func()
	// WithMemory means that the processes are restored, not started.
	WithMemory bool
	// ReleaseSlot frees the slot for concurrent restores; it may be repeated.
	ReleaseSlot func()
}

// MaxConcurrentRestores bounds the concurrent restores of memory. A restore is bound by the processors: more
// of them only slow each other down.
func MaxConcurrentRestores() int { return max(4, 2*runtime.NumCPU()) }

// AwaitSlot waits for a slot among the concurrent restores.
func (o *Origin) AwaitSlot(ctx context.Context, slots chan struct{}) error {
	select {
	case slots <- struct{}{}:
		o.ReleaseSlot = sync.OnceFunc(func() { <-slots })
		return nil
	case <-ctx.Done():
		return errs.Retryable(fmt.Errorf("wait for other restores: %w", context.Cause(ctx)))
	}
}

// Close releases the checkpoint. A nil origin has none.
func (o *Origin) Close() {
	if o != nil {
		o.ReleaseSlot()
		o.Release()
	}
}
