package controllers

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8sevents "k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// machine is a Runner that behaves like one, in memory.
type machine struct {
	states map[sandbox.Ref]sandbox.ContainerState
	calls  []string
	fail   error // returned by Ensure, Bind and Remove
	bound  map[sandbox.Ref][]corev1.EnvVar
	// limited is the last policy of SetEgress; limitFails is its error.
	limited    map[sandbox.Ref]*agents.EgressPolicy
	limitFails error
	// sleepFails and wakeFails are the answers of Suspend and Resume.
	sleepFails, wakeFails error
	// homeless is what has no address.
	homeless map[sandbox.ContainerState]bool
	// origin is the last checkpoint that Ensure received.
	origin string
	// pending, if set, is what Observe and Ensure answer.
	pending *sandbox.Observed
}

func (m *machine) seen(ref sandbox.Ref) sandbox.Observed {
	if m.pending != nil {
		return *m.pending
	}
	o := sandbox.Observed{State: sandbox.ContainerAbsent, Node: "n1", Runtime: agents.RuntimeGVisor, Probed: true}
	if s, ok := m.states[ref]; ok {
		o.State, o.StartedAt = s, time.Unix(1000, 0)
		if !m.homeless[s] {
			o.Address = netip.MustParseAddr("10.9.0.2")
		}
	}
	return o
}

func (m *machine) set(call string, ref sandbox.Ref, s sandbox.ContainerState) (sandbox.Observed, error) {
	m.calls = append(m.calls, call)
	m.states[ref] = s
	return m.seen(ref), nil
}

func (m *machine) Ensure(_ context.Context, s *agents.Sandbox) (sandbox.Observed, error) {
	if m.fail != nil {
		return m.seen(refOf(s)), m.fail
	}
	m.origin = ""
	if s.Spec.Barchan != nil && s.Spec.Barchan.Restore != nil {
		m.origin = s.Spec.Barchan.Restore.CheckpointName
	}
	return m.set("ensure", refOf(s), sandbox.ContainerRunning)
}

func (m *machine) Bind(_ context.Context, s *agents.Sandbox) error {
	if m.states[refOf(s)] != sandbox.ContainerRunning {
		panic("bind of a sandbox that does not run")
	}
	if m.fail == nil {
		m.bound[refOf(s)] = s.Spec.PodTemplate.Spec.Containers[0].Env
	}
	return m.fail
}

func (m *machine) SetEgress(_ context.Context, s *agents.Sandbox) error {
	if s.Spec.Barchan != nil {
		m.limited[refOf(s)] = s.Spec.Barchan.Network
	}
	return m.limitFails
}

func (m *machine) Suspend(_ context.Context, ref sandbox.Ref, mode agents.SuspendMode) (sandbox.Observed, error) {
	call := "suspend"
	if mode != "" && mode != agents.SuspendMemory {
		call += " " + string(mode)
	}
	if m.sleepFails != nil {
		m.calls = append(m.calls, call)
		return m.seen(ref), m.sleepFails
	}
	return m.set(call, ref, sandbox.ContainerPaused)
}

func (m *machine) Resume(_ context.Context, ref sandbox.Ref, filesOnly bool) (sandbox.Observed, error) {
	call := "resume"
	if filesOnly {
		call += " from files"
	}
	if m.wakeFails != nil && !filesOnly {
		m.calls = append(m.calls, call)
		return sandbox.Observed{}, m.wakeFails
	}
	return m.set(call, ref, sandbox.ContainerRunning)
}

func (m *machine) Remove(_ context.Context, ref sandbox.Ref) error {
	if m.fail != nil {
		return m.fail
	}
	m.calls = append(m.calls, "remove")
	delete(m.states, ref)
	return nil
}

func (m *machine) ObjectDeleted(namespace, name string) {
	m.calls = append(m.calls, "deleted "+namespace+"/"+name)
}

func (m *machine) Observe(_ context.Context, ref sandbox.Ref) (sandbox.Observed, error) {
	return m.seen(ref), nil
}

type fixture struct {
	t       *testing.T
	client  client.Client
	machine *machine
	r       *sandboxReconciler
}

