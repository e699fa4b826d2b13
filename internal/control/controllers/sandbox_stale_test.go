package controllers

import (
	"context"
	"errors"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
)

// lagging is a cache that shows a sandbox as it was.
type lagging struct {
	client.Reader
	was *agents.Sandbox // nil: as it is
}

func (l *lagging) Get(ctx context.Context, key client.ObjectKey, into client.Object, opts ...client.GetOption) error {
	s, isSandbox := into.(*agents.Sandbox)
	if l.was == nil || !isSandbox {
		return l.Reader.Get(ctx, key, into, opts...)
	}
	l.was.DeepCopyInto(s)
	return nil
}

// behind has the controller reconcile once with a cache that shows the sandbox as it was before a change
// that the API server has taken.
func (w *fixture) behind(s *agents.Sandbox, change func(*agents.Sandbox)) {
	w.t.Helper()
	cache := &lagging{w.client, s.DeepCopy()}
	w.r.cache = cache
	w.update(s, change)
	w.machine.calls = nil
	if _, err := w.r.Reconcile(w.t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(s)}); err != nil {
		w.t.Errorf("behind: %v", err)
	}
	if len(w.machine.calls) > 0 {
		w.t.Errorf("on the word of a cache that lags behind: %q", w.machine.calls)
	}
	cache.was = nil
}

// What a client extends in time never ends, however late the cache shows it.
func TestExtendedSandboxOutlivesAStaleCache(t *testing.T) {
	for name, expire := range map[string]func(*agents.Sandbox){
		"retained": func(*agents.Sandbox) {},
		"deleted":  func(s *agents.Sandbox) { s.Spec.ShutdownPolicy = agents.ShutdownDelete },
		"paused":   func(s *agents.Sandbox) { s.Spec.Barchan = &agents.BarchanSpec{OnTimeout: agents.TimeoutPause} },
	} {
		t.Run(name, func(t *testing.T) {
			w, s := ran(t)
			w.update(s, func(s *agents.Sandbox) {
				s.Spec.ShutdownTime = &past
				expire(s)
			})
			w.behind(s, func(s *agents.Sandbox) { s.Spec.ShutdownTime = &future })
			s, _, err := w.settle()
			if err != nil || s == nil || sandbox.PhaseOf(s) != sandbox.Running || w.machine.states[refOf(s)] != sandbox.ContainerRunning {
				t.Errorf("afterwards: %v, %v", s, err)
			}
		})
	}
}

// A cache that does not show the last written status yet causes no write that the API server would refuse.
func TestStatusOverAStaleCache(t *testing.T) {
	s := newSandbox()
	w := newFixture(t, s)
	cache := &lagging{w.client, nil}
	w.r.cache = cache
	w.r.Assumed = assumecache.New(func(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error) {
		s := &agents.Sandbox{}
		return s, cache.Get(ctx, key, s)
	})
	created := &agents.Sandbox{}
	key := client.ObjectKeyFromObject(s)
	if err := w.client.Get(t.Context(), key, created); err != nil {
		t.Fatal(err)
	}
	cache.was = created
	for i := range 3 {
		if result, err := w.r.Reconcile(t.Context(), reconcile.Request{NamespacedName: key}); err != nil || result.RequeueAfter > 0 {
			t.Errorf("reconcile %d: %+v, %v", i+1, result, err)
		}
	}
	cache.was = nil
	if s, _, err := w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running {
		t.Errorf("afterwards: %v, %v", s, err)
	}
}

// Nothing is discarded of a sandbox whose spec changed in time to run again or to keep its memory.
func TestKeptStateOutlivesAStaleCache(t *testing.T) {
	t.Run("files and memory", func(t *testing.T) {
		w, s := ran(t)
		w.update(s, func(s *agents.Sandbox) {
			s.Spec.OperatingMode, s.Spec.Barchan = agents.ModeSuspended, &agents.BarchanSpec{Suspend: agents.SuspendDelete}
		})
		w.behind(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeRunning })
		if s, _, err := w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running || len(w.machine.calls) > 0 {
			t.Errorf("afterwards: %v, calls %q", err, w.machine.calls)
		}
	})
	t.Run("memory", func(t *testing.T) {
		w, s := ran(t)
		w.sleep(s, agents.SuspendMemory)
		s, _, err := w.settle()
		if err != nil {
			t.Fatal(err)
		}
		w.wake(s, agents.ResumeFiles)
		w.behind(s, func(s *agents.Sandbox) { s.Spec.Barchan.Resume = agents.ResumeMemory })
		if s, _, err := w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running || !slices.Equal(w.machine.calls, []string{"resume"}) {
			t.Errorf("afterwards: %v, calls %q", err, w.machine.calls)
		}
	})
}

