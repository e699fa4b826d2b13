package warmpool

import (
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

func box(uid types.UID, labels map[string]string) *agents.Sandbox {
	return &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: string(uid), UID: uid, Labels: labels, CreationTimestamp: metav1.NewTime(epoch)}}
}

func TestDesired(t *testing.T) {
	for name, give := range map[string]struct {
		a       extensions.PoolAutoscale
		claimed int
		ago     time.Duration // of the last claim; 0 for none
		want    int
		until   time.Duration // from now; 0 for never
	}{
		"never used":          {a: extensions.PoolAutoscale{MaxReplicas: 9}},
		"never used, min":     {a: extensions.PoolAutoscale{MinReplicas: 2, MaxReplicas: 9}, want: 2},
		"just used, none now": {a: extensions.PoolAutoscale{MaxReplicas: 9}, ago: time.Minute, want: 1, until: 9 * time.Minute},
		"one in five":         {a: extensions.PoolAutoscale{MaxReplicas: 9}, claimed: 8, ago: time.Minute, want: 2, until: 9 * time.Minute},
		"rounded up":          {a: extensions.PoolAutoscale{MaxReplicas: 9}, claimed: 9, ago: time.Minute, want: 3, until: 9 * time.Minute},
		"no more than max":    {a: extensions.PoolAutoscale{MaxReplicas: 9}, claimed: 500, ago: time.Minute, want: 9, until: 9 * time.Minute},
		"no less than min":    {a: extensions.PoolAutoscale{MinReplicas: 3, MaxReplicas: 9}, claimed: 1, ago: time.Minute, want: 3},
		"idle":                {a: extensions.PoolAutoscale{MaxReplicas: 9}, claimed: 8, ago: 10 * time.Minute, want: 0},
		"idle, min":           {a: extensions.PoolAutoscale{MinReplicas: 1, MaxReplicas: 9}, ago: time.Hour, want: 1},
	} {
		t.Run(name, func(t *testing.T) {
			p := &extensions.SandboxWarmPool{Spec: extensions.SandboxWarmPoolSpec{Barchan: &extensions.WarmPoolBarchanSpec{Autoscale: &give.a}}}
			extensions.SetWarmPoolDefaults(p)
			u := usage{claimed: give.claimed}
			if give.ago > 0 {
				u.last = epoch.Add(-give.ago)
			}
			n, until := desired(p, u, epoch)
			if n != give.want || (give.until == 0) != until.IsZero() || (give.until > 0 && !until.Equal(epoch.Add(give.until))) {
				t.Errorf("desired %d until %v; want %d for %v", n, until, give.want, give.until)
			}
		})
	}
}

func TestBounds(t *testing.T) {
	p := &extensions.SandboxWarmPool{}
	if s, u := bounds(p, 7); s != 0 || u != 7 {
		t.Errorf("by default: %d, %d", s, u)
	}
	p.Spec.Barchan = &extensions.WarmPoolBarchanSpec{MaxSurge: new(intstr.FromString("25%")), MaxUnavailable: new(intstr.FromString("25%"))}
	if s, u := bounds(p, 10); s != 3 || u != 2 {
		t.Errorf("25%% of 10: %d, %d", s, u)
	}
	p.Spec.Barchan.MaxSurge = nil
	if s, u := bounds(p, 2); s != 0 || u != 1 {
		t.Errorf("a share that rounds to none would block a rollout: %d, %d", s, u)
	}
}

func TestUse(t *testing.T) {
	warm, cold, ended := box("w", map[string]string{agents.LabelTemplateHash: "r"}), box("c", nil), box("e", nil)
	warm.Annotations = map[string]string{pool.AnnotationClaimedAt: epoch.Add(time.Minute).Format(time.RFC3339Nano)}
	ended.DeletionTimestamp = new(metav1.NewTime(epoch))
	u := use([]*agents.Sandbox{warm, cold, ended}, types.NamespacedName{}, "r", epoch.Add(-time.Hour))
	if u.claimed != 2 || u.current != 1 || !u.last.Equal(epoch.Add(time.Minute)) {
		t.Errorf("usage %+v", u)
	}
	if u = use([]*agents.Sandbox{warm}, types.NamespacedName{Namespace: "n", Name: "next"}, "r", epoch); u.claimed != 1 || u.current != 0 {
		t.Errorf("after a change of the template: %+v", u)
	}
	if u = use(nil, types.NamespacedName{}, "r", epoch); !u.last.Equal(epoch) {
		t.Errorf("the last claim is forgotten: %v", u.last)
	}
}