func newFixture(t *testing.T, s *agents.Sandbox) *fixture {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{agents.AddToScheme, barchan.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	agents.SetDefaults(s)
	c := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&agents.Sandbox{}).WithObjects(s).Build()
	m := &machine{
		states: map[sandbox.Ref]sandbox.ContainerState{}, bound: map[sandbox.Ref][]corev1.EnvVar{}, limited: map[sandbox.Ref]*agents.EgressPolicy{},
	}
	return &fixture{t, c, m, &sandboxReconciler{SandboxConfig: SandboxConfig{Log: telemetry.Discard(), Client: c, Runner: m, Node: "n1"}, cache: c, members: newStartLimiter(func(own, _ int) bool { return own < 1 }, 0, nil), refused: newRefusals()}}
}

// settle reconciles until nothing changes any more and returns the object, nil once it is gone.
func (w *fixture) settle() (*agents.Sandbox, reconcile.Result, error) {
	w.t.Helper()
	var last string
	for range 10 {
		res, err := w.r.Reconcile(w.t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Namespace: "a", Name: "s"}})
		s := &agents.Sandbox{}
		if getErr := w.client.Get(w.t.Context(), client.ObjectKey{Namespace: "a", Name: "s"}, s); apierrors.IsNotFound(getErr) {
			return nil, res, err
		} else if getErr != nil {
			w.t.Fatal(getErr)
		}
		if s.ResourceVersion == last || err != nil {
			return s, res, err
		}
		last = s.ResourceVersion
	}
	w.t.Fatal("the controller never settles")
	return nil, reconcile.Result{}, nil
}

func (w *fixture) update(s *agents.Sandbox, change func(*agents.Sandbox)) {
	w.t.Helper()
	change(s)
	if err := w.client.Update(w.t.Context(), s); err != nil {
		w.t.Fatal(err)
	}
}

func newSandbox() *agents.Sandbox {
	return &agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s", UID: "u1"},
		Spec: agents.SandboxSpec{SandboxBlueprint: agents.SandboxBlueprint{PodTemplate: agents.PodTemplate{
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "x"}}},
		}}},
	}
}

func TestSandboxRunsSleepsWakesAndGoes(t *testing.T) {
	w := newFixture(t, newSandbox())
	reach := func(what string, want sandbox.Phase) *agents.Sandbox {
		t.Helper()
		s, _, err := w.settle()
		if err != nil || sandbox.PhaseOf(s) != want || sandbox.Ready(s) != (want == sandbox.Running) {
			t.Fatalf("after %s: %v, phase %s, conditions %v", what, err, sandbox.PhaseOf(s), s.Status.Conditions)
		}
		return s
	}
	s := reach("the start", sandbox.Running)
	if !slices.Contains(s.Finalizers, agents.NodeFinalizer) || s.Status.PodIPs[0] != "10.9.0.2" || s.Status.Barchan.ID != string(sandbox.IDOf("u1")) {
		t.Errorf("status or finalizer is incomplete: %+v %v", s.Status, s.Finalizers)
	}
	w.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended })
	s = reach("suspend", sandbox.Paused)
	w.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeRunning })
	s = reach("resume", sandbox.Running)
	if err := w.client.Delete(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	if s, _, err := w.settle(); s != nil || err != nil {
		t.Fatalf("after delete: %v, %v", s, err)
	}
	if want := []string{"ensure", "suspend", "resume", "remove"}; !slices.Equal(w.machine.calls, want) {
		t.Errorf("calls %v, want %v", w.machine.calls, want)
	}
}

