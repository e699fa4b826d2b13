package quota

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/time/rate"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	// Burst is how many seconds' worth of creates a namespace may make at once.
	Burst = 5
	// rateRecheck is how often a waiting request that met the rate tries again.
	rateRecheck = 50 * time.Millisecond
	// WriteRate bounds what a tenant writes of objects itself, in bytes a second: the store keeps each version for some minutes.
	WriteRate = 2 << 20
	// WriteBurst is how many bytes it may write at once.
	WriteBurst = 64 << 20
	// maxRates bounds the limiters; beyond it all begin anew.
	maxRates = 4096
)

// errRate is within an errs.ErrExhausted for a rate.
var errRate = errors.New("too fast")

// takeRateLocked counts a create against the rate of its namespace.
//
// +checklocks:q.mu
func (q *Quotas) takeRateLocked(namespace string, most Limit) error {
	if !most.Set {
		return nil
	}
	if limiter(q.rates, namespace, most.Most, int(min(most.Most, 1<<30))*Burst).Allow() {
		return nil
	}
	return errs.Public(fmt.Errorf("%w: %w", errs.ErrExhausted, errRate), fmt.Sprintf("quota of the namespace: at most %d new sandboxes a second; try again, or wait with the header Barchan-Queue-Timeout", most.Most))
}

// limiter returns the limiter of a namespace.
func limiter(of map[string]*rate.Limiter, namespace string, most int64, burst int) *rate.Limiter {
	l := of[namespace]
	if l == nil || l.Limit() != rate.Limit(most) {
		if len(of) >= maxRates {
			clear(of)
		}
		l = rate.NewLimiter(rate.Limit(most), burst)
		of[namespace] = l
	}
	return l
}

// Write counts an object of size bytes that a tenant writes, more of which are new. It refuses one that is too much for the rate of the
// namespace, or for the sum of its objects if more is positive, with an errs.ErrExhausted. Requests at the same time can exceed
// the sum by what they add.
func (q *Quotas) Write(ctx context.Context, namespace string, size, more int64) error {
	limits, err := q.limits(ctx, namespace)
	if err == nil {
		err = q.checkContents(ctx, namespace, &limits, more)
	}
	if err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if limiter(q.writes, namespace, WriteRate, WriteBurst).AllowN(time.Now(), int(size)) {
		return nil
	}
	return errs.Public(fmt.Errorf("%w: %w", errs.ErrExhausted, errRate), fmt.Sprintf("quota of the namespace: at most %s of objects are written a second; try again", bytes(WriteRate)))
}

// CheckContents refuses another object, as Write does. It counts none.
func (q *Quotas) CheckContents(ctx context.Context, namespace string) error {
	limits, err := q.limits(ctx, namespace)
	if err != nil {
		return err
	}
	return q.checkContents(ctx, namespace, &limits, 1)
}

func (q *Quotas) checkContents(ctx context.Context, namespace string, l *Limits, more int64) error {
	if q.cfg.Contents == nil || !l.Contents.Set || more <= 0 {
		return nil
	}
	used, err := q.cfg.Contents(ctx, namespace)
	if err != nil || used+more <= l.Contents.Most {
		return err
	}
	return errs.Public(errs.ErrExhausted, fmt.Sprintf("quota of the namespace: at most %s of objects (%s); they have %s, delete some", bytes(l.Contents.Most), AnnotationContents, bytes(used)))
}

// CheckStored refuses to store more in a namespace whose snapshots and paused sandboxes have as much on disk as they may, with an
// errs.ErrExhausted. What is stored next can exceed the limit by its own size, which is not known before.
func (q *Quotas) CheckStored(ctx context.Context, namespace string) error {
	limits, err := q.limits(ctx, namespace)
	if err != nil || !limits.Stored.Set {
		return err
	}
	used := q.Stored(namespace)
	if used < limits.Stored.Most {
		return nil
	}
	return errs.Public(errs.ErrExhausted, fmt.Sprintf("quota of the namespace: at most %s of snapshots and memory of paused sandboxes (%s); they have %s, delete some",
		bytes(limits.Stored.Most), AnnotationStored, bytes(used)))
}

// CheckAutoPause is CheckStored for a new sandbox whose memory a timeout or an idle policy would store: that pause is not refused.
func (q *Quotas) CheckAutoPause(ctx context.Context, namespace string, b *agents.BarchanSpec) error {
	if !PausesItself(b) {
		return nil
	}
	err := q.CheckStored(ctx, namespace)
	if errors.Is(err, errs.ErrExhausted) {
		return errs.Public(err, errs.Text(err)+", or have the sandbox not be paused by its timeout or idle policy")
	}
	return err
}

// PausesItself reports whether a timeout or an idle policy pauses a sandbox with its memory.
func PausesItself(b *agents.BarchanSpec) bool {
	return KeepsMemory(b) && b != nil && (b.OnTimeout == agents.TimeoutPause || b.Idle != nil && b.Idle.Action != agents.TimeoutShutdown)
}

// KeepsMemory reports whether a pause stores the memory of a sandbox.
func KeepsMemory(b *agents.BarchanSpec) bool {
	return b == nil || b.Suspend == "" || b.Suspend == agents.SuspendMemory
}