// TestMemberOfAnotherTemplate: a member of the template that the pool had before is stale, also where both have the same content.
func TestMemberOfAnotherTemplate(t *testing.T) {
	s := box("a", map[string]string{agents.LabelWarmPoolSandbox: "p", agents.LabelTemplateHash: "r"})
	s.ResourceVersion = "1"
	s.Annotations = map[string]string{agents.AnnotationTemplateRef: "first", pool.AnnotationTemplateNamespace: "n"}
	for name, stale := range map[string]bool{"first": false, "second": true} {
		m := assess(s, types.NamespacedName{Namespace: "n", Name: name}, epoch, time.Minute)
		w := poolTarget{desired: 1, revision: "r", recreate: true, unavailable: 1}
		if got := count(w, []member{m}).stale == 1; got != stale {
			t.Errorf("of template %s: stale %v, want %v", name, got, stale)
		}
		if got := len(plan(w, []member{m}, epoch).remove) == 1; got != stale {
			t.Errorf("of template %s: removed %v, want %v", name, got, stale)
		}
	}
}

// A broken image is tried ever less often, one at a time, and success forgets all.
func TestTrouble(t *testing.T) {
	var tr failureBackoff
	now, round := epoch, 0
	var waits []time.Duration
	for range 12 {
		round++
		broken := member{uid: types.UID(rune('a' + round)), revision: "r", state: failed, note: "no"}
		tr.observe("r", []member{broken}, now)
		tr.observe("r", []member{broken}, now) // seen again: no other failure
		if !tr.hold(now) || !tr.probe() {
			t.Fatalf("after failure %d nothing is held back", round)
		}
		waits = append(waits, tr.retryAt.Sub(now))
		now = tr.retryAt
		if tr.hold(now) {
			t.Fatal("never released")
		}
	}
	if !slices.IsSorted(waits) || waits[0] != firstRetry || waits[1] != 2*firstRetry || waits[11] != longestRetry {
		t.Errorf("waits %v", waits)
	}
	tr.observe("r", []member{{uid: "good", revision: "r", state: ready}}, now)
	if tr.failures != 0 || tr.hold(now) || tr.probe() {
		t.Errorf("after a success: %+v", tr)
	}
	tr.observe("r", []member{{uid: "good", revision: "r", state: ready}, {uid: "z", revision: "r", state: failed}}, now)
	tr.observe("r", []member{{uid: "good", revision: "r", state: ready}, {uid: "z", revision: "r", state: failed}}, now)
	if tr.failures != 1 {
		t.Errorf("one that was ready before counts as a success: %+v", tr)
	}
	tr.observe("r2", nil, now)
	if tr.failures != 0 {
		t.Error("another revision is blamed for the last one")
	}
}