func TestSandboxStaysUntilItsNodeIsClear(t *testing.T) {
	w := newFixture(t, newSandbox())
	s, _, err := w.settle()
	if err != nil {
		t.Fatal(err)
	}
	if err := w.client.Delete(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	w.machine.fail = errors.New("busy")
	if s, _, err = w.settle(); s == nil || err == nil {
		t.Fatalf("the object went (%v, %v) although its removal failed", s, err)
	}
	w.machine.fail = nil
	if s, _, err = w.settle(); s != nil || err != nil {
		t.Fatalf("after the removal: %v, %v", s, err)
	}
}

func TestSandboxErrors(t *testing.T) {
	for name, give := range map[string]struct {
		err    error
		final  bool
		reason string
		text   string
	}{
		"user's fault":  {fmt.Errorf("spec.x: no: %w", errs.ErrInvalid), true, agents.ReasonReconcilerError, "spec.x: no"},
		"unknown image": {sandbox.NoImage(fmt.Errorf("image x: %w", errs.ErrNotFound)), true, sandbox.ReasonImage, "image x"},
		"registry away": {sandbox.NoImage(fmt.Errorf("image x: %w", errs.ErrUnavailable)), false, sandbox.ReasonImage, "image x"},
		"refused Pod":   {sandbox.PodRefused(fmt.Errorf("no class: %w", errs.ErrExhausted)), false, sandbox.ReasonPodRefused, "no class"},
		"passing":       {fmt.Errorf("containerd: %w", errs.ErrUnavailable), false, agents.ReasonReconcilerError, "containerd"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t, newSandbox())
			w.machine.fail = give.err
			s, _, err := w.settle()
			if (err == nil) != give.final {
				t.Errorf("Reconcile = %v, want it retried: %v", err, !give.final)
			}
			_, text, dead := sandbox.Failure(s)
			if dead != give.final || (dead && text != give.text) {
				t.Errorf("Failure = %q, %v, want %v", text, dead, give.final)
			}
			if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); c.Reason != give.reason || c.Message != give.text {
				t.Errorf("Ready = %+v", c)
			}
		})
	}
}

var (
	past   = metav1.NewTime(time.Now().Add(-time.Second))
	future = metav1.NewTime(time.Now().Add(time.Hour))
)

// ran is a fixture whose sandbox runs.
func ran(t *testing.T) (*fixture, *agents.Sandbox) {
	t.Helper()
	w := newFixture(t, newSandbox())
	s, _, err := w.settle()
	if err != nil {
		t.Fatal(err)
	}
	return w, s
}

func TestSandboxThatExpiresLater(t *testing.T) {
	s := newSandbox()
	s.Spec.ShutdownTime = &future
	s, res, err := newFixture(t, s).settle()
	if err != nil || sandbox.PhaseOf(s) != sandbox.Running || res.RequeueAfter <= 0 || res.RequeueAfter > time.Hour {
		t.Fatalf("phase %s, comes back after %v, %v", sandbox.PhaseOf(s), res.RequeueAfter, err)
	}
}

func TestSandboxExpiryDeletes(t *testing.T) {
	w, s := ran(t)
	w.update(s, func(s *agents.Sandbox) { s.Spec.ShutdownTime, s.Spec.ShutdownPolicy = &past, agents.ShutdownDelete })
	if s, _, err := w.settle(); s != nil || err != nil || len(w.machine.states) != 0 {
		t.Fatalf("left over: %v, %v, %v", s, w.machine.states, err)
	}
}

func TestSandboxExpiryRetains(t *testing.T) {
	w, s := ran(t)
	w.update(s, func(s *agents.Sandbox) { s.Spec.ShutdownTime = &past })
	s, _, err := w.settle()
	if err != nil || sandbox.PhaseOf(s) != sandbox.Dead || len(s.Status.PodIPs) != 0 || len(s.Finalizers) != 0 || len(w.machine.states) != 0 {
		t.Fatalf("retained: %v, phase %s, status %+v, finalizers %v, machine %v", err, sandbox.PhaseOf(s), s.Status, s.Finalizers, w.machine.states)
	}
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionSuspended); c == nil || c.Reason != agents.ReasonNotSuspended {
		t.Errorf("Suspended is %+v", c)
	}
}

