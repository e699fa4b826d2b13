package daemon

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/ipam"
)

// mostRepairs limits the repairs that wait for their Events, such as those of a boot, which precede the recorder. Repairs
// beyond it are only in the log and the metrics.
const mostRepairs = 256

// repaired enqueues the Event of a repair. It does not wait.
func (d *Daemon) repaired(ctx context.Context, r ipam.Repair) {
	select {
	case d.repairs <- r:
	default:
		d.log.WarnContext(ctx, "no Event of a repaired address: too many wait", telemetry.Address, r.Address, telemetry.Kind, r.Kind)
	}
}

// recordRepairs writes Events of repairs on their sandboxes until ctx ends.
func (d *Daemon) recordRepairs(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-d.repairs:
			d.recordRepair(ctx, r)
		}
	}
}

func (d *Daemon) recordRepair(ctx context.Context, r ipam.Repair) {
	if r.Owner == "" {
		return // there is no object to write it on
	}
	s, err := d.cache.SandboxByID(ctx, sandbox.IDOf(types.UID(r.Owner)))
	switch {
	case errors.Is(err, errs.ErrNotFound): // its object is gone
		return
	case err != nil:
		d.log.WarnContext(ctx, "no Event of a repaired address", telemetry.Address, r.Address, telemetry.Error, err)
		return
	}
	kind, reason := corev1.EventTypeNormal, "AddressRepaired"
	if r.Kind == ipam.Conflict {
		kind, reason = corev1.EventTypeWarning, "AddressConflict"
	}
	d.recorder.Eventf(s, nil, kind, reason, "CheckAddress", "%s %s: %s", r.Address, r.Kind, r.Detail)
}
