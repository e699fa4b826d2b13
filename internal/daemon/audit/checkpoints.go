package audit

import (
	"context"
	"fmt"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// remedyCheckpoint is for data of a checkpoint without an object.
const remedyCheckpoint = "the server reads the object by name, at intervals and at its start, and removes the data if it is deleted"

// checkpoints compares the objects of checkpoints with what the node has of them.
func (a Server) checkpoints(ctx context.Context, now time.Time) ([]adminclient.Finding, error) {
	var objects barchan.CheckpointList
	if err := a.Live.List(ctx, &objects); err != nil {
		return nil, fmt.Errorf("list checkpoints: %w", err)
	}
	kept, err := a.Node.Checkpoints(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the node's checkpoints: %w", err)
	}
	return compareCheckpoints(objects.Items, kept, now), nil
}

// inUse reports whether a checkpoint that was deleted waits for its users.
func inUse(c *barchan.Checkpoint) bool {
	ready := apimeta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady)
	return ready != nil && ready.Reason == barchan.ReasonInUse
}

func compareCheckpoints(objects []barchan.Checkpoint, kept []sandbox.Captured, now time.Time) (found []adminclient.Finding) {
	add := func(remedy, text string, args ...any) {
		found = append(found, adminclient.Finding{Where: adminclient.InObjects, What: fmt.Sprintf(text, args...), Remedy: remedy})
	}
	there, known := map[types.UID]bool{}, map[types.UID]bool{}
	for i := range kept {
		there[kept[i].Checkpoint.UID] = true
	}
	for i := range objects {
		c := &objects[i]
		known[c.UID] = true
		gone := c.DeletionTimestamp
		switch {
		case gone != nil && now.Sub(gone.Time) > longGone && !inUse(c):
			add(remedyObject, "checkpoint %s is being deleted since %s and is held by %v", full(c), gone.UTC().Format(time.RFC3339), c.Finalizers)
		case gone == nil && c.Status.Phase == barchan.CheckpointReady && !there[c.UID]:
			add(remedyObject, "checkpoint %s is ready by its object, and the node does not have it", full(c))
		}
	}
	for i := range kept {
		if ref := kept[i].Checkpoint; !known[ref.UID] {
			add(remedyCheckpoint, "checkpoint %s/%s is on the node, and its object %s is gone", ref.Namespace, ref.Name, ref.UID)
		}
	}
	return found
}
