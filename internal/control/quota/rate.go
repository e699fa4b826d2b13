package quota

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/time/rate"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	// Burst is how many seconds' worth of creates a namespace may make at once.
	Burst = 5
	// rateRecheck is how often a waiting request that met the rate tries again.
	rateRecheck = 50 * time.Millisecond
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
	l := q.rates[namespace]
	if l == nil || l.Limit() != rate.Limit(most.Most) {
		if len(q.rates) >= maxRates {
			clear(q.rates)
		}
		l = rate.NewLimiter(rate.Limit(most.Most), int(min(most.Most, 1<<30))*Burst)
		q.rates[namespace] = l
	}
	if l.Allow() {
		return nil
	}
	return errs.Public(fmt.Errorf("%w: %w", errs.ErrExhausted, errRate), fmt.Sprintf("quota of the namespace: at most %d new sandboxes a second; try again, or wait with the header Barchan-Queue-Timeout", most.Most))
}

// CheckStored refuses more snapshots in a namespace whose snapshots have used bytes, with an errs.ErrExhausted. One at a time
// can exceed the limit by its own size, which is not known before.
func (q *Quotas) CheckStored(ctx context.Context, namespace string, used int64) error {
	limits, err := q.limits(ctx, namespace)
	if err != nil || !limits.Stored.Set || used < limits.Stored.Most {
		return err
	}
	return errs.Public(errs.ErrExhausted, fmt.Sprintf("quota of the namespace: at most %s of snapshots (%s); they have %s, delete some", bytes(limits.Stored.Most), AnnotationStored, bytes(used)))
}
