package checkpointsuite

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

func running(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	s := w.running("s", func(s *agents.Sandbox) {
		s.Annotations = map[string]string{agents.AnnotationTemplateRef: "t", pool.AnnotationTemplateID: "tid", pool.AnnotationTemplateNamespace: "ns"}
		s.Spec.Barchan = &agents.BarchanSpec{
			Metadata: map[string]string{"a": "b"}, OnTimeout: agents.TimeoutPause, Wake: &agents.WakePolicy{OnTraffic: true},
		}
	})
	c := w.phase(w.checkpoint("c", "s"), barchan.CheckpointReady, "")
	checkData(t, c.Status)
	checkSource(t, s, c.Status.Source)
	from := c.Status.Source
	if !slices.Contains(c.Finalizers, barchan.NodeFinalizer) || c.Labels[barchan.LabelSandbox] != from.ID {
		t.Errorf("finalizers %v, labels %v", c.Finalizers, c.Labels)
	}
	if requests := w.node.captures(c.UID); len(requests) != 1 || requests[0].Source.UID != s.UID || requests[0].FilesOnly {
		t.Errorf("capture requests: %+v", requests)
	}
	if now := get(w, s); sandbox.PhaseOf(now) != sandbox.Running || now.Spec.OperatingMode != agents.ModeRunning {
		t.Errorf("the source is %s", sandbox.PhaseOf(now))
	}
	w.delete(c)
	w.gone(c)
	if w.node.has(c.UID) {
		t.Error("its data are still there")
	}
}

// checkData compares the status with the data on the node.
func checkData(t *testing.T, st barchan.CheckpointStatus) {
	t.Helper()
	if st.Content != barchan.ContentMemoryAndFiles || st.Size.String() != "3Mi" || st.MemorySize.String() != "2Mi" || st.Digest != "sha256:memory" ||
		st.Runtime != agents.RuntimeGVisor || st.RuntimeBuild == "" || len(st.CPUFeatures) != 1 || st.Image != "sha256:image" || st.CompletedAt == nil {
		t.Errorf("status is %+v", st)
	}
}

// checkSource compares what is kept of a sandbox with what it was.
func checkSource(t *testing.T, s *agents.Sandbox, from *barchan.CheckpointSource) {
	t.Helper()
	if from.ID != string(sandbox.IDOf(s.UID)) || from.UID != s.UID || from.Node != "n1" || from.TemplateName != "t" || from.TemplateID != "tid" || from.TemplateNamespace != "ns" || from.Secrets {
		t.Errorf("source is %+v", from)
	}
	var blueprint agents.SandboxBlueprint
	var policies agents.BarchanSpec
	if err := json.Unmarshal(from.Blueprint.Raw, &blueprint); err != nil || blueprint.PodTemplate.Spec.Containers[0].Image != "x" {
		t.Errorf("blueprint %s, %v", from.Blueprint.Raw, err)
	}
	if err := json.Unmarshal(from.Policies.Raw, &policies); err != nil || policies.Wake == nil || policies.OnTimeout != agents.TimeoutPause || policies.Metadata != nil {
		t.Errorf("policies %s, %v", from.Policies.Raw, err)
	}
}

// A source that is not kept running is captured when it is suspended, not before.
func sleepsFirst(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	s := w.running("s")
	w.freeze("s", true)
	c := w.checkpoint("c", "s", func(c *barchan.Checkpoint) { c.Spec.KeepRunning = false })
	w.phase(c, barchan.CheckpointPending, "waits for sandbox s to sleep")
	if now := get(w, s); now.Spec.OperatingMode != agents.ModeSuspended || len(w.node.captures(c.UID)) > 0 {
		t.Errorf("the source is %s, captured %d times", now.Spec.OperatingMode, len(w.node.captures(c.UID)))
	}
	w.freeze("s", false)
	change(w, s, func(s *agents.Sandbox) { s.Labels = map[string]string{"look": "again"} })
	w.phase(c, barchan.CheckpointReady, "")
	if now := get(w, s); sandbox.PhaseOf(now) != sandbox.Paused {
		t.Errorf("the source is %s", sandbox.PhaseOf(now))
	}
	// A suspended source is not resumed, and can be captured again.
	w.phase(w.checkpoint("d", "s"), barchan.CheckpointReady, "")
	if now := get(w, s); sandbox.PhaseOf(now) != sandbox.Paused {
		t.Errorf("afterwards the source is %s", sandbox.PhaseOf(now))
	}
}

