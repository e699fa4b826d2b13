package e2e

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// buildTemplate has two layers, a stage, a cache, memory, and two tags.
var buildTemplate = operation{
	name: "template build", storeAfter: neverOnDisk, prepare: newSubjectOf("build"), do: buildSubject,
	check: func(w *fixture, s *subject) {
		w.need(createOf(w.t.Context(), w, s, s.name))
		w.meet(s.id)
		if got := w.exec(s.id, "cat /tmp/steps"); got != "1\n2" {
			w.t.Errorf("the steps have written %q", got)
		}
		w.exec(s.id, "pgrep -f 'sleep 12345'")
		for _, name := range []string{s.name, s.name + ".v1"} { // neither tag is left behind
			t := &extensions.SandboxTemplate{}
			if err := w.objects.Get(w.t.Context(), client.ObjectKey{Namespace: "default", Name: name}, t); err != nil || t.Labels[barchan.LabelBuild] != s.name {
				w.t.Errorf("the object %s: %v %v", name, err, t.Labels)
			}
		}
	},
	cleanup: func(w *fixture, s *subject) {
		if s.id != "" {
			killSubject(w, s)
		}
		for _, o := range []client.Object{&barchan.TemplateBuild{}, &extensions.SandboxTemplate{}} {
			o.SetNamespace("default")
			o.SetName(s.name)
			w.need(client.IgnoreNotFound(w.objects.Delete(w.t.Context(), o)))
		}
		v1 := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name + ".v1"}}
		w.need(client.IgnoreNotFound(w.objects.Delete(w.t.Context(), v1)))
		w.need(w.objects.DeleteAllOf(w.t.Context(), &barchan.Checkpoint{}, client.InNamespace("default"), client.MatchingLabels{barchan.LabelPurpose: barchan.PurposeBuild}))
		w.noCheckpoint()
	},
}

// buildSubject asks for a build, once, and waits for its end.
func buildSubject(ctx context.Context, w *fixture, s *subject) error {
	b := &barchan.TemplateBuild{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name}, Spec: barchan.TemplateBuildSpec{
		TemplateName: s.name, Tags: []string{"default", "v1"}, From: &barchan.BuildSource{TemplateName: "warm"}, StartCommand: "sleep 12345", ReadyCommand: "pgrep -f 'sleep 12345'",
		Stages: []barchan.BuildStage{{Name: "first", From: barchan.BuildSource{TemplateName: "warm"}, Steps: []barchan.BuildStep{
			{Type: barchan.StepRun, Args: []string{"echo 1 > /tmp/cached/one && cp /tmp/cached/one /tmp/one && : " + s.name, "root"}, Mounts: []barchan.BuildMount{{Type: barchan.MountCache, Target: "/tmp/cached"}}},
		}}},
		Steps: []barchan.BuildStep{
			{Type: barchan.StepCopy, Args: []string{"/tmp/one", "/tmp/steps", "user"}, From: &barchan.StageFiles{Stage: "first"}}, {Type: barchan.StepRun, Args: []string{"echo 2 >> /tmp/steps"}},
		},
	}}
	if err := w.objects.Create(ctx, b); client.IgnoreAlreadyExists(err) != nil {
		return err
	}
	for {
		if err := w.objects.Get(ctx, client.ObjectKeyFromObject(b), b); err != nil {
			return err
		}
		switch b.Status.Phase {
		case barchan.BuildReady:
			return nil
		case barchan.BuildFailed:
			return fmt.Errorf("the build failed: %+v", b.Status)
		case barchan.BuildPending, barchan.BuildBuilding:
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %+v", ctx.Err(), b.Status)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
