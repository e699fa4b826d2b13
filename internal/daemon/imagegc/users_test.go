package imagegc

import (
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Issue 11: image rm removed what templates, sandboxes and checkpoints use.
func TestImageInUseIsNotRemoved(t *testing.T) {
	const full = "docker.io/library/a:latest"
	pod := func(image string) corev1.PodSpec {
		return corev1.PodSpec{Containers: []corev1.Container{{Image: image}}}
	}
	object := func(name, image string, conditions ...metav1.Condition) agents.Sandbox {
		s := agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}}
		s.Spec.PodTemplate.Spec, s.Status.Conditions = pod(image), conditions
		return s
	}
	template := func(name, image string) extensions.SandboxTemplate {
		x := extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		x.Spec.PodTemplate.Spec = pod(image)
		return x
	}
	build := func(name string, phase barchan.TemplateBuildPhase) barchan.TemplateBuild {
		b := barchan.TemplateBuild{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		b.Spec.From, b.Status.Phase = &barchan.BuildSource{Image: "a"}, phase
		return b
	}
	staged, prepares := build("s", barchan.BuildBuilding), object("prepares", "b")
	staged.Spec.From.Image, staged.Spec.Stages = "b", []barchan.BuildStage{{From: barchan.BuildSource{TemplateName: "t"}}, {From: barchan.BuildSource{Image: "a"}}}
	prepares.Spec.PodTemplate.Spec.InitContainers = []corev1.Container{{Image: "a"}}
	made, waits := sandbox.Ref{UID: "made"}, object("waits", "a")
	ready := metav1.Condition{Type: agents.ConditionReady, Status: metav1.ConditionTrue}
	deleted := object("made", "a", ready)
	deleted.DeletionTimestamp = new(metav1.Now())
	waited := object("waits", "a")
	waited.DeletionTimestamp = new(metav1.Now())
	ended := metav1.Condition{Type: agents.ConditionFinished, Status: metav1.ConditionTrue}
	for name, give := range map[string]struct {
		made        []sandbox.Ref
		checkpoints []sandbox.CheckpointRef
		objects     []agents.Sandbox
		templates   []extensions.SandboxTemplate
		builds      []barchan.TemplateBuild
		plain, hard string // what the refusals name, without and with force; empty means none
	}{
		"nothing":            {objects: []agents.Sandbox{object("other", "b")}, templates: []extensions.SandboxTemplate{template("t", "a:2")}},
		"a sandbox":          {made: []sandbox.Ref{made}, plain: string(sandbox.IDOf("made")), hard: string(sandbox.IDOf("made"))},
		"one that waits":     {objects: []agents.Sandbox{waits}, plain: string(sandbox.IDOf("waits")), hard: "sandboxes " + string(sandbox.IDOf("waits"))},
		"of an older one":    {objects: []agents.Sandbox{object("runs", "a", ready), object("ended", "a", ended)}},
		"one being deleted":  {made: []sandbox.Ref{made}, objects: []agents.Sandbox{deleted, waited}},
		"a checkpoint":       {checkpoints: []sandbox.CheckpointRef{{Namespace: "ns", Name: "c"}}, plain: "checkpoints ns/c", hard: "checkpoints ns/c"},
		"a template":         {templates: []extensions.SandboxTemplate{template("t", "library/a")}, plain: "templates ns/t; delete them first, or use --force"},
		"a build":            {builds: []barchan.TemplateBuild{build("b", ""), build("done", barchan.BuildReady)}, plain: "builds ns/b; delete", hard: "builds ns/b; delete"},
		"a stage of a build": {builds: []barchan.TemplateBuild{staged}, plain: "builds ns/s; delete", hard: "builds ns/s; delete"},
		"an init container":  {objects: []agents.Sandbox{prepares}, plain: string(sandbox.IDOf("prepares")), hard: string(sandbox.IDOf("prepares"))},
		"all":                {made: []sandbox.Ref{made}, templates: []extensions.SandboxTemplate{template("t", full)}, plain: "; templates ns/t; delete them first", hard: string(sandbox.IDOf("made")) + "; delete"},
		"more than it has":   {made: make([]sandbox.Ref, 13), plain: ", 3 more; delete", hard: "3 more"},
	} {
		t.Run(name, func(t *testing.T) {
			have := objects{sandboxes: give.objects, templates: give.templates, builds: give.builds}
			u := have.users(full, give.made, give.checkpoints)
			for _, x := range []struct {
				force bool
				names string
			}{{false, give.plain}, {true, give.hard}} {
				err := u.Refusal("a", x.force)
				if (err != nil) != (x.names != "") || (err != nil && !errors.Is(err, errs.ErrConflict)) || !strings.Contains(errs.Text(orNone(err)), x.names) {
					t.Errorf("force %t: %v, want %q", x.force, err, x.names)
				}
			}
		})
	}
}

func orNone(err error) error {
	if err == nil {
		return errors.New("")
	}
	return err
}
