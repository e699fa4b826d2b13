package manager

import (
	"errors"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

func newPodFixture(t *testing.T) fixture {
	t.Helper()
	return newFixture(t, func(c *Config) { c.Pods = true })
}

// TestCheckpointsOfPods: what no controller of a cluster would do is refused before anything is written.
func TestCheckpointsOfPods(t *testing.T) {
	f := newPodFixture(t)
	v := f.mustCreate(t, request("base"))
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "old-v1", Labels: map[string]string{barchan.LabelSnapshot: "old", barchan.LabelTag: "v1"}}}
	f.cluster.Hold(true) // a capture would wait without end
	defer f.cluster.Hold(false)
	if err := f.cluster.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	writes := f.objects.writes.Load()
	const text = "snapshots and forks: not available on a Kubernetes cluster, where a Pod has no memory or root file system to keep"
	wantKind(t, second(f.Snapshots.Create(t.Context(), snapshots.Request{Namespace: team, ID: string(v.ID)})), errors.ErrUnsupported, text)
	wantKind(t, second(f.Creates.Fork(t.Context(), forkRequest(v, 1))), errors.ErrUnsupported, text)
	wantKind(t, second(f.Creates.Create(t.Context(), request("old:v1"))), errors.ErrUnsupported, text)
	if n := f.objects.writes.Load() - writes; n != 0 {
		t.Errorf("%d writes", n)
	}
	if got := result(f.Sandboxes.CheckCheckpoints()); got != "refused" {
		t.Errorf("counted as %q, for which operators are alerted", got)
	}
}

// policies returns a change of a template's policies for its sandboxes.
func policies(b agents.BarchanSpec) func(*extensions.SandboxTemplate) {
	return func(t *extensions.SandboxTemplate) { t.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &b} }
}

const needsVolumes = "not available with memory on a Kubernetes cluster, where a Pod has no memory or root file system to keep; set "

// TestPauseOfPods: a pause that would keep more than volumes is refused before anything is written, and the sandbox runs on.
func TestPauseOfPods(t *testing.T) {
	f := newPodFixture(t)
	ctx := t.Context()
	if err := f.cluster.Create(ctx, fakecluster.Template(team, "volumes", "base", policies(agents.BarchanSpec{Suspend: agents.SuspendDelete}))); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		template string
		memory   *bool
		refused  bool
	}{
		"default":                       {"base", nil, true},
		"memory":                        {"base", new(true), true},
		"no memory":                     {"base", new(false), false},
		"default, by the template":      {"volumes", nil, false},
		"memory against the template":   {"volumes", new(true), true},
		"no memory, as by the template": {"volumes", new(false), false},
	} {
		t.Run(name, func(t *testing.T) {
			v := f.mustCreate(t, request(tt.template))
			writes := f.objects.writes.Load()
			err := f.Sandboxes.Pause(t.Context(), team, string(v.ID), tt.memory)
			if tt.refused { // no conflict, which the SDKs take for a sandbox that is paused already
				wantKind(t, err, errs.ErrInvalid, "pause: "+needsVolumes+"memory to false")
				f.wantUntouched(t, v)
				f.wantReachable(t, v.ID, true)
				if n := f.objects.writes.Load() - writes; n != 0 {
					t.Errorf("%d writes", n)
				}
				return
			}
			if s := f.object(t, v); err != nil || s.Spec.OperatingMode != agents.ModeSuspended || s.Spec.Barchan.Suspend != agents.SuspendDelete {
				t.Fatalf("%v, spec %+v", err, s.Spec)
			}
			if got, err := f.Sandboxes.Resume(t.Context(), team, string(v.ID), time.Minute, nil); err != nil || got.State != sandboxes.StateRunning {
				t.Errorf("Resume = %+v, %v", got, err)
			}
		})
	}
}

// TestAutoPauseOfPods: a sandbox whose timeout could not pause it is not created, whether the request or the template asks for the pause.
func TestAutoPauseOfPods(t *testing.T) {
	f := newPodFixture(t)
	for name, b := range map[string]agents.BarchanSpec{
		"volumes": {Suspend: agents.SuspendDelete}, "pauses": {OnTimeout: agents.TimeoutPause}, "both": {OnTimeout: agents.TimeoutPause, Suspend: agents.SuspendDelete},
	} {
		if err := f.cluster.Create(t.Context(), fakecluster.Template(team, name, "base", policies(b))); err != nil {
			t.Fatal(err)
		}
	}
	f.cluster.Fill(t, team, "base", 1)
	for name, tt := range map[string]struct {
		template string
		action   agents.TimeoutAction
		suspend  agents.SuspendMode
		refused  bool
	}{
		"shutdown":                 {"base", agents.TimeoutShutdown, "", false},
		"pause":                    {"base", agents.TimeoutPause, "", true},
		"pause without memory":     {"base", agents.TimeoutPause, agents.SuspendFiles, false},
		"pause to volumes":         {"volumes", agents.TimeoutPause, "", false},
		"template's pause":         {"pauses", "", "", true},
		"not the template's pause": {"pauses", agents.TimeoutShutdown, "", false},
		"template's to volumes":    {"both", "", "", false},
	} {
		t.Run(name, func(t *testing.T) {
			req := request(tt.template)
			req.OnTimeout, req.Suspend = tt.action, tt.suspend
			writes := f.objects.writes.Load()
			v, err := f.Creates.Create(t.Context(), req)
			switch {
			case tt.refused:
				wantKind(t, err, errs.ErrInvalid, "autoPause: "+needsVolumes+"autoPauseMemory to false")
				if n := f.objects.writes.Load() - writes; n != 0 {
					t.Errorf("%d writes", n)
				}
			case err != nil:
				t.Error(err)
			case tt.suspend != "" && f.object(t, v).Spec.Barchan.Suspend != agents.SuspendDelete:
				t.Errorf("spec %+v", f.object(t, v).Spec.Barchan)
			}
		})
	}
}
