package controllers

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// sleep and wake change the spec as a client does, with its generation.
func (w *fixture) sleep(s *agents.Sandbox, mode agents.SuspendMode) {
	w.t.Helper()
	w.update(s, func(s *agents.Sandbox) {
		s.Generation++
		s.Spec.OperatingMode, s.Spec.Barchan = agents.ModeSuspended, &agents.BarchanSpec{Suspend: mode}
	})
}

func (w *fixture) wake(s *agents.Sandbox, mode agents.ResumeMode) {
	w.t.Helper()
	w.update(s, func(s *agents.Sandbox) {
		s.Generation++
		s.Spec.OperatingMode, s.Spec.Barchan.Resume = agents.ModeRunning, mode
	})
}

// A sandbox that cannot be resumed stays paused and reports the reason at once; a transient error is retried.
func TestSandboxThatCannotBeWoken(t *testing.T) {
	for name, tt := range map[string]struct {
		err               error
		reported, retried bool
	}{
		"other build":   {fmt.Errorf("memory: was written by another build: %w", errs.ErrConflict), true, false},
		"image is gone": {fmt.Errorf("image x: %w", errs.ErrNotFound), true, false},
		"user's fault":  {fmt.Errorf("spec.x: no: %w", errs.ErrInvalid), true, false},
		"no room":       {fmt.Errorf("memory: %w", errs.ErrExhausted), true, true},
		"unknown cause": {errors.New("runsc: exit status 1"), true, true},
		"it will pass":  {fmt.Errorf("containerd: %w", errs.ErrUnavailable), false, true},
	} {
		t.Run(name, func(t *testing.T) {
			w, s := ran(t)
			w.sleep(s, agents.SuspendMemory)
			s, _, err := w.settle()
			if err != nil || sandbox.PhaseOf(s) != sandbox.Paused {
				t.Fatalf("paused: %v, %s", err, sandbox.PhaseOf(s))
			}
			w.machine.wakeFails, w.machine.calls = tt.err, nil
			w.wake(s, agents.ResumeMemory)
			s, _, err = w.settle()
			if (err != nil) != tt.retried {
				t.Errorf("Reconcile = %v, want it retried: %v", err, tt.retried)
			}
			message, reported := sandbox.ResumeFailure(s)
			if reported != tt.reported || (reported && message != errs.Text(tt.err)) {
				t.Errorf("ResumeFailure = %q, %v", message, reported)
			}
			if _, _, dead := sandbox.Failure(s); dead || !sandbox.Suspended(s) || len(s.Status.PodIPs) == 0 {
				t.Errorf("a failure cost the sandbox: %+v", s.Status)
			}
			if reported && sandbox.PhaseOf(s) != sandbox.Paused {
				t.Errorf("it is %s", sandbox.PhaseOf(s))
			}
			w.comesBackFromFiles(tt.retried, message)
		})
	}
}

// comesBackFromFiles looks again at a sandbox that could not be resumed, which changes nothing, and then
// has it resumed from its files.
func (w *fixture) comesBackFromFiles(retried bool, message string) {
	w.t.Helper()
	s, _, _ := w.settle()
	if !retried && len(w.machine.calls) != 1 {
		w.t.Errorf("tried in vain: %v", w.machine.calls)
	}
	if again, _ := sandbox.ResumeFailure(s); again != message {
		w.t.Errorf("the reason becomes %q", again)
	}
	w.wake(s, agents.ResumeFiles)
	if s, _, err := w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running {
		w.t.Errorf("from its files: %v, %s, calls %v", err, sandbox.PhaseOf(s), w.machine.calls)
	}
}