func waitsForTheStart(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	s := w.sandbox("s", func(s *agents.Sandbox) { s.Spec.PodTemplate.Spec.Containers[0].Image = fakecluster.ImageSlow })
	c := w.checkpoint("c", "s")
	w.phase(c, barchan.CheckpointPending, "waits for sandbox s to start")
	change(w, s, func(s *agents.Sandbox) { s.Spec.PodTemplate.Spec.Containers[0].Image = "x" })
	w.phase(c, barchan.CheckpointReady, "")
}

func failsForGood(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	w.phase(w.checkpoint("none", "nobody"), barchan.CheckpointFailed, `spec.sandboxName: there is no sandbox "nobody"`)

	w.running("s")
	w.node.fail(fmt.Errorf("spec.content: no: %w", errs.ErrInvalid))
	c := w.phase(w.checkpoint("refused", "s"), barchan.CheckpointFailed, "spec.content: no")
	change(w, c, func(c *barchan.Checkpoint) { c.Labels["look"] = "again" })
	w.phase(w.checkpoint("fine", "s"), barchan.CheckpointReady, "")
	if n := len(w.node.captures(c.UID)); n != 1 {
		t.Errorf("got %d capture requests", n)
	}

	ends := w.sandbox("ends", func(s *agents.Sandbox) { s.Spec.PodTemplate.Spec.Containers[0].Image = fakecluster.ImageBroken })
	w.until("it has ended", func() (bool, string) { return sandbox.PhaseOf(get(w, ends)) == sandbox.Dead, "" })
	w.phase(w.checkpoint("ended", "ends"), barchan.CheckpointFailed, "spec.sandboxName: sandbox ends has ended")

	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Name: "p"}}
	p.Spec.Replicas, p.Spec.SandboxTemplateRef.Name = new(int32(1)), "none" // it keeps what it has
	w.create(p)
	w.running("spare", func(s *agents.Sandbox) { s.Labels = map[string]string{agents.LabelWarmPoolSandbox: string(p.UID)} })
	w.phase(w.checkpoint("of-spare", "spare"), barchan.CheckpointFailed, "is a spare member of a warm pool")

	deleted := w.running("deletes", func(s *agents.Sandbox) { s.Spec.Barchan = &agents.BarchanSpec{Suspend: agents.SuspendDelete} })
	w.phase(w.checkpoint("of-deletes", "deletes", func(c *barchan.Checkpoint) { c.Spec.KeepRunning = false }), barchan.CheckpointFailed, "spec.keepRunning: must be true")
	if now := get(w, deleted); now.Spec.OperatingMode != agents.ModeRunning {
		t.Error("a sandbox that keeps nothing when suspended was suspended")
	}
	w.delete(c)
	w.gone(c)
}

func triesAgain(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	w.running("s")
	full := fmt.Errorf("disk: %w", errs.ErrExhausted)
	w.node.fail(fmt.Errorf("containerd: %w", errs.ErrUnavailable), fmt.Errorf("busy: %w", errs.ErrConflict), full)
	c := w.checkpoint("c", "s")
	w.hadMessage(c, "disk; it is tried again")
	w.phase(c, barchan.CheckpointReady, "")
	if n := len(w.node.captures(get(w, c).UID)); n != 4 {
		t.Errorf("got %d capture requests", n)
	}
}

// What was to be captured is gone, and its name is another's.
func anotherOfTheName(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	s := w.running("s")
	w.node.hold(true)
	w.node.fail(fmt.Errorf("containerd: %w", errs.ErrUnavailable))
	c := w.checkpoint("c", "s")
	w.phase(c, barchan.CheckpointWriting, "")
	w.delete(s)
	w.gone(s)
	w.running("s")
	w.node.hold(false)
	now := w.phase(c, barchan.CheckpointFailed, "another one has its name")
	for _, request := range w.node.captures(now.UID) {
		if request.Source.UID != s.UID {
			t.Errorf("the other one was captured: %+v", request)
		}
	}
}

func secrets(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	bound := func(s *agents.Sandbox) { s.Annotations = map[string]string{pool.AnnotationBoundEnv: "true"} }
	for name, tt := range map[string]struct {
		change func(*agents.Sandbox)
		want   bool
	}{
		"plain": {func(*agents.Sandbox) {}, false},
		"bound": {bound, true},
		"refused": {func(s *agents.Sandbox) {
			bound(s)
			s.Spec.Barchan = &agents.BarchanSpec{Fork: &agents.ForkPolicy{Secrets: agents.SecretsRefuse}}
		}, true},
		"own": {func(s *agents.Sandbox) { pool.BindEnv(s, true) }, true},
		"allowed": {func(s *agents.Sandbox) {
			bound(s)
			s.Spec.Barchan = &agents.BarchanSpec{Fork: &agents.ForkPolicy{Secrets: agents.SecretsAllow}}
		}, false},
	} {
		w.running(name, tt.change)
		if c := w.phase(w.checkpoint(name, name), barchan.CheckpointReady, ""); c.Status.Source.Secrets != tt.want {
			t.Errorf("%s: secrets %v", name, c.Status.Source.Secrets)
		} else if own := c.Status.Source.OwnVariables; own != (name == "own") {
			t.Errorf("%s: variables of its own: %v", name, own)
		}
	}
}