func TestAssess(t *testing.T) {
	cond := func(kind string, is metav1.ConditionStatus, reason, text string, at time.Time) metav1.Condition {
		return metav1.Condition{Type: kind, Status: is, Reason: reason, Message: text, LastTransitionTime: metav1.NewTime(at)}
	}
	deleted := metav1.NewTime(epoch.Add(time.Minute))
	for name, give := range map[string]struct {
		change func(*agents.Sandbox)
		at     time.Duration // after it was made
		want   state
		note   string
	}{
		"new":   {func(*agents.Sandbox) {}, 0, starting, ""},
		"stuck": {func(*agents.Sandbox) {}, 5 * time.Minute, failed, "not ready after 5m0s: it has no status"},
		"ready": {func(s *agents.Sandbox) {
			s.Status.Conditions = []metav1.Condition{cond(agents.ConditionReady, "True", "x", "", epoch)}
		}, time.Hour, ready, ""},
		"no more, but not for long": {func(s *agents.Sandbox) {
			s.Status.Conditions = []metav1.Condition{cond(agents.ConditionReady, "False", "x", "probe", epoch.Add(time.Hour))}
		}, time.Hour + time.Minute, starting, "probe"},
		"without room": {func(s *agents.Sandbox) {
			s.Status.Conditions = []metav1.Condition{cond(agents.ConditionPodScheduled, "False", "Unschedulable", "0/3 nodes", epoch)}
		}, time.Hour, waiting, "0/3 nodes"},
		"not allowed": {func(s *agents.Sandbox) {
			s.Status.Conditions = []metav1.Condition{cond(agents.ConditionReady, "False", sandbox.ReasonSecrets, "they are another's", epoch)}
		}, time.Hour, startRefused, "they are another's"},
		"ended": {func(s *agents.Sandbox) {
			s.Status.Conditions = []metav1.Condition{cond(agents.ConditionFinished, "True", agents.ReasonPodFailed, "killed", epoch)}
		}, 0, failed, "killed"},
		"entrypoint failed": {func(s *agents.Sandbox) {
			s.Status.Conditions = []metav1.Condition{cond(agents.ConditionReady, "False", agents.ReasonPodFailed, "code 9", epoch)}
		}, 0, failed, "code 9"},
		"going": {func(s *agents.Sandbox) { s.DeletionTimestamp = &deleted }, time.Hour, ending, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := box("a", map[string]string{agents.LabelWarmPoolSandbox: "p"})
			give.change(s)
			m := assess(s, types.NamespacedName{}, epoch.Add(give.at), 5*time.Minute)
			if m.state != give.want || m.note != give.note {
				t.Errorf("state %d with %q, want %d with %q", m.state, m.note, give.want, give.note)
			}
		})
	}
}

// The ledger fills in what the cache has not shown, for any order of events and results.
func TestLedger(t *testing.T) {
	l := newExpectations()
	none := map[types.UID]member{}
	shown := map[types.UID]member{"a": {uid: "a", state: ready}}
	if e := l.open("p", epoch); !e.read {
		t.Fatal("a pool that was never looked at is taken as the cache shows it")
	}
	l.correct("p", none, none, epoch)
	l.add("p", member{uid: "a", since: epoch})
	e := l.open("p", epoch)
	if got := e.over(none); e.read || len(got) != 1 {
		t.Fatalf("a lagging cache hides what was made: %v", got)
	}
	if got := e.over(shown); len(got) != 1 || got[0].state != ready {
		t.Errorf("counted twice: %v", got)
	}
	if e = l.open("p", epoch.Add(expectationTimeout+1)); !e.read {
		t.Error("a cache that lags for long is trusted")
	}
	l.observe(box("a", map[string]string{agents.LabelWarmPoolSandbox: "p"}))
	if got := l.open("p", epoch).over(none); len(got) != 0 {
		t.Errorf("what came and went is still counted: %v", got)
	}
	l.observe(box("b", map[string]string{pool.LabelOrigin: "p"})) // claimed before the answer to its creation
	l.add("p", member{uid: "b", since: epoch})
	if got := l.open("p", epoch).over(none); len(got) != 0 {
		t.Errorf("the event overtook the result, and it stays counted: %v", got)
	}
	l.removing("p", "a", epoch)
	if got := l.open("p", epoch).over(shown); len(got) != 1 || got[0].state != ending {
		t.Errorf("what was deleted is still active: %v", got)
	}
	l.settle("p", none)
	if e := l.open("p", epoch); len(e.gone) != 0 {
		t.Errorf("what is gone is remembered: %v", e.gone)
	}
	l.invalidate("p")
	if e := l.open("p", epoch); !e.read {
		t.Error("a lost result is not read again")
	}
}

