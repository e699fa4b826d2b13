package e2e

import (
	"context"
	"net/http"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// Sandboxes that sleep without their memory, or give it up.
var (
	shelve = operation{
		name: "pause to files", storeAfter: neverOnDisk, prepare: claimedSandbox,
		do: func(ctx context.Context, w *fixture, s *subject) error {
			status, err := w.send(ctx, http.MethodPost, "/sandboxes/"+s.id+"/pause", "", map[string]any{"memory": false}, nil)
			if status == http.StatusConflict && strings.Contains(err.Error(), "already paused") {
				return nil
			}
			return err
		},
		check: func(w *fixture, s *subject) { w.checkSleeps(s); w.checkRestarted(s) }, cleanup: killSubject,
	}
	giveUp = operation{
		name: "resume from files", storeAfter: soonOnDisk, prepare: pausedSandbox, do: resumeFromFiles,
		check: func(w *fixture, s *subject) { w.checkRestarted(s) }, cleanup: killSubject,
	}
	clearOut = operation{
		name: "suspend to volumes", storeAfter: neverOnDisk, prepare: claimedSandbox, do: suspendToVolumes,
		check: func(w *fixture, s *subject) { w.checkSleeps(s); w.checkRestarted(s) }, cleanup: killSubject,
	}
	makeAgain = operation{
		name: "resume from volumes", storeAfter: neverOnDisk,
		prepare: func(w *fixture) *subject {
			s := claimedSandbox(w)
			w.need(suspendToVolumes(w.t.Context(), w, s))
			w.checkSleeps(s)
			return s
		},
		do: resumeSubject, check: func(w *fixture, s *subject) { w.checkRestarted(s) }, cleanup: killSubject,
	}
)

// modes are the crashes of those operations.
func modes() (all []crash) {
	for _, row := range []struct {
		op operation
		at string
	}{
		{shelve, "pause/written node/sync node/flush row/storing node/decided node/stop node/detach node/discard row/stored node/stored"},
		{giveUp, "row/storing node/decided node/discard row/stored row/waking node/readdress node/start row/live"},
		{wake, "node/verify node/tell"},
		{clearOut, "row/storing node/discard row/stored node/released"},
		{makeAgain, "row/waking node/address node/snapshot node/bundle node/start node/hold row/live"},
	} {
		for at := range strings.FieldsSeq(row.at) {
			all = append(all, crash{op: row.op, at: at})
		}
	}
	return all
}

func resumeFromFiles(ctx context.Context, w *fixture, s *subject) error {
	_, err := w.send(ctx, http.MethodPost, "/sandboxes/"+s.id+"/connect", "", map[string]any{"timeout": 3600, "memory": false}, nil)
	return err
}

// suspendToVolumes uses the object, since the E2B API has no such request.
func suspendToVolumes(ctx context.Context, w *fixture, s *subject) error {
	x, err := w.find(ctx, s.id)
	if err != nil || x.Spec.OperatingMode == agents.ModeSuspended {
		return err
	}
	before := x.DeepCopy()
	x.Spec.OperatingMode = agents.ModeSuspended
	x.Spec.Barchan.Suspend = agents.SuspendDelete
	return w.objects.Patch(ctx, x, client.MergeFrom(before))
}

// checkRestarted verifies that a sandbox runs again, with new processes.
func (w *fixture) checkRestarted(s *subject) {
	w.t.Helper()
	eventually.NoError(w.t, "sandbox "+s.id+" resumes", func() error { return resumeSubject(w.t.Context(), w, s) })
	if nonce, _ := w.meet(s.id); nonce == s.nonce {
		w.t.Errorf("sandbox %s still returned %s", s.id, nonce)
	}
	if p := sandbox.PhaseOf(w.object(s.id)); p != sandbox.Running {
		w.t.Errorf("sandbox %s is %s", s.id, p)
	}
}
