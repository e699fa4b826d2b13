package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
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
		w.tags(s, "default", "v1") // neither is left behind
	},
	cleanup: removeBuilt,
}

// assignTags points two tags at a build; removeTags removes them.
var (
	assignTags = operation{
		name: "assignment of tags", storeAfter: neverOnDisk, prepare: builtSubject, do: assignToSubject,
		check: func(w *fixture, s *subject) {
			w.tags(s, "default", "stable", "v1")
			w.need(createOf(w.t.Context(), w, s, s.name+":stable"))
			if got := w.exec(s.id, "cat /tmp/built"); got != s.name {
				w.t.Errorf("a sandbox of the tag has %q", got)
			}
		}, cleanup: removeBuilt,
	}
	removeTags = operation{
		name: "removal of tags", storeAfter: neverOnDisk,
		prepare: func(w *fixture) *subject {
			s := builtSubject(w)
			w.need(assignToSubject(w.t.Context(), w, s))
			return s
		},
		do: func(ctx context.Context, w *fixture, s *subject) error {
			_, err := w.send(ctx, http.MethodDelete, "/templates/tags", "", map[string]any{"name": s.name, "tags": []string{"v1", "stable"}}, nil)
			return err
		},
		check: func(w *fixture, s *subject) { w.tags(s, "default") }, cleanup: removeBuilt,
	}
)

func builtSubject(w *fixture) *subject {
	s := newSubject("tag")
	w.need(buildOf(w.t.Context(), w, s, &barchan.TemplateBuildSpec{
		TemplateName: s.name, From: &barchan.BuildSource{TemplateName: "warm"}, Steps: []barchan.BuildStep{{Type: barchan.StepRun, Args: []string{"echo " + s.name + " > /tmp/built"}}},
	}))
	return s
}

func assignToSubject(ctx context.Context, w *fixture, s *subject) error {
	_, err := w.send(ctx, http.MethodPost, "/templates/tags", "", map[string]any{"target": s.name, "tags": []string{"v1", "stable"}}, nil)
	return err
}

// tags fails unless the subject's template has these tags, each of its build and with the same checkpoint.
func (w *fixture) tags(s *subject, want ...string) {
	w.t.Helper()
	var list extensions.SandboxTemplateList
	w.need(w.objects.List(w.t.Context(), &list, client.InNamespace("default")))
	var got []string
	checkpoints := map[string]bool{}
	for i := range list.Items {
		t := &list.Items[i]
		name, tag := t.NameAndTag()
		if name != s.name {
			continue
		}
		got = append(got, tag)
		checkpoints[t.Spec.Barchan.Sandbox.Restore.CheckpointName] = true
		if t.Labels[barchan.LabelBuild] != s.name {
			w.t.Errorf("tag %s has the labels %v", tag, t.Labels)
		}
	}
	if slices.Sort(got); !slices.Equal(got, want) || len(checkpoints) != 1 {
		w.t.Errorf("tags %v of checkpoints %v, want %v", got, checkpoints, want)
	}
}

// removeBuilt removes a subject, its build and what that made.
func removeBuilt(w *fixture, s *subject) {
	if s.id != "" {
		killSubject(w, s)
	}
	objects := []client.Object{&barchan.TemplateBuild{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name}}}
	for _, tag := range []string{"default", "v1", "stable"} {
		objects = append(objects, &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: extensions.TagObject(s.name, tag)}})
	}
	for _, o := range objects {
		w.need(client.IgnoreNotFound(w.objects.Delete(w.t.Context(), o)))
	}
	w.need(w.objects.DeleteAllOf(w.t.Context(), &barchan.Checkpoint{}, client.InNamespace("default"), client.MatchingLabels{barchan.LabelPurpose: barchan.PurposeBuild}))
	w.noCheckpoint()
}

// buildSubject asks for a build, once, and waits for its end.
func buildSubject(ctx context.Context, w *fixture, s *subject) error {
	return buildOf(ctx, w, s, &barchan.TemplateBuildSpec{
		TemplateName: s.name, Tags: []string{"default", "v1"}, From: &barchan.BuildSource{TemplateName: "warm"}, StartCommand: "sleep 12345", ReadyCommand: "pgrep -f 'sleep 12345'",
		Stages: []barchan.BuildStage{{Name: "first", From: barchan.BuildSource{TemplateName: "warm"}, Steps: []barchan.BuildStep{
			{Type: barchan.StepRun, Args: []string{"echo 1 > /tmp/cached/one && cp /tmp/cached/one /tmp/one && : " + s.name, "root"}, Mounts: []barchan.BuildMount{{Type: barchan.MountCache, Target: "/tmp/cached"}}},
		}}},
		Steps: []barchan.BuildStep{
			{Type: barchan.StepCopy, Args: []string{"/tmp/one", "/tmp/steps", "user"}, From: &barchan.StageFiles{Stage: "first"}}, {Type: barchan.StepRun, Args: []string{"echo 2 >> /tmp/steps"}},
		},
	})
}

// buildOf asks for a build with the subject's name, once, and waits for its end.
func buildOf(ctx context.Context, w *fixture, s *subject, spec *barchan.TemplateBuildSpec) error {
	b := &barchan.TemplateBuild{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: s.name}, Spec: *spec}
	if err := w.objects.Create(ctx, b); client.IgnoreAlreadyExists(err) != nil {
		return err
	}
	return w.awaitBuild(ctx, b.Name)
}

// awaitBuild waits until a build of namespace default is ready.
func (w *fixture) awaitBuild(ctx context.Context, name string) error {
	for {
		b := &barchan.TemplateBuild{}
		if err := w.objects.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, b); err != nil {
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
