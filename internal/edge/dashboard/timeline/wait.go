package timeline

import (
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Wait is what the claim of one sandbox waited for.
type Wait struct {
	ID   sandbox.ID `json:"id"`
	Name string     `json:"name"`
	At   time.Time  `json:"at"`
	// Milliseconds of each wait; 0: it did not wait for that.
	Quota  int64 `json:"quota,omitempty"`
	Member int64 `json:"member,omitempty"`
	Start  int64 `json:"start,omitempty"` // of a sandbox of its own, by the node
	Cold   bool  `json:"cold,omitempty"`
}

// WaitOf returns what the claim of a sandbox waited for.
func WaitOf(o *agents.Sandbox) Wait {
	waits := pool.WaitsOf(o)
	x := Wait{
		ID: sandbox.IDOf(o.UID), Name: o.Name, At: barchan.ExactTime(o, pool.AnnotationClaimedAt),
		Quota: waits.Quota.Milliseconds(), Member: waits.Member.Milliseconds(), Cold: o.Labels[agents.LabelLaunchType] == agents.LaunchCold,
	}
	for _, op := range did(o) {
		if x.Cold && (op.Operation == agents.OperationCreate || op.Operation == agents.OperationRestore) {
			x.Start = endOf(&op).Sub(x.At).Milliseconds()
		}
	}
	return x
}

// endOf returns the time at which an operation of the node ended.
func endOf(op *agents.OperationStatus) time.Time {
	return op.StartedAt.UTC().Add(time.Duration(op.Milliseconds) * time.Millisecond)
}
