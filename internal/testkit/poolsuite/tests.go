package poolsuite

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

func fill(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	w.template("x")
	p := w.full(w.pool(30), 30)
	if made, peak, _ := w.extremes(p.UID); made != 30 || peak != 30 {
		t.Errorf("%d members were made, at most %d at once", made, peak)
	}
	for _, s := range w.members(p) {
		ref := metav1.GetControllerOf(&s)
		if ref == nil || ref.UID != p.UID || ref.Kind != "SandboxWarmPool" || !strings.HasPrefix(s.Name, "p-") {
			t.Errorf("member %s is owned by %v", s.Name, ref)
		}
	}
	if p.Status.ReadyReplicas != 30 || !strings.HasSuffix(p.Status.Selector, string(p.UID)) {
		t.Errorf("status is %+v", p.Status)
	}
	taken := w.take(p)
	w.full(p, 30)
	if s := w.list(client.MatchingLabels{pool.LabelOrigin: string(p.UID)}); len(s) != 1 || s[0].UID != taken.UID {
		t.Errorf("of the claimed is left: %v", s)
	}
}

// setScale writes the scale subresource.
func (w *fixture) setScale(p *extensions.SandboxWarmPool, n int32) {
	w.t.Helper()
	body := &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}, Spec: autoscalingv1.ScaleSpec{Replicas: n}}
	if err := w.client.SubResource("scale").Update(w.t.Context(), w.get(p), client.WithSubResourceBody(body)); err != nil {
		w.t.Fatal(err)
	}
}

func scale(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	w.template("x")
	p := w.full(w.pool(2), 2)
	w.setScale(p, 6)
	w.full(p, 6)
	w.setScale(p, 2)
	w.full(p, 2)
	w.setScale(p, 0)
	now := w.full(p, 0)
	if c := condition(now, extensions.PoolReady); c.Reason != extensions.ReasonPoolIdle {
		t.Errorf("an empty pool has condition %+v", c)
	}
	if made, peak, _ := w.extremes(p.UID); made != 6 || peak != 6 {
		t.Errorf("%d members were made, at most %d at once", made, peak)
	}
}

func uids(all []agents.Sandbox) map[types.UID]struct{} {
	m := map[types.UID]struct{}{}
	for i := range all {
		m[all[i].UID] = struct{}{}
	}
	return m
}

// A member claimed while the pool shrinks is kept.
func scaleDownSpares(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	w.template("x")
	p := w.full(w.pool(30), 30)
	var mu sync.Mutex
	var taken []*agents.Sandbox
	var wg sync.WaitGroup
	revision := w.revision()
	for range 4 {
		wg.Go(func() {
			for range 5 {
				s, err := w.tryTake(p, revision)
				if err != nil {
					t.Error(err)
				}
				if s != nil {
					mu.Lock()
					taken = append(taken, s)
					mu.Unlock()
				}
			}
		})
	}
	w.setScale(p, 1)
	wg.Wait()
	w.full(p, 1)
	if len(taken) == 0 {
		t.Fatal("nothing was taken: nothing is shown")
	}
	for _, s := range taken {
		now := &agents.Sandbox{}
		if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(s), now); err != nil || now.UID != s.UID || now.DeletionTimestamp != nil {
			t.Errorf("claimed sandbox %s: %v, deleted at %v", s.Name, err, now.DeletionTimestamp)
		}
	}
}

func recreate(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	template := w.template("x")
	p := w.full(w.pool(6, recreating), 6)
	w.mark(p.UID)
	change(w, template, setImage("y"))
	w.full(p, 6)
	if made, peak, _ := w.extremes(p.UID); made != 12 || peak > 6 {
		t.Errorf("%d members were made, at most %d at once", made, peak)
	}
	before := uids(w.members(p))
	change(w, template, func(t *extensions.SandboxTemplate) { t.Labels = map[string]string{"some": "thing"} })
	change(w, p, setReplicas(7)) // so that there is a pass to wait for
	w.full(p, 7)
	now := uids(w.members(p))
	for uid := range before {
		if _, there := now[uid]; !there {
			t.Errorf("a label on the template replaced %s", uid)
		}
	}
}

