package warmpool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// warmUpState is the progress of a template's warm-up. Its zero value is that of a template without one, or whose
// members each run it.
type warmUpState struct {
	checkpoint string    // of new members; empty for none
	until      time.Time // when members are created without it
	doing      string    // the present step
	failed     string    // why there is none; it is retried
}

// warmUpState finds the checkpoint of the current revision's members.
func (r *reconciler) warmUpState(ctx context.Context, s *reconcileState) (warmUpState, error) {
	if r.WarmUps == nil || !pool.KeepsWarmMemory(s.template) {
		return warmUpState{}, nil
	}
	key := types.NamespacedName{Namespace: s.pool.Namespace, Name: pool.WarmName(s.template.Name, s.target.revision)}
	c, err := r.WarmUps.Checkpoint(ctx, key)
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		return warmUpState{}, fmt.Errorf("find the checkpoint of a warm-up: %w", err)
	}
	if err == nil && pool.IsWarm(c, s.template, s.target.revision) {
		if name := pool.WarmCheckpoint(s.template, s.target.revision, []barchan.Checkpoint{*c}); name != "" {
			return warmUpState{checkpoint: name}, nil
		}
		if c.Status.Phase == barchan.CheckpointReady && c.DeletionTimestamp == nil { // files only: each member runs the warm-up
			return warmUpState{}, nil
		}
	} else {
		c = nil
	}
	seed, err := r.WarmUps.Sandbox(ctx, key)
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		return warmUpState{}, fmt.Errorf("find the seed of a warm-up: %w", err)
	}
	w := warmUpState{until: s.backoff.began.Add(r.ColdAfter)}
	w.doing, w.failed = progress(c, seed)
	return w, nil
}

// progress is the present step of a warm-up, or why it failed.
func progress(c *barchan.Checkpoint, seed *agents.Sandbox) (doing, failed string) {
	switch {
	case c != nil && c.Status.Phase == barchan.CheckpointFailed:
		why := "no reason given"
		if ready := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady); ready != nil {
			why = ready.Message
		}
		return "", fmt.Sprintf("checkpoint %s: %s", c.Name, why)
	case c != nil && c.DeletionTimestamp == nil:
		return "a checkpoint is taken of it", ""
	case seed == nil || !pool.IsSeed(seed):
		return "it is about to begin", ""
	}
	if _, why, dead := sandbox.Failure(seed); dead {
		return "", fmt.Sprintf("sandbox %s: %s", seed.Name, cmp.Or(why, "no reason given"))
	}
	return fmt.Sprintf("it runs in sandbox %s", seed.Name), ""
}

// message is the part of the conditions' message on the warm-up; empty if irrelevant.
func (w warmUpState) message(waits bool) string {
	switch {
	case w.failed != "":
		return "the template's warm-up fails and is tried again: " + w.failed
	case waits:
		return fmt.Sprintf("members wait for the template's warm-up until %s at most: %s", clock(w.until), w.doing)
	}
	return ""
}
