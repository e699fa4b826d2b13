package checkpointsuite

import (
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

func runsOut(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	w.running("s")
	ttl := func(seconds int32) func(*barchan.Checkpoint) {
		return func(c *barchan.Checkpoint) { c.Spec.TTLSeconds = &seconds }
	}
	stays := w.phase(w.checkpoint("stays", "s", ttl(3600)), barchan.CheckpointReady, "")
	goes := w.checkpoint("goes", "s", ttl(1))
	w.gone(goes)
	failed := w.checkpoint("failed", "nobody", ttl(0))
	w.gone(failed)
	if requests := w.node.captures(goes.UID); len(requests) != 1 || w.node.has(goes.UID) {
		t.Errorf("captured %d times, data left: %v", len(requests), w.node.has(goes.UID))
	}
	change(w, stays, func(c *barchan.Checkpoint) { *c.Spec.TTLSeconds = 0 })
	w.gone(stays)
}

// A deleted checkpoint stays for a template that names it, and for a sandbox that has yet to start.
func inUse(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	w.running("s")
	origin := &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "c"}}

	c := w.phase(w.checkpoint("c", "s"), barchan.CheckpointReady, "")
	w.running("started", func(s *agents.Sandbox) { s.Spec.Barchan = origin.DeepCopy() })
	w.delete(c)
	w.gone(c)

	c = w.phase(w.checkpoint("c", "s"), barchan.CheckpointReady, "")
	of := fakecluster.Template(w.namespace, "t", "x")
	of.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: origin.DeepCopy()}
	w.create(of)
	waiting := w.sandbox("waiting", func(s *agents.Sandbox) {
		s.Spec.Barchan, s.Spec.PodTemplate.Spec.Containers[0].Image = origin.DeepCopy(), fakecluster.ImageSlow
	})
	w.delete(c)
	now := w.awaitMessage(c, "it was deleted, and goes when it is needed no more by template t, sandbox waiting")
	if reason(now) != barchan.ReasonInUse || now.Status.Phase != barchan.CheckpointReady || !w.node.has(c.UID) {
		t.Errorf("reason %s, phase %s, data %v", reason(now), now.Status.Phase, w.node.has(c.UID))
	}
	change(w, of, func(of *extensions.SandboxTemplate) { of.Spec.Barchan = nil })
	w.until("the sandbox alone holds it", func() (bool, string) {
		now = get(w, c)
		return messageOf(now) == "it was deleted, and goes when it is needed no more by sandbox waiting, which has not run yet", messageOf(now)
	})
	w.delete(waiting)
	w.gone(c)
	if w.node.has(c.UID) {
		t.Error("its data are still there")
	}

	// One without data delays no other.
	never := w.phase(w.checkpoint("c", "nobody"), barchan.CheckpointFailed, "")
	w.sandbox("waiting2", func(s *agents.Sandbox) {
		s.Spec.Barchan, s.Spec.PodTemplate.Spec.Containers[0].Image = origin.DeepCopy(), fakecluster.ImageSlow
	})
	w.delete(never)
	w.gone(never)
}

func lost(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{SweepEvery: 20 * time.Millisecond})
	w.running("s")
	c := w.phase(w.checkpoint("c", "s"), barchan.CheckpointReady, "")
	w.node.lose(c.UID)
	w.phase(c, barchan.CheckpointFailed, "its data are not on the node any more")
	if n := len(w.node.captures(c.UID)); n != 1 {
		t.Errorf("it was captured %d times", n)
	}
}

// Data whose object is gone are dropped, and no others.
func sweep(t *testing.T, cfg Config) {
	w := idleWorld(t, cfg)
	first := w.start(Tuning{})
	w.running("s")
	c := w.phase(w.checkpoint("c", "s"), barchan.CheckpointReady, "")
	forced := w.phase(w.checkpoint("forced", "s"), barchan.CheckpointReady, "")
	first()
	for _, ref := range []sandbox.CheckpointRef{
		{Namespace: w.namespace, Name: "never", UID: "u1"},
		{Namespace: w.namespace, Name: "c", UID: "u2"},
		{Namespace: "no-such-namespace", Name: "c", UID: "u3"},
	} {
		w.node.put(ref)
	}
	change(w, forced, func(c *barchan.Checkpoint) { c.Finalizers = nil })
	w.delete(forced)
	w.gone(forced)
	w.start(Tuning{})
	w.until("data without an object is dropped", func() (bool, string) {
		var left []types.UID
		for _, uid := range []types.UID{forced.UID, "u1", "u2", "u3"} {
			if w.node.has(uid) {
				left = append(left, uid)
			}
		}
		return len(left) == 0, fmt.Sprint(left)
	})
	if !w.node.has(c.UID) || get(w, c).Status.Phase != barchan.CheckpointReady {
		t.Error("data were dropped whose object is there")
	}
}