// TestPodScheduled: the condition of the Pod is mirrored while it is false, and once it is true again.
func TestPodScheduled(t *testing.T) {
	s := newSandbox()
	step := func(state sandbox.ContainerState, pod *corev1.PodCondition) *metav1.Condition {
		s.Status = *statusOf(s, sandbox.Observed{State: state, PodScheduled: pod})
		return meta.FindStatusCondition(s.Status.Conditions, agents.ConditionPodScheduled)
	}
	yes := &corev1.PodCondition{Status: corev1.ConditionTrue}
	if got := step(sandbox.ContainerPending, yes); got != nil {
		t.Errorf("a Pod that is scheduled at once makes a status: %+v", got)
	}
	for _, reason := range []string{corev1.PodReasonSchedulingGated, corev1.PodReasonUnschedulable} {
		got := step(sandbox.ContainerPending, &corev1.PodCondition{Status: corev1.ConditionFalse, Reason: reason, Message: "because"})
		if got == nil || got.Status != metav1.ConditionFalse || got.Reason != reason || got.Message != "because" {
			t.Errorf("%s: %+v", reason, got)
		}
	}
	if got := step(sandbox.ContainerPending, nil); got == nil || got.Status != metav1.ConditionFalse {
		t.Errorf("without a condition of the Pod: %+v", got)
	}
	if got := step(sandbox.ContainerPending, yes); got == nil || got.Status != metav1.ConditionTrue {
		t.Errorf("scheduled later: %+v", got)
	}
	s.Status.Conditions = nil
	if got := step(sandbox.ContainerRunning, nil); got == nil || got.Status != metav1.ConditionTrue {
		t.Errorf("running: %+v", got)
	}
	step(sandbox.ContainerPending, &corev1.PodCondition{Status: corev1.ConditionFalse})
	s.Spec.OperatingMode = agents.ModeSuspended
	if got := step(sandbox.ContainerAbsent, nil); got != nil {
		t.Errorf("of a Pod that is gone: %+v", got)
	}
}

func TestSandboxExpiryPauses(t *testing.T) {
	w, s := ran(t)
	w.update(s, func(s *agents.Sandbox) {
		s.Spec.ShutdownTime, s.Spec.Barchan = &past, &agents.BarchanSpec{OnTimeout: agents.TimeoutPause, Resume: agents.ResumeFiles}
	})
	s, _, err := w.settle()
	if err != nil || sandbox.PhaseOf(s) != sandbox.Paused || s.Spec.ShutdownTime != nil {
		t.Fatalf("paused: %v, phase %s, shutdown %v", err, sandbox.PhaseOf(s), s.Spec.ShutdownTime)
	}
	if s.Spec.Barchan.Resume != agents.ResumeMemory {
		t.Errorf("the next resume would use %s", s.Spec.Barchan.Resume)
	}
}

// TestPodExpiry: a Pod whose timeout would pause it with its memory ends as without that, and says so. One that keeps volumes alone pauses.
func TestPodExpiry(t *testing.T) {
	for name, tt := range map[string]struct {
		suspend agents.SuspendMode
		policy  agents.ShutdownPolicy
		paused  bool // before
		pauses  bool
	}{
		"retained": {agents.SuspendMemory, agents.ShutdownRetain, false, false},
		"files":    {agents.SuspendFiles, agents.ShutdownRetain, false, false},
		"deleted":  {agents.SuspendMemory, agents.ShutdownDelete, false, false},
		"volumes":  {agents.SuspendDelete, agents.ShutdownDelete, false, true},
		"paused":   {agents.SuspendMemory, agents.ShutdownDelete, true, true}, // there is no Pod
	} {
		t.Run(name, func(t *testing.T) {
			w, s := ran(t)
			if tt.paused {
				w.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended })
				s, _, _ = w.settle()
			}
			events := k8sevents.NewFakeRecorder(10)
			w.r.Node, w.r.Events = "", events
			w.update(s, func(s *agents.Sandbox) {
				s.Spec.ShutdownTime, s.Spec.ShutdownPolicy, s.Spec.Barchan = &past, tt.policy, &agents.BarchanSpec{OnTimeout: agents.TimeoutPause, Suspend: tt.suspend}
			})
			s, _, err := w.settle()
			if err != nil {
				t.Fatal(err)
			}
			const why = "it was not paused by spec.barchan.onTimeout: Pause: a Pod has no memory or root file system to keep"
			said := strings.Contains(<-events.Events, why)
			switch {
			case tt.pauses:
				if said || sandbox.PhaseOf(s) != sandbox.Paused || s.Spec.ShutdownTime != nil {
					t.Errorf("phase %s", sandbox.PhaseOf(s))
				}
			case !said:
				t.Error("no event has the reason")
			case tt.policy == agents.ShutdownDelete:
				if s != nil && s.DeletionTimestamp == nil {
					t.Errorf("it goes on: %+v", s)
				}
			default:
				if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); sandbox.PhaseOf(s) != sandbox.Dead || c.Reason != agents.ReasonSandboxExpired || !strings.Contains(c.Message, why) {
					t.Errorf("phase %s, condition %+v", sandbox.PhaseOf(s), c)
				}
			}
		})
	}
}