// The API server's word is laid over what the cache shows.
func TestLedgerCorrects(t *testing.T) {
	l := newExpectations()
	l.open("p", epoch)
	cached := map[types.UID]member{"claimed": {uid: "claimed", state: ready}, "going": {uid: "going", state: ready}, "same": {uid: "same", state: ready}}
	live := map[types.UID]member{"new": {uid: "new", state: ready}, "going": {uid: "going", state: ending}, "same": {uid: "same", state: ready}}
	first := l.correct("p", cached, live, epoch).over(cached)
	later := l.open("p", epoch).over(cached)
	for _, got := range [][]member{first, later} {
		states := map[types.UID]state{}
		for _, m := range got {
			states[m.uid] = m.state
		}
		if len(got) != 3 || states["new"] != ready || states["going"] != ending || states["same"] != ready {
			t.Errorf("members are %v", states)
		}
	}
}

func TestInBatches(t *testing.T) {
	var calls atomic.Int32
	if err := inBatches(100, func() error { calls.Add(1); return nil }); err != nil || calls.Load() != 100 {
		t.Errorf("%d calls, %v", calls.Load(), err)
	}
	calls.Store(0)
	broken := errors.New("no")
	if err := inBatches(100, func() error { calls.Add(1); return broken }); !errors.Is(err, broken) || calls.Load() != 1 {
		t.Errorf("%d calls to what does not work, %v", calls.Load(), err)
	}
	calls.Store(0)
	err := inBatches(100, func() error {
		if calls.Add(1) == 5 {
			return broken
		}
		return nil
	})
	if !errors.Is(err, broken) || calls.Load() != 7 { // 1 + 2 + 4
		t.Errorf("%d calls, %v", calls.Load(), err)
	}
}

func TestConditions(t *testing.T) {
	for name, give := range map[string]struct {
		target  poolTarget
		members string
		change  func(*reconcileState)
		ready   metav1.ConditionStatus
		moves   metav1.ConditionStatus
		reason  string // of Progressing
		text    string
	}{
		"full":      {poolTarget{desired: 2}, "ready/new/1 ready/new/1", nil, "True", "False", extensions.ReasonPoolFull, "2 of 2 members of the current revision are ready"},
		"empty":     {poolTarget{}, "", nil, "True", "False", extensions.ReasonPoolIdle, "no members are wanted now"},
		"filling":   {poolTarget{desired: 5}, "ready/new/1 ready/new/1 ready/new/1 starting/new/1 starting/new/1", nil, "False", "True", extensions.ReasonPoolFilling, "3 of 5 members of the current revision are ready; 2 are starting"},
		"no room":   {poolTarget{desired: 2}, "ready/new/1 waiting/new/1", nil, "False", "False", extensions.ReasonPoolFilling, "1 of 2 members of the current revision is ready; 1 is waiting for room on a node (no reason given)"},
		"shrinking": {poolTarget{desired: 1}, "ready/new/1 ending/new/1", nil, "True", "True", extensions.ReasonPoolShrinking, "1 of 1 member of the current revision is ready; 1 is being removed"},
		"rollout":   {poolTarget{desired: 2, recreate: true}, "ready/new/1 ready/old/1", nil, "False", "True", extensions.ReasonPoolRollingOut, "1 of 2 members of the current revision is ready; 1 is of an older revision"},
		"waits for claims": {
			poolTarget{desired: 2},
			"ready/old/1 ready/old/1", nil,
			"False", "False", extensions.ReasonPoolRollingOut, "0 of 2 members of the current revision are ready; 2 are of an older revision, to be replaced as claims come",
		},
		"failing": {
			poolTarget{desired: 1},
			"failed/new/1", func(s *reconcileState) { s.backoff.cause = "no such image"; s.backoff.fail(epoch) },
			"False", "False", extensions.ReasonMembersFailing, "0 of 1 member of the current revision are ready; 1 failed; the last failure was: no such image; the next try is at 22:13:21 UTC",
		},
		"not allowed": {
			poolTarget{desired: 3},
			"ready/new/1 barred/new/9000 barred/new/9000", func(s *reconcileState) { s.members[1].note, s.members[2].note = "secrets", "secrets" },
			"False", "False", extensions.ReasonMembersFailing, "1 of 3 members of the current revision is ready; 2 are not allowed to start, and kept (secrets)",
		},
		"refused": {
			poolTarget{desired: 1},
			"", func(s *reconcileState) { s.backoff.refuse("spec.x: no", true, epoch) },
			"False", "False", extensions.ReasonTemplateInvalid, "0 of 1 member of the current revision are ready; the API server refuses members: spec.x: no; the next try is at 22:13:21 UTC",
		},
		"no template": {
			poolTarget{desired: 1},
			"ready/old/1", func(s *reconcileState) {
				s.target.revision = ""
				s.problem = problem{extensions.ReasonTemplateNotFound, "there is no template a/t"}
			},
			"False", "False", extensions.ReasonTemplateNotFound, "there is no template a/t; 1 member is kept, which no claim gets",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := &reconcileState{pool: &extensions.SandboxWarmPool{}, target: give.target, members: pick(t, give.members), poolState: &poolState{}, now: epoch}
			s.target.revision = "new"
			if give.change != nil {
				give.change(s)
			}
			status := statusOf(s)
			p := &extensions.SandboxWarmPool{Status: *status}
			var isReady, moves metav1.Condition
			for _, c := range p.Status.Conditions {
				if c.Type == extensions.PoolReady {
					isReady = c
				} else {
					moves = c
				}
			}
			if isReady.Status != give.ready || moves.Status != give.moves || moves.Reason != give.reason || moves.Message != give.text {
				t.Errorf("Ready %s, Progressing %s because %s: %s", isReady.Status, moves.Status, moves.Reason, moves.Message)
			}
		})
	}
}

