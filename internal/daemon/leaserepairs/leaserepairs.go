// Package leaserepairs writes Events of repaired leases of addresses on their sandboxes.
package leaserepairs

import (
	"context"
	"errors"
	"log/slog"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ipam"
)

// queued limits the repairs that wait for their Events, such as those of a boot, which precede the recorder. Repairs
// beyond it are only in the log and the metrics.
const queued = 256

// Queue has the repairs that wait.
type Queue struct {
	repairs chan ipam.Repair
	log     *slog.Logger
}

// NewQueue returns an empty queue.
func NewQueue(log *slog.Logger) *Queue { return &Queue{make(chan ipam.Repair, queued), log} }

// Sandboxes finds the object of a sandbox.
type Sandboxes interface {
	SandboxByID(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error)
}

// Add enqueues the Event of a repair. It does not wait.
func (q *Queue) Add(ctx context.Context, r ipam.Repair) {
	select {
	case q.repairs <- r:
	default:
		q.log.WarnContext(ctx, "no Event of a repaired address: too many wait", telemetry.Address, r.Address, telemetry.Kind, r.Kind)
	}
}

// Record writes the Events until ctx ends.
func (q *Queue) Record(ctx context.Context, objects Sandboxes, recorder events.EventRecorder) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-q.repairs:
			q.record(ctx, objects, recorder, r)
		}
	}
}

func (q *Queue) record(ctx context.Context, objects Sandboxes, recorder events.EventRecorder, r ipam.Repair) {
	if r.Owner == "" {
		return // there is no object to write it on
	}
	s, err := objects.SandboxByID(ctx, sandbox.IDOf(types.UID(r.Owner)))
	switch {
	case errors.Is(err, errs.ErrNotFound): // its object is gone
		return
	case err != nil:
		q.log.WarnContext(ctx, "no Event of a repaired address", telemetry.Address, r.Address, telemetry.Error, err)
		return
	}
	kind, reason := corev1.EventTypeNormal, "AddressRepaired"
	if r.Kind == ipam.Conflict {
		kind, reason = corev1.EventTypeWarning, "AddressConflict"
	}
	recorder.Eventf(s, nil, kind, reason, "CheckAddress", "%s %s: %s", r.Address, r.Kind, r.Detail)
}