// TestRefusedSuspend: a suspend that the spec makes impossible is said, and not tried again at once.
func TestRefusedSuspend(t *testing.T) {
	w, s := ran(t)
	w.machine.sleepFails = fmt.Errorf("spec.barchan.suspend: %w", errs.ErrInvalid)
	w.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended })
	s, result, err := w.settle()
	if _, failed := sandbox.SuspendFailure(s); err != nil || !failed || result.RequeueAfter < time.Minute {
		t.Errorf("%+v, %v, status %+v", result, err, s.Status)
	}
	w.machine.sleepFails = errs.ErrUnavailable
	if _, _, err := w.settle(); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("what may succeed later: %v", err)
	}
}

func TestSandboxThatExited(t *testing.T) {
	w := newFixture(t, newSandbox())
	s, _, _ := w.settle()
	w.machine.states[refOf(s)] = sandbox.ContainerExited
	s, _, err := w.settle()
	if err != nil || sandbox.PhaseOf(s) != sandbox.Dead {
		t.Fatalf("after exit: %v, phase %s", err, sandbox.PhaseOf(s))
	}
	if s, _, _ = w.settle(); slices.Index(w.machine.calls, "ensure") != len(w.machine.calls)-1 {
		t.Errorf("an ended sandbox was started again: %v (%v)", w.machine.calls, s.Status.Conditions)
	}
}

func TestNews(t *testing.T) {
	w, s := ran(t)
	empty := &agents.SandboxStatus{}
	reasons := func(before, after *agents.SandboxStatus) (all []string) {
		for _, n := range (statusChange{before: before, after: after}).events() {
			all = append(all, n.reason)
		}
		return all
	}
	running := s.Status.DeepCopy()
	if got := reasons(empty, running); !slices.Equal(got, []string{"Started"}) {
		t.Errorf("a start is reported as %v", got)
	}
	if got := (statusChange{empty, running, true}).events(); got != nil {
		t.Errorf("a Pod's start, which kubelet reports, is reported as %v", got)
	}
	if got := reasons(running, running.DeepCopy()); got != nil {
		t.Errorf("no change is reported as %v", got)
	}
	w.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended })
	s, _, _ = w.settle()
	paused := s.Status.DeepCopy()
	if got := reasons(running, paused); !slices.Equal(got, []string{"Suspended"}) {
		t.Errorf("a pause is reported as %v", got)
	}
	if got := reasons(paused, running); !slices.Equal(got, []string{"Resumed"}) {
		t.Errorf("a resume is reported as %v", got)
	}
	seen := w.machine.seen(refOf(s))
	seen.State, seen.Probed, seen.Message = sandbox.ContainerRunning, false, "httpGet: answered 500"
	s.Spec.OperatingMode, s.Status = agents.ModeRunning, *running
	if got := (statusChange{before: running, after: statusOf(s, seen)}).events(); len(got) != 1 || got[0] != (sandboxEvent{corev1.EventTypeWarning, "Unhealthy", "Probe", seen.Message}) {
		t.Errorf("a failing probe is reported as %v", got)
	}
	code := int32(3)
	seen.Probed, seen.EntrypointExit = true, &code
	if got := reasons(running, statusOf(s, seen)); !slices.Equal(got, []string{"EntrypointEnded"}) {
		t.Errorf("the entrypoint's end is reported as %v", got)
	}
	seen.State, seen.Message = sandbox.ContainerExited, "killed"
	if got := (statusChange{before: running, after: statusOf(s, seen)}).events(); len(got) != 1 || got[0].kind != corev1.EventTypeWarning || got[0].reason != "Finished" {
		t.Errorf("the end is reported as %v", got)
	}
}

