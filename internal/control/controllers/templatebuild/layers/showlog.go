package layers

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// showLogEvery is how often the status gets the log's last lines while a program runs.
	showLogEvery = 2 * time.Second
	// showLogTimeout bounds one write of them.
	showLogTimeout = 10 * time.Second
)

// showLog writes the log's last lines to the status of the build until stop, before which the caller must not use Build.
func (w *Work) showLog(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(showLogEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if slices.Equal(w.Build.Status.Log, w.Log.Tail()) {
				continue
			}
			if err := w.writeLog(ctx); err != nil { // a later write has them
				w.r.Log.DebugContext(ctx, "last lines of a build log not written", telemetry.Namespace, w.Build.Namespace, telemetry.Name, w.Build.Name, telemetry.Error, err)
			}
		}
	})
	return func() {
		cancel()
		done.Wait()
	}
}

// writeLog is not cut off by the end of a program: whether the write was done would not be known.
func (w *Work) writeLog(ctx context.Context) error {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), showLogTimeout)
	defer stop()
	return w.call.Write(ctx, w.Build.Status.DeepCopy())
}