// A sandbox that cannot be paused keeps running, reports the reason, and never ends because of it.
func TestSandboxThatCannotSleep(t *testing.T) {
	w, s := ran(t)
	w.machine.sleepFails = fmt.Errorf("disk: %w", errs.ErrUnavailable)
	w.sleep(s, agents.SuspendMemory)
	s, _, err := w.settle()
	if message, failed := sandbox.SuspendFailure(s); err == nil || !failed || message != "disk" {
		t.Errorf("SuspendFailure = %q, %v, Reconcile %v", message, failed, err)
	}
	if _, _, dead := sandbox.Failure(s); dead || !sandbox.Ready(s) || sandbox.Suspended(s) {
		t.Errorf("it does not keep running: %+v", s.Status.Conditions)
	}
	w.machine.sleepFails = nil
	if s, _, err = w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Paused {
		t.Errorf("then: %v, %s", err, sandbox.PhaseOf(s))
	}
}

// TestSuspendedFromTheStart: in a cluster a sandbox without a Pod is suspended too, so that it has what it has beside the Pod. A node
// has nothing of it.
func TestSuspendedFromTheStart(t *testing.T) {
	for node, want := range map[string]int{"": 1, "n1": 0} {
		s := newSandbox()
		s.Spec.OperatingMode = agents.ModeSuspended
		w := newFixture(t, s)
		w.r.Node = node
		s, _, err := w.settle()
		if err != nil || !sandbox.Suspended(s) || len(w.machine.calls) != want {
			t.Errorf("node %q: %v, %+v after %v", node, err, s.Status, w.machine.calls)
		}
	}
}

// The node receives what a sandbox keeps, and what has no address any more shows none.
func TestSandboxKeepsWhatItsModeSays(t *testing.T) {
	w, s := ran(t)
	w.machine.homeless = map[sandbox.ContainerState]bool{sandbox.ContainerPaused: true}
	w.machine.calls = nil
	w.sleep(s, agents.SuspendDelete)
	s, _, err := w.settle()
	if err != nil || sandbox.PhaseOf(s) != sandbox.Paused || len(s.Status.PodIPs) != 0 {
		t.Fatalf("paused: %v, %s, addresses %v", err, sandbox.PhaseOf(s), s.Status.PodIPs)
	}
	w.wake(s, agents.ResumeFiles)
	if s, _, err = w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running || len(s.Status.PodIPs) != 1 {
		t.Fatalf("resumed: %v, %s, addresses %v", err, sandbox.PhaseOf(s), s.Status.PodIPs)
	}
	if want := []string{"suspend Delete", "resume from files"}; !slices.Equal(w.machine.calls, want) {
		t.Errorf("calls %q, want %q", w.machine.calls, want)
	}
}

// A node that keeps nothing at all of a sandbox in mode Delete starts it again, without its checkpoint.
func TestDeletedSandboxStartsFromItsImage(t *testing.T) {
	s := newSandbox()
	s.Spec.Barchan = &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "c"}, Suspend: agents.SuspendDelete}
	w := newFixture(t, s)
	s, _, err := w.settle()
	if err != nil || w.machine.origin != "c" {
		t.Fatalf("started from %q: %v", w.machine.origin, err)
	}
	w.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended })
	delete(w.machine.states, refOf(s))
	if s, _, err = w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Paused || len(s.Status.PodIPs) != 0 {
		t.Fatalf("paused: %v, %s", err, sandbox.PhaseOf(s))
	}
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionSuspended); c.Message != "its volumes are kept" {
		t.Errorf("the message is %q", c.Message)
	}
	w.update(s, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeRunning })
	if s, _, err = w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running || w.machine.origin != "" {
		t.Errorf("resumed: %v, %s, from %q", err, sandbox.PhaseOf(s), w.machine.origin)
	}
}

// origins is what there is no need of in a pass over one sandbox.
type origins struct{}

func (origins) RestoringFrom(context.Context, types.NamespacedName) ([]agents.Sandbox, error) {
	return nil, nil
}