func TestSandboxIsBoundToWhatItsObjectGets(t *testing.T) {
	w := newFixture(t, newSandbox())
	s, _, err := w.settle()
	if err != nil {
		t.Fatal(err)
	}
	env := []corev1.EnvVar{{Name: "OWNER", Value: "me"}}
	w.update(s, func(s *agents.Sandbox) {
		s.Spec.OperatingMode = agents.ModeSuspended
		s.Spec.PodTemplate.Spec.Containers[0].Env = env
	})
	if s, _, err = w.settle(); err != nil || len(w.machine.bound[refOf(s)]) > 0 {
		t.Fatalf("paused: %v, bound to %v", err, w.machine.bound[refOf(s)])
	}
	w.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeRunning })
	if s, _, err = w.settle(); err != nil || !slices.Equal(w.machine.bound[refOf(s)], env) {
		t.Fatalf("resumed: %v, bound to %v", err, w.machine.bound[refOf(s)])
	}
	w.machine.fail = fmt.Errorf("agent: %w", errs.ErrUnavailable)
	if s, _, err = w.settle(); !errors.Is(err, errs.ErrUnavailable) || !sandbox.Ready(s) {
		t.Errorf("an agent that does not answer: %v, status %+v", err, s.Status)
	}
	w.machine.fail = fmt.Errorf("env: %w", errs.ErrInvalid)
	if s, _, err = w.settle(); err != nil || !sandbox.Ready(s) {
		t.Errorf("what no sandbox may have: %v, status %+v", err, s.Status)
	}
}

// The node notes what a claim has brought when claims pause: the claim has sent it to the agent itself.
func TestBindWaitsForAPauseBetweenClaims(t *testing.T) {
	synctest.Test(t, testBindWaitsForAPauseBetweenClaims)
}

func testBindWaitsForAPauseBetweenClaims(t *testing.T) {
	env := []corev1.EnvVar{{Name: "OWNER", Value: "me"}}
	for name, give := range map[string]struct {
		ago, last time.Duration // since this claim, and since the last of all
		wait      time.Duration
	}{
		"just claimed":         {0, 0, ClaimPause},
		"others are claimed":   {time.Second, ClaimPause / 4, ClaimPause * 3 / 4},
		"claims pause":         {ClaimPause, ClaimPause, 0},
		"it has waited enough": {MaxClaimDelay, 0, 0},
	} {
		s := newSandbox()
		s.Annotations = map[string]string{pool.AnnotationClaimedAt: time.Now().Add(-give.ago).Format(time.RFC3339Nano)}
		s.Spec.PodTemplate.Spec.Containers[0].Env = env
		w := newFixture(t, s)
		last := time.Now().Add(-give.last)
		w.r.LastWarmClaim = func() time.Time { return last }
		s, result, err := w.settle()
		if err != nil || result.RequeueAfter != give.wait || (len(w.machine.bound[refOf(s)]) == 0) != (give.wait > 0) {
			t.Errorf("%s: %v, again after %v, want %v, bound to %v", name, err, result.RequeueAfter, give.wait, w.machine.bound[refOf(s)])
		}
		time.Sleep(result.RequeueAfter)
		if s, _, err = w.settle(); err != nil || !slices.Equal(w.machine.bound[refOf(s)], env) {
			t.Errorf("%s, later: %v, bound to %v", name, err, w.machine.bound[refOf(s)])
		}
	}
}

