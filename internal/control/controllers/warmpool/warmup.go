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

// warmUpState is how far the warm-up of a pool's template is. Its zero value is that of a template without
// one, and of one that each member has to run by itself.
type warmUpState struct {
	checkpoint string    // that new members start from; empty for none
	until      time.Time // when members are made without it
	doing      string    // what is waited for
	failed     string    // why there is none; it is tried again
}

// warmth looks for the checkpoint that members of the current revision start from.
func (r *reconciler) warmUpState(ctx context.Context, s *reconcileState) (warmUpState, error) {
	if r.warmUps == nil || !pool.KeepsWarmMemory(s.template) {
		return warmUpState{}, nil
	}
	key := types.NamespacedName{Namespace: s.pool.Namespace, Name: pool.WarmName(s.template.Name, s.wish.revision)}
	c, err := r.warmUps.Checkpoint(ctx, key)
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		return warmUpState{}, fmt.Errorf("find the checkpoint of a warm-up: %w", err)
	}
	if err == nil && pool.IsWarm(c, s.template, s.wish.revision) {
		if name := pool.WarmCheckpoint(s.template, s.wish.revision, []barchan.Checkpoint{*c}); name != "" {
			return warmUpState{checkpoint: name}, nil
		}
		if c.Status.Phase == barchan.CheckpointReady && c.DeletionTimestamp == nil { // of files alone: each member runs the warm-up
			return warmUpState{}, nil
		}
	} else {
		c = nil
	}
	seed, err := r.warmUps.Sandbox(ctx, key)
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		return warmUpState{}, fmt.Errorf("find the seed of a warm-up: %w", err)
	}
	w := warmUpState{until: s.trouble.began.Add(r.coldAfter)}
	w.doing, w.failed = progress(c, seed)
	return w, nil
}

// progress says what is done for a warm-up, or why that failed.
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

// statusMessage says in words what the warm-up does; empty if that matters to nobody.
func (w warmUpState) story(waits bool) string {
	switch {
	case w.failed != "":
		return "the template's warm-up fails and is tried again: " + w.failed
	case waits:
		return fmt.Sprintf("members wait for the template's warm-up until %s at most: %s", clock(w.until), w.doing)
	}
	return ""
}