// switchTemplate: members of the template that the pool had before are replaced, although the other one has the same content.
func switchTemplate(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	w.template("x")
	w.create(fakecluster.Template(w.namespace, "same", "x"))
	p := w.full(w.pool(3, recreating), 3)
	before := uids(w.members(p))
	change(w, p, func(p *extensions.SandboxWarmPool) { p.Spec.SandboxTemplateRef.Name = "same" })
	w.full(p, 3)
	for _, s := range w.members(p) {
		if _, old := before[s.UID]; old || s.Annotations[agents.AnnotationTemplateRef] != "same" {
			t.Errorf("member %s is of template %s", s.Name, s.Annotations[agents.AnnotationTemplateRef])
		}
	}
}

func recreateBounded(t *testing.T, cfg Config) {
	for _, bounds := range []struct{ surge, unavailable int }{{0, 1}, {1, 0}, {2, 1}} {
		t.Run(fmt.Sprintf("surge %d unavailable %d", bounds.surge, bounds.unavailable), func(t *testing.T) {
			w := newFixture(t, cfg)
			w.start(Tuning{})
			template := w.template("x")
			p := w.pool(5, recreating, func(p *extensions.SandboxWarmPool) {
				p.Spec.Barchan = &extensions.WarmPoolBarchanSpec{MaxSurge: new(intstr.FromInt(bounds.surge)), MaxUnavailable: new(intstr.FromInt(bounds.unavailable))}
			})
			w.full(p, 5)
			w.mark(p.UID)
			change(w, template, setImage("y"))
			w.full(p, 5)
			if _, peak, low := w.extremes(p.UID); peak > 5+bounds.surge || low < 5-bounds.unavailable {
				t.Errorf("between %d ready and %d in all", low, peak)
			}
		})
	}
}

func onReplenish(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	template := w.template("x")
	p := w.full(w.pool(4), 4)
	old := uids(w.members(p))
	change(w, template, setImage("y"))
	w.until("the pool reports that none is current", func() (bool, string) {
		now := w.get(p)
		return now.Status.CurrentRevision == w.revision() && now.Status.Barchan.CurrentReplicas == 0 &&
			condition(now, extensions.PoolReady).Status == metav1.ConditionFalse && condition(now, extensions.PoolProgressing).Reason == extensions.ReasonPoolRollingOut, w.describe(now)
	})
	current := func(n int) {
		t.Helper()
		w.until(fmt.Sprintf("%d of 4 are current", n), func() (bool, string) {
			now, all := w.get(p), w.members(p)
			stays := 0
			for uid := range uids(all) {
				if _, is := old[uid]; is {
					stays++
				}
			}
			return now.Status.Barchan.CurrentReadyReplicas == int32(n) && len(all) == 4 && stays == 4-n, w.describe(now)
		})
	}
	current(0)
	w.cold(p) // a claim that found none
	current(1)
	if s := w.take(p); s == nil {
		t.Fatal("no current member to be taken")
	}
	current(2)
	w.mark(p.UID)
	w.setScale(p, 6)
	w.until("what the pool grows by is current", func() (bool, string) {
		now := w.get(p)
		return now.Status.Barchan.CurrentReadyReplicas == 4 && now.Status.Replicas == 6, w.describe(now)
	})
	w.setScale(p, 4)
	w.full(p, 4) // the stale go first
	if _, peak, _ := w.extremes(p.UID); peak > 6 {
		t.Errorf("at most %d at once", peak)
	}
}