// What a sandbox may reach is in force before it resumes, and before its status reports it.
func TestSandboxIsLimitedBeforeAllElse(t *testing.T) {
	w := newFixture(t, newSandbox())
	s, _, err := w.settle()
	if err != nil {
		t.Fatal(err)
	}
	generation := func(s *agents.Sandbox) int64 {
		return meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady).ObservedGeneration
	}
	w.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended })
	if s, _, err = w.settle(); err != nil {
		t.Fatal(err)
	}
	w.machine.limitFails = fmt.Errorf("rules: %w", errs.ErrUnavailable)
	w.machine.calls = nil
	w.update(s, func(s *agents.Sandbox) {
		s.Spec.Barchan = &agents.BarchanSpec{Network: &agents.EgressPolicy{DenyOut: []string{"0.0.0.0/0"}}}
		s.Spec.OperatingMode = agents.ModeRunning
		s.Generation = 7
	})
	if s, _, err = w.settle(); !errors.Is(err, errs.ErrUnavailable) || len(w.machine.calls) > 0 || generation(s) == 7 {
		t.Errorf("without its rules: %v, calls %v, status of generation %d", err, w.machine.calls, generation(s))
	}
	w.machine.limitFails = nil
	if s, _, err = w.settle(); err != nil || !slices.Equal(w.machine.calls, []string{"resume"}) || generation(s) != 7 || w.machine.limited[refOf(s)] == nil {
		t.Errorf("with its rules: %v, calls %v, status of generation %d", err, w.machine.calls, generation(s))
	}
}

// An object that is gone without its finalizer is one that the node finds out about.
func TestGoneObjectIsReported(t *testing.T) {
	w := newFixture(t, &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "other"}})
	if s, _, err := w.settle(); s != nil || err != nil || !slices.Equal(w.machine.calls, []string{"deleted a/s"}) {
		t.Errorf("%v, %v, calls %q", s, err, w.machine.calls)
	}
}

// TestMemorySize: the status has the size of memory on disk until the sandbox is resumed.
func TestMemorySize(t *testing.T) {
	s := &agents.Sandbox{}
	for _, step := range []struct {
		name string
		seen sandbox.Observed
		want int64
	}{
		{"in RAM", sandbox.Observed{State: sandbox.ContainerPaused, Memory: agents.MemoryInRAM}, 0},
		{"on disk", sandbox.Observed{State: sandbox.ContainerPaused, Memory: agents.MemoryOnDisk, MemorySize: 3 << 20}, 3 << 20},
		{"resumed", sandbox.Observed{State: sandbox.ContainerRunning, Probed: true}, 0},
	} {
		s.Status = *statusOf(s, step.seen)
		if got := s.Status.Barchan.MemorySize; (got != nil) != (step.want > 0) || got != nil && got.Value() != step.want {
			t.Errorf("%s: memorySize is %v, want %d", step.name, got, step.want)
		}
	}
}

// TestFirstStatusOfMember: a member of a cluster that starts without trouble has its first status when it runs, and one with trouble, one
// that starts for long and any other sandbox at once.
func TestFirstStatusOfMember(t *testing.T) { synctest.Test(t, testFirstStatusOfMember) }

func testFirstStatusOfMember(t *testing.T) {
	starts := &sandbox.Observed{State: sandbox.ContainerPending, Message: "Pod exists with phase: Pending", Progressing: true}
	for name, tt := range map[string]struct {
		pending *sandbox.Observed
		age     time.Duration
		claimed bool
		want    string // the message of Ready
	}{
		"starts":          {pending: starts},
		"is not a member": {pending: starts, claimed: true, want: starts.Message},
		"starts for long": {pending: starts, age: firstStatusDelay, want: starts.Message},
		"has trouble":     {pending: &sandbox.Observed{State: sandbox.ContainerPending, Message: "Unschedulable: no"}, want: "Unschedulable: no"},
	} {
		s := newSandbox()
		s.CreationTimestamp = metav1.NewTime(time.Now().Add(-tt.age))
		if !tt.claimed {
			s.Labels = map[string]string{agents.LabelWarmPoolSandbox: "p"}
		}
		w := newFixture(t, s)
		w.r.Node = ""
		w.machine.pending = tt.pending
		s, result, err := w.settle()
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); c != nil {
			got = c.Message
		}
		if got != tt.want || (s.Status.Barchan == nil) != (tt.want == "") || (result.RequeueAfter > 0) != (tt.want == "") {
			t.Errorf("%s: message %q, want %q; again after %v", name, got, tt.want, result.RequeueAfter)
		}
		w.machine.pending = nil
		if s, _, err = w.settle(); err != nil || !sandbox.Ready(s) || s.Status.Barchan == nil || s.Status.Selector == "" {
			t.Errorf("%s, and runs: %v, status %+v", name, err, s.Status)
		}
	}
}