// An end that is noted is final: the node is cleared even if its first try fails and the time is extended.
func TestNotedEndIsFinished(t *testing.T) {
	w, s := ran(t)
	w.update(s, func(s *agents.Sandbox) { s.Spec.ShutdownTime = &past })
	w.machine.fail = errors.New("busy")
	s, _, err := w.settle()
	if err == nil || sandbox.PhaseOf(s) != sandbox.Dead || len(s.Finalizers) != 1 || s.Status.NodeName != "n1" {
		t.Fatalf("with a node that fails: %v, status %+v, finalizers %v", err, s.Status, s.Finalizers)
	}
	w.machine.fail = nil
	w.update(s, func(s *agents.Sandbox) { s.Spec.ShutdownTime = &future })
	if s, _, err = w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Dead || len(s.Finalizers) != 0 || len(w.machine.states) != 0 {
		t.Errorf("afterwards: %v, finalizers %v, machine %v", err, s.Finalizers, w.machine.states)
	}
}

// A sandbox that exited still reports the reason after its time.
func TestExpiredSandboxSaysWhyItEnded(t *testing.T) {
	w, s := ran(t)
	w.machine.states[refOf(s)] = sandbox.ContainerExited
	s, _, err := w.settle()
	if err != nil {
		t.Fatal(err)
	}
	why := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionFinished)
	w.update(s, func(s *agents.Sandbox) { s.Spec.ShutdownTime = &past })
	s, _, err = w.settle()
	if now := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionFinished); err != nil || now == nil || why == nil || now.Reason != why.Reason || now.Message != why.Message {
		t.Errorf("Finished was %+v, is %+v, %v", why, now, err)
	}
	if ready := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); ready.Reason != agents.ReasonSandboxExpired {
		t.Errorf("Ready = %+v", ready)
	}
}

// server is another server over the same API server, with a machine of its own.
func (w *fixture) server(node string) (*sandboxReconciler, *machine) {
	m := &machine{states: map[sandbox.Ref]sandbox.ContainerState{}, bound: map[sandbox.Ref][]corev1.EnvVar{}, limited: map[sandbox.Ref]*agents.EgressPolicy{}}
	return &sandboxReconciler{SandboxConfig: SandboxConfig{Log: telemetry.Discard(), Client: w.client, Runner: m, Node: node}, cache: w.client, members: newStartLimiter(func(own, _ int) bool { return own < 1 }, 0, nil), refused: newRefusals()}, m
}

// A sandbox is driven by the node that its status names, and by no other.
func TestSandboxOfAnotherNodeIsLeftAlone(t *testing.T) {
	for name, change := range map[string]func(*agents.Sandbox){
		"runs":      func(*agents.Sandbox) {},
		"suspended": func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended },
		"expired":   func(s *agents.Sandbox) { s.Spec.ShutdownTime = &past },
		"deleted":   nil,
	} {
		t.Run(name, func(t *testing.T) {
			w, s := ran(t)
			if change != nil {
				w.update(s, change)
			} else if err := w.client.Delete(t.Context(), s); err != nil {
				t.Fatal(err)
			}
			if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(s), s); err != nil {
				t.Fatal(err)
			}
			r, other := w.server("n2")
			if _, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(s)}); err != nil {
				t.Fatal(err)
			}
			now := &agents.Sandbox{}
			if err := w.client.Get(t.Context(), client.ObjectKeyFromObject(s), now); err != nil || now.ResourceVersion != s.ResourceVersion || len(other.calls) > 0 {
				t.Errorf("the other server has done %q, %v", other.calls, err)
			}
		})
	}
}

// Of two servers that see a sandbox before it has a node, one runs it, however stale the other's cache is.
func TestOneOfTwoServersTakesASandbox(t *testing.T) {
	w := newFixture(t, newSandbox())
	r, other := w.server("n2")
	w.update(newest(w), func(s *agents.Sandbox) { s.Finalizers = []string{agents.NodeFinalizer} })
	cache := &lagging{w.client, newest(w)}
	r.cache = cache
	w.machine.fail = errors.New("busy") // it is written first, and then begun
	if s, _, err := w.settle(); err == nil || s.Status.NodeName != "n1" {
		t.Fatalf("first: %+v, %v", s.Status, err)
	}
	for range 2 { // with the old view, and with the new one
		if _, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKey{Namespace: "a", Name: "s"}}); err != nil {
			t.Error(err)
		}
		cache.was = nil
	}
	if len(other.calls) > 0 || newest(w).Status.NodeName != "n1" {
		t.Errorf("the other server has done %q, node %s", other.calls, newest(w).Status.NodeName)
	}
}

func newest(w *fixture) *agents.Sandbox {
	w.t.Helper()
	s := &agents.Sandbox{}
	if err := w.client.Get(w.t.Context(), client.ObjectKey{Namespace: "a", Name: "s"}, s); err != nil {
		w.t.Fatal(err)
	}
	return s
}
