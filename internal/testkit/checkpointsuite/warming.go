package checkpointsuite

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

// warming makes the template t, whose sandboxes run a command before they are ready.
func (w *fixture) warming(command string) *extensions.SandboxTemplate {
	w.t.Helper()
	of := fakecluster.Template(w.namespace, "t", "x")
	of.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &agents.BarchanSpec{WarmUp: &agents.WarmUp{Command: []string{command}}}}
	w.create(of)
	return of
}

func (w *fixture) pool(replicas int32) *extensions.SandboxWarmPool {
	w.t.Helper()
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
	p.Spec.Replicas, p.Spec.SandboxTemplateRef.Name = &replicas, "t"
	p.Spec.UpdateStrategy = &extensions.UpdateStrategy{Type: extensions.UpdateRecreate}
	w.create(p)
	return p
}

// name is that of the warm-up of the template t as it is.
func (w *fixture) name() string {
	w.t.Helper()
	of := get(w, &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "t"}})
	revision, _, err := pool.Revision(of)
	if err != nil {
		w.t.Fatal(err)
	}
	return pool.WarmName("t", revision)
}

// origins counts the members of a pool by what they start from.
func (w *fixture) origins(p *extensions.SandboxWarmPool) map[string]int {
	w.t.Helper()
	var all agents.SandboxList
	if err := w.client.List(w.t.Context(), &all, client.InNamespace(w.namespace), client.MatchingLabels{agents.LabelWarmPoolSandbox: string(p.UID)}); err != nil {
		w.t.Fatal(err)
	}
	count := map[string]int{}
	for _, s := range all.Items {
		origin := ""
		if s.Spec.Barchan.Restore != nil {
			origin = s.Spec.Barchan.Restore.CheckpointName
		}
		count[origin]++
	}
	return count
}

// full waits until a pool is full of members that start from something, and of no others.
func (w *fixture) full(p *extensions.SandboxWarmPool, n int, origin string) {
	w.t.Helper()
	w.until(fmt.Sprintf("%d members start from %q", n, origin), func() (bool, string) {
		now, from := get(w, p), w.origins(p)
		ready := meta.IsStatusConditionTrue(now.Status.Conditions, extensions.PoolReady) && now.Status.ObservedGeneration == now.Generation
		return ready && int(now.Status.ReadyReplicas) == n && len(from) == 1 && from[origin] == n, fmt.Sprintf("%v, %+v", from, now.Status)
	})
}

// awaitPool waits until the condition Ready of a pool has a reason, and words in its message.
func (w *fixture) awaitPool(p *extensions.SandboxWarmPool, reason, words string) {
	w.t.Helper()
	w.until("the pool has condition "+reason+": "+words, func() (bool, string) {
		now := get(w, p)
		c := meta.FindStatusCondition(now.Status.Conditions, extensions.PoolReady)
		return c != nil && c.Reason == reason && strings.Contains(c.Message, words), fmt.Sprintf("%+v", now.Status.Conditions)
	})
}

func (w *fixture) at(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: w.namespace, Name: name}
}

// Members wait for the checkpoint of one seed, and start from it.
func warmUp(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	w.node.hold(true)
	of := w.warming("load")
	p := w.pool(2)
	name := w.name()
	w.awaitPool(p, extensions.ReasonPoolWarmingUp, "a checkpoint is taken of it")
	if from := w.origins(p); len(from) > 0 {
		t.Errorf("members were made: %v", from)
	}
	seed := get(w, &agents.Sandbox{ObjectMeta: w.at(name)})
	c := get(w, &barchan.Checkpoint{ObjectMeta: w.at(name)})
	for _, o := range []client.Object{seed, c} {
		if owner := metav1.GetControllerOf(o); owner == nil || owner.UID != of.UID {
			t.Errorf("%T %s is owned by %v", o, o.GetName(), owner)
		}
	}
	w.node.hold(false)
	w.full(p, 2, name)
	w.gone(seed)
	if ever := w.seedsEver(); len(ever) != 1 {
		t.Errorf("%d seeds were made", len(ever))
	}
	if requests := w.node.captures(c.UID); len(requests) == 0 || requests[0].Source.UID != seed.UID {
		t.Errorf("captured %+v", requests)
	}
	// A pool scaled to zero keeps it; deleting the pool removes it.
	change(w, p, func(p *extensions.SandboxWarmPool) { *p.Spec.Replicas = 0 })
	w.awaitPool(p, extensions.ReasonPoolIdle, "")
	if c = get(w, c); c.DeletionTimestamp != nil {
		t.Error("the checkpoint went with the last member")
	}
	change(w, p, func(p *extensions.SandboxWarmPool) { *p.Spec.Replicas = 3 })
	w.full(p, 3, name)
	w.delete(p)
	w.gone(c)
	if w.node.has(c.UID) {
		t.Error("its data are still there")
	}
}