// A sandbox is not started before its checkpoint is ready, and ends only if the API server itself reports
// that there will be none.
func TestSandboxAwaitsItsCheckpoint(t *testing.T) {
	restored := func() *agents.Sandbox {
		s := newSandbox()
		s.Spec.Barchan = &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "c"}}
		return s
	}
	checkpoint := func(phase barchan.CheckpointPhase) *barchan.Checkpoint {
		c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "c"}, Status: barchan.CheckpointStatus{Phase: phase}}
		meta.SetStatusCondition(&c.Status.Conditions, metav1.Condition{Type: barchan.ConditionReady, Status: "False", Reason: "Failed", Message: "it broke"})
		return c
	}
	for name, tt := range map[string]struct {
		cached, live *barchan.Checkpoint
		phase        sandbox.Phase
		message      string
	}{
		"ready":            {checkpoint(barchan.CheckpointReady), checkpoint(barchan.CheckpointReady), sandbox.Running, ""},
		"being written":    {checkpoint(barchan.CheckpointWriting), checkpoint(barchan.CheckpointWriting), sandbox.Starting, "waits for checkpoint c"},
		"new":              {checkpoint(""), checkpoint(""), sandbox.Starting, "waits for checkpoint c"},
		"not seen yet":     {nil, checkpoint(barchan.CheckpointWriting), sandbox.Starting, "waits for checkpoint c"},
		"failed":           {checkpoint(barchan.CheckpointFailed), checkpoint(barchan.CheckpointFailed), sandbox.Dead, `spec.barchan.restore.checkpointName: checkpoint "c" has failed: it broke`},
		"failed, long ago": {checkpoint(barchan.CheckpointFailed), checkpoint(barchan.CheckpointReady), sandbox.Running, ""},
		"none":             {nil, nil, sandbox.Dead, `spec.barchan.restore.checkpointName: there is no checkpoint "c" in namespace a`},
		"gone by now":      {checkpoint(barchan.CheckpointReady), nil, sandbox.Running, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newFixture(t, restored())
			w.r.Origins, w.r.cache = origins{}, showing{w.client, tt.cached}
			if tt.live != nil {
				if err := w.client.Create(t.Context(), tt.live); err != nil {
					t.Fatal(err)
				}
			}
			s, _, err := w.settle()
			if err != nil || sandbox.PhaseOf(s) != tt.phase {
				t.Fatalf("%v, phase %s, %+v", err, sandbox.PhaseOf(s), s.Status.Conditions)
			}
			if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); c.Message != tt.message {
				t.Errorf("the message is %q, want %q", c.Message, tt.message)
			}
			if started := slices.Contains(w.machine.calls, "ensure"); started != (tt.phase == sandbox.Running) {
				t.Errorf("calls %v", w.machine.calls)
			}
		})
	}
}