func filesOnly(t *testing.T, cfg Config) {
	w := newFixture(t, cfg, Tuning{})
	w.running("s")
	c := w.phase(w.checkpoint("c", "s", func(c *barchan.Checkpoint) { c.Spec.Content = barchan.ContentFiles }), barchan.CheckpointReady, "")
	if requests := w.node.captures(c.UID); len(requests) != 1 || !requests[0].FilesOnly || c.Status.Content != barchan.ContentFiles || c.Status.MemorySize != nil || messageOf(c) != "" {
		t.Errorf("capture requests %+v, status %+v", requests, c.Status)
	}
	w.node.setClass(agents.RuntimeRunc)
	if c = w.phase(w.checkpoint("d", "s"), barchan.CheckpointReady, "class runc"); c.Status.Content != barchan.ContentFiles || c.Status.Runtime != agents.RuntimeRunc {
		t.Errorf("of class runc: %+v", c.Status)
	}
}

// A controller that ends in the middle of a capture leaves it to the next one.
func restartInTheMiddle(t *testing.T, cfg Config) {
	w := idleWorld(t, cfg)
	stop := w.start(Tuning{})
	s := w.running("s")
	w.node.hold(true)
	c := w.checkpoint("c", "s")
	w.phase(c, barchan.CheckpointWriting, "")
	w.until("it is being captured", func() (bool, string) { return w.node.waiting() > 0, "" })
	stop()
	c = get(w, c)
	if c.Status.Phase != barchan.CheckpointWriting {
		t.Errorf("left as %+v", c.Status)
	}
	w.node.put(sandbox.CheckpointRef{Namespace: c.Namespace, Name: c.Name, UID: c.UID}) // it was done all but for the answer
	w.delete(s)
	w.gone(s)
	w.node.hold(false)
	w.start(Tuning{})
	if now := w.phase(c, barchan.CheckpointReady, ""); now.Status.Source.UID != s.UID {
		t.Errorf("source is %+v", now.Status.Source)
	}
}

func imports(t *testing.T, cfg Config) {
	w := idleWorld(t, cfg)
	stop := w.start(Tuning{})
	asImport := func(c *barchan.Checkpoint) { c.Spec.Origin = barchan.OriginImport }
	c := w.phase(w.checkpoint("c", "elsewhere", asImport), barchan.CheckpointPending, "waits for the data that are imported")
	if !slices.Contains(c.Finalizers, barchan.NodeFinalizer) {
		t.Error("nothing holds its object while data may come")
	}
	w.node.put(sandbox.CheckpointRef{Namespace: c.Namespace, Name: c.Name, UID: c.UID})
	change(w, c, func(c *barchan.Checkpoint) { c.Annotations = map[string]string{"barchan.dev/import-changed": "1"} })
	c = w.phase(c, barchan.CheckpointReady, "")
	if len(w.node.captures(c.UID)) > 0 {
		t.Error("an import was captured")
	}
	stop()
	w.start(Tuning{ImportPatience: time.Millisecond})
	w.phase(w.checkpoint("late", "elsewhere", asImport), barchan.CheckpointFailed, "the import was interrupted")
}

// interruptedImport: what a server was importing when it ended has failed as soon as another runs, be it
// within the same second.
func interruptedImport(t *testing.T, cfg Config) {
	w := idleWorld(t, cfg)
	stop := w.start(Tuning{})
	c := w.checkpoint("c", "elsewhere", func(c *barchan.Checkpoint) {
		c.Spec.Origin = barchan.OriginImport
		c.Annotations = map[string]string{"barchan.dev/import-changed": time.Now().UTC().Format(time.RFC3339Nano)}
	})
	w.phase(c, barchan.CheckpointPending, "waits for the data that are imported")
	stop()
	w.start(Tuning{})
	w.phase(c, barchan.CheckpointFailed, "the import was interrupted by the end of the server")
}

// reason is that of a checkpoint's one condition.
func reason(c *barchan.Checkpoint) string {
	if ready := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady); ready != nil {
		return ready.Reason
	}
	return ""
}