// An event is recorded at a change, not at each pass.
func TestNews(t *testing.T) {
	status := func(desired int32, is metav1.ConditionStatus, reason string) *extensions.SandboxWarmPoolStatus {
		return &extensions.SandboxWarmPoolStatus{
			Barchan:    &extensions.WarmPoolBarchanStatus{DesiredReplicas: desired},
			Conditions: []metav1.Condition{{Type: extensions.PoolReady, Status: is, Reason: reason}},
		}
	}
	for name, give := range map[string]struct {
		before, after *extensions.SandboxWarmPoolStatus
		want          string
	}{
		"first look":     {&extensions.SandboxWarmPoolStatus{}, status(2, "False", extensions.ReasonPoolFilling), ""},
		"bad from first": {&extensions.SandboxWarmPoolStatus{}, status(2, "False", extensions.ReasonTemplateNotFound), "TemplateNotFound!"},
		"still bad":      {status(2, "False", extensions.ReasonMembersFailing), status(2, "False", extensions.ReasonMembersFailing), ""},
		"scaled":         {status(2, "True", extensions.ReasonPoolFull), status(3, "False", extensions.ReasonPoolFilling), "Scaled"},
		"filled":         {status(2, "False", extensions.ReasonPoolFilling), status(2, "True", extensions.ReasonPoolFull), ""},
		"rolled out":     {status(2, "False", extensions.ReasonPoolRollingOut), status(2, "True", extensions.ReasonPoolFull), "RolledOut"},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, n := range eventsOf(give.before, give.after) {
				if n.warning {
					n.reason += "!"
				}
				got = append(got, n.reason)
			}
			if strings.Join(got, " ") != give.want {
				t.Errorf("recorded %v, want %q", got, give.want)
			}
		})
	}
}

// TestStatusOfNumbers: a status that differs in numbers alone waits for statusInterval, and any other is written at once.
func TestStatusOfNumbers(t *testing.T) {
	scheme := runtime.NewScheme()
	if err := extensions.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "p", UID: "p"}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(p).WithObjects(p).Build()
	r, state := &reconciler{Config: Config{Client: c}}, &poolState{}
	for _, step := range []struct {
		name    string
		after   time.Duration
		members string
		want    bool // a write
	}{
		{"first", 0, "starting/new/1", true},
		{"number", time.Millisecond, "starting/new/1 starting/new/1", false},
		{"another", 400 * time.Millisecond, "ready/new/1 starting/new/1", false},
		{"in time", statusInterval, "ready/new/1 starting/new/1", true},
		{"number after that", statusInterval + time.Millisecond, "ready/new/1", false},
		{"back", statusInterval + 2*time.Millisecond, "ready/new/1 starting/new/1", false},
		{"full", statusInterval + 3*time.Millisecond, "ready/new/1 ready/new/1 ready/new/1", true},
		{"no longer", statusInterval + 4*time.Millisecond, "ready/new/1 ready/new/1 starting/new/1", true},
	} {
		now := &extensions.SandboxWarmPool{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(p), now); err != nil {
			t.Fatal(err)
		}
		before := now.ResourceVersion
		s := &reconcileState{pool: now, target: poolTarget{desired: 3, revision: "new"}, members: pick(t, step.members), poolState: state, now: epoch.Add(step.after)}
		pending := !apiequality.Semantic.DeepEqual(&now.Status, statusOf(s)) && !step.want
		if err := r.writeStatus(t.Context(), s); err != nil {
			t.Fatal(err)
		}
		if wrote := now.ResourceVersion != before; wrote != step.want || s.writeAt.IsZero() == pending {
			t.Errorf("%s: written %v, to be written at %v", step.name, wrote, s.writeAt)
		}
	}
}