func poolDeleted(t *testing.T, cfg Config) {
	if !cfg.Collects {
		t.Skip("this API server collects no garbage")
	}
	w := newFixture(t, cfg)
	w.start(Tuning{})
	w.template("x")
	p := w.full(w.pool(4), 4)
	taken := w.take(p)
	w.full(p, 4)
	if err := w.client.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	w.until("only the claimed one is left", func() (bool, string) {
		left := w.list()
		return len(left) == 1 && left[0].UID == taken.UID, fmt.Sprint(len(left), " left")
	})
	again := w.full(w.pool(2), 2)
	if again.UID == p.UID {
		t.Fatal("the pool is the same")
	}
}

// Members without an owner of an unknown pool are deleted; claimed ones stay.
func orphans(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	template := w.template("x")
	gone := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "gone", UID: "2b1c7a3e-0000-4000-8000-000000000001"}}
	member := func() *agents.Sandbox {
		s := pool.NewMember(gone, template, w.revision())
		s.OwnerReferences = nil
		w.create(s)
		return s
	}
	early, claimed := member(), pool.Adopt(pool.NewMember(gone, template, w.revision()), nil)
	w.create(claimed)
	w.start(Tuning{})
	late := member()
	w.until("the orphans are gone", func() (bool, string) {
		left := uids(w.list())
		_, a := left[early.UID]
		_, b := left[late.UID]
		return !a && !b, fmt.Sprint(len(left), " left")
	})
	if left := w.list(); len(left) != 1 || left[0].UID != claimed.UID || left[0].DeletionTimestamp != nil {
		t.Errorf("left: %v", left)
	}
}

func templateGone(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	p := w.pool(2)
	w.awaitReason(p, extensions.ReasonTemplateNotFound)
	template := w.template("x")
	w.full(p, 2)
	before := uids(w.members(p))
	if err := w.client.Delete(t.Context(), template); err != nil {
		t.Fatal(err)
	}
	now := w.awaitReason(p, extensions.ReasonTemplateNotFound)
	if now.Status.CurrentRevision != "" || len(w.members(p)) != 2 || !strings.Contains(condition(now, extensions.PoolReady).Message, "2 members are kept") {
		t.Errorf("without its template the pool has status %+v", now.Status)
	}
	w.template("x")
	w.full(p, 2)
	for uid := range uids(w.members(p)) {
		if _, same := before[uid]; !same {
			t.Errorf("the template came back unchanged, and %s was made", uid)
		}
	}
}

func templatePrivate(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	elsewhere := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "templates-"}}
	w.create(elsewhere)
	template := fakecluster.Template(elsewhere.Name, "t", "x")
	w.create(template)
	p := w.pool(1, func(p *extensions.SandboxWarmPool) {
		p.Spec.Barchan = &extensions.WarmPoolBarchanSpec{TemplateNamespace: elsewhere.Name}
	})
	w.awaitReason(p, extensions.ReasonTemplatePrivate)
	change(w, template, fakecluster.Public())
	w.awaitReason(p, extensions.ReasonPoolFull)
	change(w, template, func(t *extensions.SandboxTemplate) { t.Spec.Barchan.Public = false })
	w.awaitReason(p, extensions.ReasonTemplatePrivate)
}

