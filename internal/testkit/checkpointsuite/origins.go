package checkpointsuite

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// restoring is a sandbox that starts from a checkpoint.
func restoring(from string, changes ...func(*agents.Sandbox)) func(*agents.Sandbox) {
	return func(s *agents.Sandbox) {
		s.Spec.Barchan = &agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: from}}
		for _, change := range changes {
			change(s)
		}
	}
}

func allowed(s *agents.Sandbox) {
	s.Spec.Barchan.Fork = &agents.ForkPolicy{Secrets: agents.SecretsAllow}
}

// allowSecrets sets what the manager writes for a request that allows secrets.
func allowSecrets(s *agents.Sandbox) {
	s.Annotations = map[string]string{pool.AnnotationAllowSecrets: "true"}
}

// runs waits until a sandbox runs and verifies its secrets mark.
func (w *fixture) runs(s *agents.Sandbox, bound bool) {
	w.t.Helper()
	w.until("sandbox "+s.Name+" runs", func() (bool, string) {
		s = get(w, s)
		return sandbox.PhaseOf(s) == sandbox.Running, fmt.Sprintf("%+v", s.Status)
	})
	if marked := s.Annotations[pool.AnnotationBoundEnv] == "true"; marked != bound {
		w.t.Errorf("sandbox %s is marked as one with secrets: %v", s.Name, marked)
	}
}

// isRefused waits until a sandbox's condition has the reason that it is not started.
func (w *fixture) isRefused(s *agents.Sandbox, machine *Machine) {
	w.t.Helper()
	w.until("sandbox "+s.Name+" is refused", func() (bool, string) {
		s = get(w, s)
		_, refused := sandbox.RefusedSecrets(s)
		return refused, fmt.Sprintf("%+v", s.Status)
	})
	message, _ := sandbox.RefusedSecrets(s)
	for _, text := range []string{"spec.barchan.restore.checkpointName", `checkpoint "c"`, "spec.barchan.fork.secrets: Allow", "forkSecrets", pool.AnnotationAllowSecrets} {
		if !strings.Contains(message, text) {
			w.t.Errorf("sandbox %s has message %q, which does not name %s", s.Name, message, text)
		}
	}
	if sandbox.PhaseOf(s) != sandbox.Starting || sandbox.DeadForGood(s) || machine.startsOf(s) > 0 {
		w.t.Errorf("sandbox %s is %s and was started %d times", s.Name, sandbox.PhaseOf(s), machine.startsOf(s))
	}
	if ready := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); ready.ObservedGeneration != s.Generation {
		w.t.Errorf("sandbox %s has a condition of generation %d, want %d", s.Name, ready.ObservedGeneration, s.Generation)
	}
}

// originsWithSecrets verifies that a Sandbox starts from a checkpoint with secrets of another claim only
// if its spec allows that.
func originsWithSecrets(t *testing.T, cfg Config) {
	w := idleWorld(t, cfg)
	w.mu.Lock()
	w.noNode = true
	w.mu.Unlock()
	w.start(Tuning{})
	machine := NewMachine()
	stop := sync.OnceFunc(cfg.StartSandboxes(t, machine, false))
	defer func() { stop() }()
	w.runs(w.sandbox("s", func(s *agents.Sandbox) { s.Annotations = map[string]string{pool.AnnotationBoundEnv: "true"} }), true)
	c := w.phase(w.checkpoint("c", "s"), barchan.CheckpointReady, "")
	if !c.Status.Source.Secrets {
		t.Fatalf("the checkpoint has no secrets: %+v", c.Status.Source)
	}
	mine := w.sandbox("mine", restoring("c"))
	other := w.sandbox("other", restoring("c"))
	later := w.sandbox("later", restoring("c", func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeSuspended }))
	w.isRefused(mine, machine)
	w.isRefused(other, machine)
	w.until("it is suspended", func() (bool, string) { return sandbox.Suspended(get(w, later)), "" })
	change(w, later, func(s *agents.Sandbox) { s.Spec.OperatingMode = agents.ModeRunning })
	w.isRefused(later, machine)

	change(w, mine, allowed)
	w.runs(mine, true)
	change(w, later, allowSecrets)
	w.runs(later, true)
	w.runs(w.sandbox("policy", restoring("c", allowed)), true)
	w.runs(w.sandbox("request", restoring("c", allowSecrets)), true)
	if got := w.phase(w.checkpoint("of-request", "request"), barchan.CheckpointReady, ""); !got.Status.Source.Secrets {
		t.Error("leave for one is leave for those that start from it")
	}
	if got := w.phase(w.checkpoint("of-policy", "policy"), barchan.CheckpointReady, ""); got.Status.Source.Secrets {
		t.Error("the policy that hands secrets on is not noted in the checkpoint")
	}
	w.runs(w.sandbox("free", restoring("of-policy")), false)

	// A sandbox that has run needs no permission again; the setting allows all.
	change(w, mine, func(s *agents.Sandbox) { s.Spec.Barchan.Fork = nil })
	w.isRefused(other, machine)
	stop()
	stop = sync.OnceFunc(cfg.StartSandboxes(t, machine, true))
	w.runs(other, true)
	w.runs(mine, true)
	if n := machine.startsOf(mine); n != 1 {
		t.Errorf("it was started %d times", n)
	}
}
