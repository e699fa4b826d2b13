package claim

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// minReport is the least time between two writes of a claim's position. It grows with the position, by a second each, up to
	// maxReport: 5,000 claims that wait cause 20 writes a second at most.
	minReport = 10 * time.Second
	maxReport = 5 * time.Minute
)

// queue reserves the quota of a claim that waits for it in the queue of its namespace. waits reports that the claim has no
// reservation yet, and that its status has the reason. Its place is by its creation, so that it is the same after a restart.
func (r *reconciler) queue(ctx context.Context, w *work) (waits bool, result reconcile.Result, err error) {
	a := w.known
	timeout, _ := extensions.QueueTimeout(w.claim) // the plan has checked it
	until := w.claim.CreationTimestamp.Add(timeout)
	switch {
	case a.granted:
		w.op.Use(a.hold)
		return false, result, nil
	case timeout == 0:
		a.leaveQueue()
		return false, result, nil
	case !time.Now().Before(until):
		waits, err = r.endWait(ctx, w, timeout)
		return waits, result, err
	case a.place == nil:
		req := w.req
		a.place, err = r.Quota.Enqueue(w.claim.Namespace, w.claim.CreationTimestamp.Time, func() { r.enqueue(req) })
		if err != nil {
			_, result, err = r.overQuota(ctx, w, err)
			return true, result, err
		}
	}
	hold, retry, err := a.place.Hold(ctx, w.op.Size())
	if err == nil {
		a.leaveQueue()
		a.granted, a.hold = true, hold
		w.op.Use(hold)
		return false, result, nil
	}
	if !errors.Is(err, errs.ErrExhausted) {
		return true, result, err
	}
	a.block()
	position, of := a.place.Position()
	report := min(max(time.Duration(position)*time.Second, minReport), maxReport)
	result.RequeueAfter = min(report, max(time.Until(until), time.Millisecond))
	if retry > 0 {
		result.RequeueAfter = min(result.RequeueAfter, retry)
	}
	if ready := readyOf(&w.claim.Status); ready != nil && ready.Reason == extensions.ReasonQueued && time.Since(a.reported) < report {
		return true, result, nil
	}
	a.reported = time.Now()
	_, err = r.write(ctx, w, waiting(w.claim, extensions.ReasonQueued,
		fmt.Sprintf("is number %d of %d in the queue, until %s: %s", position, of, until.UTC().Format(time.RFC3339), errs.Text(err))))
	return true, result, err
}

// endWait records that a claim was not granted in time. One that met no quota before its time was over is tried once.
func (r *reconciler) endWait(ctx context.Context, w *work, timeout time.Duration) (ended bool, err error) {
	if w.known.place != nil {
		err = w.known.place.Expired(ctx, w.op.Size(), timeout)
	} else {
		err = w.op.Reserve(ctx)
	}
	if !errors.Is(err, errs.ErrExhausted) {
		return false, err
	}
	w.known.leaveQueue()
	message := errs.Text(err) + "; raise the annotation " + extensions.AnnotationQueueTimeout + ", or make a new claim"
	if _, err := r.write(ctx, w, waiting(w.claim, extensions.ReasonQueueTimeout, message)); err != nil {
		return true, err
	}
	r.Log.InfoContext(ctx, "claim timed out in queue", telemetry.Namespace, w.req.Namespace, telemetry.Name, w.req.Name)
	r.recordEvent(w, corev1.EventTypeWarning, extensions.ReasonQueueTimeout, message)
	return true, nil
}

// queueTimedOut reports whether the status records the end of a claim's wait for the quota, and the claim was not changed since.
func queueTimedOut(c *extensions.SandboxClaim) bool {
	timeout, err := extensions.QueueTimeout(c)
	ready := readyOf(&c.Status)
	return err == nil && timeout > 0 && ready != nil && ready.Reason == extensions.ReasonQueueTimeout &&
		!time.Now().Before(c.CreationTimestamp.Add(timeout))
}

// release returns the quota of a failed try, unless the claim has waited for it.
func (w *work) release() {
	if !w.known.granted {
		w.op.Release()
	}
}
