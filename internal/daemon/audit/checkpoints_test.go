package audit

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

func TestCompareCheckpoints(t *testing.T) {
	now := time.Now()
	object := func(name string, phase barchan.CheckpointPhase, gone time.Duration, inUse bool) barchan.Checkpoint {
		c := barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID(name)}}
		c.Status.Phase = phase
		if gone > 0 {
			c.DeletionTimestamp = &metav1.Time{Time: now.Add(-gone)}
		}
		if inUse {
			c.Status.Conditions = []metav1.Condition{{Type: barchan.ConditionReady, Status: metav1.ConditionTrue, Reason: barchan.ReasonInUse}}
		}
		return c
	}
	objects := []barchan.Checkpoint{
		object("whole", barchan.CheckpointReady, 0, false),
		object("lost", barchan.CheckpointReady, 0, false),
		object("new", barchan.CheckpointPending, 0, false),
		object("going", barchan.CheckpointReady, time.Second, false),
		object("stuck", barchan.CheckpointReady, time.Hour, false),
		object("used", barchan.CheckpointReady, time.Hour, true),
	}
	kept := []sandbox.Captured{
		{Checkpoint: sandbox.CheckpointRef{Namespace: "n", Name: "whole", UID: "whole"}},
		{Checkpoint: sandbox.CheckpointRef{Namespace: "n", Name: "orphan", UID: "orphan"}},
	}
	var texts []string
	for _, f := range compareCheckpoints(objects, kept, now) {
		texts = append(texts, f.What)
	}
	want := []string{"n/lost is ready by its object", "n/stuck is being deleted", "n/orphan is on the node"}
	if len(texts) != len(want) {
		t.Fatalf("found %q", texts)
	}
	for i := range want {
		if !strings.Contains(texts[i], want[i]) {
			t.Errorf("found %q, want %q", texts[i], want[i])
		}
	}
}