// TestLastClaimIsNoNumber: a pool that is sized by its last claim keeps that at once.
func TestLastClaimIsNoNumber(t *testing.T) {
	p := &extensions.SandboxWarmPool{Status: extensions.SandboxWarmPoolStatus{Barchan: &extensions.WarmPoolBarchanStatus{}}}
	now := p.Status.DeepCopy()
	now.Barchan.LastClaimTime = new(metav1.NewTime(epoch))
	if !numbersAlone(p, now) {
		t.Error("the last claim of a pool of fixed size is not a mere number")
	}
	p.Spec.Barchan = &extensions.WarmPoolBarchanSpec{Autoscale: &extensions.PoolAutoscale{}}
	if numbersAlone(p, now) {
		t.Error("the last claim waits")
	}
}

// TestDelayRefill: new members wait for a pause between claims, at most controllers.MaxClaimDelay, while half of the pool is ready.
func TestDelayRefill(t *testing.T) { synctest.Test(t, testDelayRefill) }

func testDelayRefill(t *testing.T) {
	const half, few, pause = "ready/new/1 ready/new/1", "ready/new/1 starting/new/1", controllers.ClaimPause
	state, began := &poolState{}, time.Now()
	for _, step := range []struct {
		name    string
		at      time.Duration
		ago     time.Duration // the last claim
		members string
		wait    time.Duration // until the refill; 0: none
	}{
		{"no claim", 0, time.Hour, half, 0},
		{"a claim", time.Second, 0, half, pause},
		{"the next", time.Second + 60*time.Millisecond, 10 * time.Millisecond, half, pause - 10*time.Millisecond},
		{"half are gone", time.Second + 70*time.Millisecond, 0, few, 0},
		{"claims again", 2 * time.Second, 0, half, pause},
		{"and on", 3*time.Second + 950*time.Millisecond, 0, half, 50 * time.Millisecond},
		{"too long", 4 * time.Second, 0, half, 0},
		{"once more", 4*time.Second + time.Millisecond, time.Millisecond, half, pause - time.Millisecond},
		{"a pause", 4*time.Second + pause, pause, half, 0},
		{"another clock is ahead", 5 * time.Second, -time.Minute, half, 0},
		{"full", 6 * time.Second, 0, half + " " + half, 0},
	} {
		time.Sleep(time.Until(began.Add(step.at)))
		s := &reconcileState{
			poolState: state, target: poolTarget{desired: 4, revision: "new"}, members: pick(t, step.members),
			usage: usage{last: time.Now().Add(-step.ago)}, now: time.Now(),
		}
		s.todo = plan(s.target, s.members, s.now)
		create := s.todo.create
		s.delayRefill()
		switch {
		case step.wait == 0 && (s.todo.create != create || !s.refillAt.IsZero()):
			t.Errorf("%s: %d of %d are created, the rest at %v", step.name, s.todo.create, create, s.refillAt)
		case step.wait > 0 && (s.todo.create != 0 || s.again().RequeueAfter != step.wait):
			t.Errorf("%s: %d are created, the rest in %v, not in %v", step.name, s.todo.create, s.again().RequeueAfter, step.wait)
		}
	}
}