// A warm-up that fails is retried with backoff, is reported, and can be repaired.
func warmUpFails(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	of := w.warming(seedFails)
	p := w.pool(1)
	w.awaitPool(p, extensions.ReasonWarmUpFailed, "warmUp: it ended with 3")
	if ever := w.seedsEver(); len(ever) != 1 {
		t.Errorf("%d seeds were made", len(ever))
	}
	if from := w.origins(p); len(from) > 0 {
		t.Errorf("members were made: %v", from)
	}
	change(w, of, func(of *extensions.SandboxTemplate) { of.Spec.Barchan.Sandbox.WarmUp.Command[0] = "load" })
	w.full(p, 1, w.name())
	w.until("the failed seed is gone", func() (bool, string) {
		var all agents.SandboxList
		if err := w.client.List(t.Context(), &all, client.InNamespace(w.namespace), client.MatchingLabels{agents.LabelWarmPoolSandbox: string(pool.SeedPool)}); err != nil {
			t.Fatal(err)
		}
		return len(all.Items) == 0, fmt.Sprint(len(all.Items))
	})
}

// Members do not wait without limit: they start cold; later ones start from the checkpoint.
func warmUpLate(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{ColdAfter: 50 * time.Millisecond})
	w.node.hold(true)
	w.warming("load")
	p := w.pool(1)
	w.full(p, 1, "")
	name := w.name()
	w.until("the checkpoint is being taken", func() (bool, string) { return w.node.waiting() > 0, "" })
	w.node.hold(false)
	w.phase(&barchan.Checkpoint{ObjectMeta: w.at(name)}, barchan.CheckpointReady, "")
	w.gone(&agents.Sandbox{ObjectMeta: w.at(name)}) // so the controllers' shared cache has it
	change(w, p, func(p *extensions.SandboxWarmPool) { *p.Spec.Replicas = 2 })
	w.until("a second member starts from the checkpoint", func() (bool, string) {
		from := w.origins(p)
		return from[""] == 1 && from[name] == 1, fmt.Sprint(from)
	})
}

// Each revision has a checkpoint of its own; if a member cannot start from it, it is made again.
func warmUpChanges(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	of := w.warming("load")
	p := w.pool(2)
	old := w.name()
	w.full(p, 2, old)
	change(w, of, func(of *extensions.SandboxTemplate) { of.Spec.PodTemplate.Spec.Containers[0].Image = "y" })
	name := w.name()
	if name == old {
		t.Fatal("the revision has not changed")
	}
	w.full(p, 2, name)
	w.gone(&barchan.Checkpoint{ObjectMeta: w.at(old)})
	// It keeps files only now: each member runs the warm-up itself.
	w.node.setClass(agents.RuntimeRunc)
	change(w, of, func(of *extensions.SandboxTemplate) { of.Spec.PodTemplate.Spec.Containers[0].Image = "z" })
	w.full(p, 2, "")
	change(w, of, func(of *extensions.SandboxTemplate) { of.Spec.Barchan = nil })
	w.gone(&barchan.Checkpoint{ObjectMeta: w.at(name)})
	w.until("nothing of warm-ups is left", func() (bool, string) {
		var all barchan.CheckpointList
		if err := w.client.List(t.Context(), &all, client.InNamespace(w.namespace)); err != nil {
			t.Fatal(err)
		}
		return len(all.Items) == 0, fmt.Sprint(len(all.Items))
	})
}