// A sandbox that is refused the secrets of another reports it, is marked before it gets them, and is not
// checked again once it has run.
func TestSandboxFromWhatHoldsSecrets(t *testing.T) {
	for name, tt := range map[string]struct {
		secrets, own, setting bool
		annotations           map[string]string
		fork                  *agents.ForkPolicy
		runs                  bool
	}{
		"none":           {runs: true},
		"not requested":  {secrets: true},
		"refused":        {secrets: true, fork: &agents.ForkPolicy{Secrets: agents.SecretsRefuse}},
		"marked only":    {secrets: true, annotations: map[string]string{pool.AnnotationBoundEnv: "true"}},
		"other words":    {secrets: true, annotations: map[string]string{pool.AnnotationAllowSecrets: "yes"}},
		"by its policy":  {secrets: true, fork: &agents.ForkPolicy{Secrets: agents.SecretsAllow}, runs: true},
		"by a request":   {secrets: true, annotations: map[string]string{pool.AnnotationAllowSecrets: "true"}, runs: true},
		"by a setting":   {secrets: true, setting: true, runs: true},
		"own, no word":   {secrets: true, own: true},
		"own, requested": {secrets: true, own: true, annotations: map[string]string{pool.AnnotationAllowSecrets: "true"}, runs: true},
		"own and another's": {secrets: true, runs: true, annotations: map[string]string{
			pool.AnnotationAllowSecrets: "true", pool.AnnotationBoundEnv: "true", pool.AnnotationOwnEnv: "true",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSandbox()
			s.Annotations = tt.annotations
			s.Spec.Barchan = &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "c"}, Fork: tt.fork}
			w := newFixture(t, s)
			w.r.Origins, w.r.ForkSecrets = origins{}, tt.setting
			if err := w.client.Create(t.Context(), &barchan.Checkpoint{
				ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "c"},
				Status:     barchan.CheckpointStatus{Phase: barchan.CheckpointReady, Source: &barchan.CheckpointSource{Secrets: tt.secrets, OwnVariables: tt.own}},
			}); err != nil {
				t.Fatal(err)
			}
			s, _, err := w.settle()
			if runs := sandbox.PhaseOf(s) == sandbox.Running; err != nil || runs != tt.runs {
				t.Fatalf("it runs: %v, %v, %+v", runs, err, s.Status.Conditions)
			}
			if _, refused := sandbox.RefusedSecrets(s); refused == tt.runs {
				t.Errorf("it is refused: %v", refused)
			}
			if tt.runs && [2]bool{pool.BoundEnv(s), pool.OwnEnv(s)} != [2]bool{tt.secrets, tt.own} {
				t.Errorf("it is marked %v", s.Annotations)
			}
			if !tt.runs {
				if len(w.machine.calls) > 0 {
					t.Errorf("calls %v", w.machine.calls)
				}
				w.update(s, func(s *agents.Sandbox) { s.Spec.Barchan.Fork = &agents.ForkPolicy{Secrets: agents.SecretsAllow} })
				if s, _, err = w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running {
					t.Fatalf("allowed: %v, %+v", err, s.Status.Conditions)
				}
			}
			w.update(s, func(s *agents.Sandbox) { s.Annotations, s.Spec.Barchan.Fork = nil, nil })
			w.r.ForkSecrets = false
			if s, _, err = w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running {
				t.Errorf("afterwards: %v, %+v", err, s.Status.Conditions)
			}
		})
	}
}

// What has run once needs its checkpoint no more, and an unreachable API server ends nothing.
func TestSandboxOutlivesItsCheckpoint(t *testing.T) {
	s := newSandbox()
	s.Spec.Barchan = &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "c"}}
	w := newFixture(t, s)
	w.r.Origins, w.r.cache = origins{}, showing{w.client, nil}
	away := interceptor.NewClient(w.client.(client.WithWatch), interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if _, is := o.(*barchan.Checkpoint); is {
				return errors.New("connection refused")
			}
			return c.Get(ctx, key, o, opts...)
		},
	})
	w.r.Client = away
	s, _, err := w.settle()
	if _, _, dead := sandbox.Failure(s); err == nil || dead {
		t.Fatalf("the API server was unreachable: %v, %+v", err, s.Status.Conditions)
	}
	w.r.Client = w.client
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "c"}, Status: barchan.CheckpointStatus{Phase: barchan.CheckpointReady}}
	if err := w.client.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if s, _, err = w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running {
		t.Fatalf("started: %v, %s", err, sandbox.PhaseOf(s))
	}
	if err := w.client.Delete(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if s, _, err = w.settle(); err != nil || sandbox.PhaseOf(s) != sandbox.Running {
		t.Errorf("without its checkpoint: %v, %s", err, sandbox.PhaseOf(s))
	}
}

// showing is a cache that shows a checkpoint of its own, or none, and else what there is.
type showing struct {
	client.Reader
	checkpoint *barchan.Checkpoint
}

func (c showing) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	into, is := o.(*barchan.Checkpoint)
	if !is {
		return c.Reader.Get(ctx, key, o, opts...)
	}
	if c.checkpoint == nil {
		return c.Reader.Get(ctx, client.ObjectKey{Namespace: "nowhere", Name: "none"}, o)
	}
	c.checkpoint.DeepCopyInto(into)
	return nil
}
