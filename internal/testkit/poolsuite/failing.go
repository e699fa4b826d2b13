package poolsuite

import (
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

func stuck(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{StuckAfter: 2 * time.Second})
	template := w.template(fakecluster.ImageSlow)
	p := w.pool(3)
	w.awaitReason(p, extensions.ReasonMembersFailing)
	w.until("stuck members are replaced, one by one", func() (bool, string) {
		made, _, _ := w.extremes(p.UID)
		return made > 4, w.describe(w.get(p))
	})
	if _, peak, _ := w.extremes(p.UID); peak > 3 {
		t.Errorf("at most %d at once", peak)
	}
	change(w, template, setImage("x"))
	w.full(p, 3)
}

// Members that may not start from their checkpoint are kept however long that lasts, and start when they may.
func barred(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Spec: barchan.CheckpointSpec{SandboxName: "s"}}
	w.create(c)
	c.Status = barchan.CheckpointStatus{Phase: barchan.CheckpointReady, Source: &barchan.CheckpointSource{
		Secrets: true, Blueprint: runtime.RawExtension{Raw: []byte("{}")}, Policies: runtime.RawExtension{Raw: []byte("{}")},
	}}
	if err := w.client.Status().Update(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	template := fakecluster.Template(w.namespace, "t", "x")
	template.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: c.Name}}}
	w.create(template)
	stop := w.start(Tuning{})
	p := w.pool(2)
	reported := func() {
		t.Helper()
		w.until("the pool reports why its members do not start", func() (bool, string) {
			now := w.get(p)
			ready := condition(now, extensions.PoolReady)
			return now.Status.ObservedGeneration == now.Generation && ready.Reason == extensions.ReasonMembersFailing &&
				strings.Contains(ready.Message, "2 are not allowed to start"), w.describe(now)
		})
	}
	reported()
	stop()
	w.start(Tuning{StuckAfter: time.Nanosecond})       // for which all that could be late is
	change(w, p, func(p *extensions.SandboxWarmPool) { // so that there is a pass to wait for
		p.Spec.Barchan = &extensions.WarmPoolBarchanSpec{MaxSurge: new(intstr.FromInt(1))}
	})
	reported()
	for _, s := range w.members(p) {
		change(w, &s, func(s *agents.Sandbox) {
			metav1.SetMetaDataAnnotation(&s.ObjectMeta, pool.AnnotationAllowSecrets, "true")
		})
	}
	w.full(p, 2)
	if made, _, _ := w.extremes(p.UID); made != 2 {
		t.Errorf("%d members were made for 2", made)
	}
}

func dead(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	w.template("x")
	p := w.full(w.pool(3), 3)
	victim := w.members(p)[0]
	for {
		meta.SetStatusCondition(&victim.Status.Conditions, metav1.Condition{Type: agents.ConditionFinished, Status: metav1.ConditionTrue, Reason: agents.ReasonPodFailed, Message: "killed"})
		err := w.client.Status().Update(t.Context(), &victim)
		if err == nil {
			break
		}
		if !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
		if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(&victim), &victim); err != nil {
			t.Fatal(err)
		}
	}
	w.until("the dead one is gone", func() (bool, string) {
		_, there := uids(w.members(p))[victim.UID]
		return !there, w.describe(w.get(p))
	})
	w.full(p, 3)
	if made, _, _ := w.extremes(p.UID); made != 4 {
		t.Errorf("%d members were made for one that exited", made-3)
	}
}

// Members that cannot be deleted delay their successors for a limited time.
func slowDeletion(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	stop := w.start(Tuning{})
	template := w.template("x")
	p := w.full(w.pool(3, recreating), 3)
	w.hold(true)
	change(w, template, setImage("y"))
	w.until("all stale members are being deleted", func() (bool, string) {
		now := w.get(p)
		return now.Status.Replicas == 0 && now.Status.CurrentRevision == w.revision(), w.describe(now)
	})
	if made, _, _ := w.extremes(p.UID); made != 3 {
		t.Errorf("%d members were made beside those that are being deleted", made-3)
	}
	stop()
	w.start(Tuning{GoneAfter: time.Second}) // has no patience with them
	w.until("successors are ready beside them", func() (bool, string) {
		now := w.get(p)
		return now.Status.Barchan.CurrentReadyReplicas == 3, w.describe(now)
	})
	if made, peak, _ := w.extremes(p.UID); made != 6 || peak != 6 {
		t.Errorf("%d members were made, at most %d at once", made, peak)
	}
	w.hold(false)
	w.full(p, 3)
}
