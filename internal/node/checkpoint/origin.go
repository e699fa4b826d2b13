package checkpoint

import (
	"context"
	"fmt"
	"runtime"
	"sync"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
)

// Image is the image of a checkpoint, whatever has become of its name since.
func (c *Row) Image() ctrd.Image {
	img := ctrd.Image{Ref: c.ImageRun.Ref, Digest: c.Digest}
	img.Config.Env, img.Config.Entrypoint, img.Config.Cmd = c.ImageEnv, c.ImageRun.Entrypoint, c.ImageRun.Cmd
	img.Config.WorkingDir, img.Config.User = c.ImageRun.Workdir, c.ImageRun.User
	return img
}

// Origin is the checkpoint that a sandbox is being made from. It is not removed before release.
type Origin struct {
	*Row
	Release func()
	// WithMemory says that the processes are those of the checkpoint, and are not started.
	WithMemory bool
	// ReleaseSlot gives back the place among those that are being restored; it may be repeated.
	ReleaseSlot func()
}

// MaxConcurrentRestores is how many memories are restored at the same time. A restore is bound by the
// processors: more at once make all of them slower.
func MaxConcurrentRestores() int { return max(4, 2*runtime.NumCPU()) }

// AwaitSlot waits for a place among those that are being restored.
func (o *Origin) AwaitSlot(ctx context.Context, places chan struct{}) error {
	select {
	case places <- struct{}{}:
		o.ReleaseSlot = sync.OnceFunc(func() { <-places })
		return nil
	case <-ctx.Done():
		return errs.Retryable(fmt.Errorf("wait for other restores: %w", context.Cause(ctx)))
	}
}

// Close lets go of the checkpoint. A nil origin has none.
func (o *Origin) Close() {
	if o != nil {
		o.ReleaseSlot()
		o.Release()
	}
}