// A cache that shows nothing of what the controller does leads to nothing being done twice.
func heldBack(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	held, hold := NewHold(cfg.REST, "sandboxes")
	w.startOver(held, Tuning{})
	t.Cleanup(func() { hold.Set(false) }) // before the controller is stopped
	template := w.template("x")
	p := w.full(w.pool(3, recreating), 3)
	hold.Set(true)
	w.setScale(p, 10)
	for round := range 4 { // each makes the controller look again
		now := change(w, w.get(p), func(p *extensions.SandboxWarmPool) {
			p.Spec.Barchan = &extensions.WarmPoolBarchanSpec{MaxSurge: new(intstr.FromInt(round))}
		})
		w.until("another pass is over", func() (bool, string) {
			p := w.get(p)
			return p.Status.ObservedGeneration == now.Generation && p.Status.Replicas == 10, w.describe(p)
		})
	}
	if made, _, _ := w.extremes(p.UID); made != 10 {
		t.Errorf("%d members were made while the cache showed nothing", made)
	}
	hold.Set(false)
	w.full(p, 10)
	hold.Set(true)
	for range 2 {
		if w.take(p) == nil {
			t.Fatal("nothing to take")
		}
	}
	change(w, p, func(p *extensions.SandboxWarmPool) { p.Spec.Barchan = nil })
	change(w, template, setImage("y")) // deletes the members in its cache: the taken ones too
	w.until("its cache has no active member", func() (bool, string) {
		now := w.get(p)
		return now.Status.CurrentRevision == w.revision() && len(w.members(p)) == 0, w.describe(now)
	})
	hold.Set(false)
	w.full(p, 10)
	if made, peak, _ := w.extremes(p.UID); made != 20 || peak != 10 {
		t.Errorf("%d members were made, at most %d at once", made, peak)
	}
	if claimed := w.list(client.MatchingLabels{pool.LabelOrigin: string(p.UID)}); len(claimed) != 2 || slices.ContainsFunc(claimed, func(s agents.Sandbox) bool { return s.DeletionTimestamp != nil }) {
		t.Errorf("of two claimed are left: %v", claimed)
	}
}

func restart(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	stop := w.start(Tuning{})
	w.template("x")
	p := w.full(w.pool(5), 5)
	stop()
	if w.take(p) == nil {
		t.Fatal("nothing to take")
	}
	lost := w.members(p)[0]
	if err := w.client.Delete(t.Context(), &lost); err != nil {
		t.Fatal(err)
	}
	w.start(Tuning{})
	w.until("the two are replaced", func() (bool, string) {
		made, _, _ := w.extremes(p.UID)
		return made >= 7, w.describe(w.get(p))
	})
	w.full(p, 5)
	if made, peak, _ := w.extremes(p.UID); made != 7 || peak != 5 {
		t.Errorf("%d members were made, at most %d at once", made, peak)
	}
}

func restartInTheMiddle(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	stop := w.start(Tuning{})
	w.template("x")
	p := w.pool(60)
	for _, n := range []int{5, 25, 45} {
		w.until(fmt.Sprintf("%d members exist", n), func() (bool, string) {
			made, _, _ := w.extremes(p.UID)
			return made >= n, fmt.Sprint(made)
		})
		stop()
		stop = w.start(Tuning{})
	}
	w.full(p, 60)
	if made, peak, _ := w.extremes(p.UID); made != 60 || peak != 60 {
		t.Errorf("%d members were made, at most %d at once", made, peak)
	}
}

func autoscale(t *testing.T, cfg Config) {
	w := newFixture(t, cfg)
	w.start(Tuning{})
	w.template("x")
	p := w.pool(7, func(p *extensions.SandboxWarmPool) { // which has no claims
		p.Spec.Barchan = &extensions.WarmPoolBarchanSpec{Autoscale: &extensions.PoolAutoscale{MaxReplicas: 5, SparePercent: 50, IdleSeconds: 3600}}
	})
	w.awaitReason(p, extensions.ReasonPoolIdle)
	var claimed []*agents.Sandbox
	for range 3 {
		claimed = append(claimed, w.cold(p))
	}
	now := w.full(p, 3)
	if b := now.Status.Barchan; b.ClaimedReplicas != 3 || b.LastClaimTime == nil || b.DesiredReplicas != 3 {
		t.Errorf("status is %+v", b)
	}
	claimed = append(claimed, w.cold(p), w.cold(p), w.cold(p), w.take(p))
	w.full(p, 5) // no more
	for _, s := range claimed {
		if err := w.client.Delete(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	w.full(p, 1) // it was in use a moment ago
	change(w, p, func(p *extensions.SandboxWarmPool) { p.Spec.Barchan.Autoscale.IdleSeconds = 2 })
	w.full(p, 0)
	w.cold(p)
	w.until("the pool resumes", func() (bool, string) {
		now := w.get(p)
		return now.Status.Barchan.DesiredReplicas > 0 || now.Status.Barchan.CurrentReadyReplicas > 0, w.describe(now)
	})
}
