package capture

import (
	"context"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Uncaptured returns the live row of a sandbox that was being captured when an earlier process ended. It changes the
// handle only; the journal changes once the sandbox is known to run.
func (m *Maker) Uncaptured(u *registry.Handle, r *journal.Row) *journal.Row {
	if r.Stage != journal.Capturing {
		return r
	}
	r = new(*r)
	r.Stage = journal.Live
	u.SetRow(r)
	return r
}

// Recover resumes a sandbox that an earlier process paused for a checkpoint.
func (m *Maker) Recover(ctx context.Context, u *registry.Handle, r *journal.Row) *journal.Row {
	r = m.Uncaptured(u, r)
	m.resume(ctx, u, r, false)
	return r
}

// resume resumes a live sandbox after a checkpoint, and writes that to the journal. It retries a failure in the background.
func (m *Maker) resume(ctx context.Context, u *registry.Handle, r *journal.Row, runs bool) {
	if runs && m.cfg.Registry.Write(r, journal.Live) == nil {
		return
	}
	if m.thawNow(ctx, u, r) {
		return
	}
	m.cfg.Later(func(ctx context.Context) {
		for pause := minResumePause; lifecycle.Sleep(ctx, pause); pause = min(2*pause, maxResumePause) {
			if m.thawLater(ctx, u) {
				return
			}
		}
	})
}

// thawLater calls thawNow with the lock of the sandbox held.
func (m *Maker) thawLater(ctx context.Context, u *registry.Handle) (finished bool) {
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return true
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || r == nil || r.Stage != journal.Live {
		return true
	}
	return m.thawNow(ctx, u, r)
}

// thawNow resumes a live sandbox that may be paused, and writes that to the journal.
func (m *Maker) thawNow(ctx context.Context, u *registry.Handle, r *journal.Row) (finished bool) {
	began := time.Now()
	runtime, err := m.cfg.Runtimes.Driving(r.Plan.Class, r.Build)
	if err == nil {
		err = thaw(ctx, runtime, string(u.ID))
	}
	if err == nil {
		err = m.cfg.Registry.Write(r, journal.Live)
	}
	if err != nil {
		m.cfg.Log.WarnContext(ctx, "sandbox not resumed after a checkpoint", telemetry.Sandbox, u.Ref.Name, telemetry.Error, err)
		return false
	}
	m.cfg.Log.DebugContext(ctx, "sandbox resumed after a checkpoint", telemetry.Namespace, u.Ref.Namespace, telemetry.Sandbox, u.Ref.Name,
		telemetry.Duration, time.Since(began))
	return true
}
