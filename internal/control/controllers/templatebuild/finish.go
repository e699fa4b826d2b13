package templatebuild

import (
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
)

// writeTries bounds the writes of a template that others change.
const writeTries = 5

// finish writes the template and the end of the build.
func (w *work) finish(ctx context.Context) error {
	blueprint, policies, err := w.Result(ctx)
	if err != nil {
		return err
	}
	t, err := w.writeTags(ctx, pool.Result{Build: w.Build.Name, Blueprint: blueprint, Policies: policies})
	if err != nil {
		return err
	}
	status := w.Build.Status.DeepCopy()
	status.Phase, status.TemplateID, status.CompletedAt = barchan.BuildReady, pool.TemplateID(t), new(metav1.Now())
	if policies.Restore != nil {
		status.CheckpointName = policies.Restore.CheckpointName
	}
	w.ready(status, metav1.ConditionTrue, reasonBuilt, "the template has its result")
	return w.write(ctx, status)
}

// tagsOf returns the tags that a build writes.
func tagsOf(b *barchan.TemplateBuild) []string {
	if len(b.Spec.Tags) == 0 {
		return []string{barchan.DefaultTag}
	}
	return b.Spec.Tags
}

// checkTags refuses a build whose tags it cannot write.
func (w *work) checkTags(ctx context.Context) error {
	for _, tag := range tagsOf(w.Build) {
		if _, err := w.template(ctx, tag); err != nil {
			return err
		}
	}
	return nil
}

// template returns the object of a tag as it is; nil if there is none. One that no build has made is refused.
func (w *work) template(ctx context.Context, tag string) (*extensions.SandboxTemplate, error) {
	t, name := &extensions.SandboxTemplate{}, w.Build.Spec.TemplateName
	err := w.r.Client.Get(ctx, client.ObjectKey{Namespace: w.Build.Namespace, Name: extensions.TagObject(name, tag)}, t)
	if apierrors.IsNotFound(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read tag %s of template %s: %w", tag, name, err)
	}
	if t.Labels[barchan.LabelBuild] == "" {
		return nil, buildlog.Refuse(barchan.BuildStepBase, "spec.templateName: template '%s' exists, and was not made by a build; choose another name, or delete it", t.Name)
	}
	if own, ownTag := t.NameAndTag(); own != name || ownTag != tag {
		return nil, buildlog.Refuse(barchan.BuildStepBase, "spec.tags: '%s:%s' would have the same object as '%s:%s'; choose another tag", name, tag, own, ownTag)
	}
	return t, nil
}

// writeTags writes the result to each tag, and returns one of them.
func (w *work) writeTags(ctx context.Context, result pool.Result) (t *extensions.SandboxTemplate, err error) {
	name := w.Build.Spec.TemplateName
	for _, tag := range tagsOf(w.Build) {
		if t, err = w.writeTag(ctx, tag, result); err != nil {
			return nil, err
		}
		failpoint.Reach("templatebuild/template")
		if tag == barchan.DefaultTag {
			w.Log.Say(builds.LevelInfo, "template %s is ready", name)
		} else {
			w.Log.Say(builds.LevelInfo, "template %s:%s is ready", name, tag)
		}
	}
	return t, nil
}

// writeTag writes the result to a tag. Of one that exists it keeps what a build does not decide.
func (w *work) writeTag(ctx context.Context, tag string, result pool.Result) (*extensions.SandboxTemplate, error) {
	var failure error
	for range writeTries {
		t, err := w.template(ctx, tag)
		if err != nil {
			return nil, err
		}
		if t != nil {
			pool.SetBuild(t, result)
			failure = w.r.Client.Update(ctx, t)
		} else {
			if t, err = w.newTag(ctx, tag); err != nil {
				return nil, err
			}
			pool.SetBuild(t, result)
			failure = w.r.Quota.Create(ctx, w.r.Client, t)
		}
		switch {
		case failure == nil:
			return t, nil
		case errors.Is(failure, errs.ErrExhausted):
			return nil, buildlog.Refuse(barchan.BuildStepFinalize, "template '%s': %s", t.Name, errs.Text(failure))
		case apierrors.IsInvalid(failure), apierrors.IsBadRequest(failure):
			return nil, buildlog.Refuse(barchan.BuildStepFinalize, "template '%s': %s", t.Name, failure.Error())
		case !apierrors.IsConflict(failure) && !apierrors.IsAlreadyExists(failure):
			return nil, fmt.Errorf("write template %s: %w", t.Name, failure)
		}
	}
	return nil, fmt.Errorf("write tag %s of template %s: %w", tag, w.Build.Spec.TemplateName, failure)
}

// newTag returns a new tag. It has the aliases and the visibility of the template's others.
func (w *work) newTag(ctx context.Context, tag string) (*extensions.SandboxTemplate, error) {
	t := pool.NewTag(w.Build.Namespace, w.Build.Spec.TemplateName, tag)
	var list extensions.SandboxTemplateList
	if err := w.r.Client.List(ctx, &list, client.InNamespace(w.Build.Namespace)); err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	for i := range list.Items {
		other := &list.Items[i]
		if name, _ := other.NameAndTag(); name == w.Build.Spec.TemplateName && other.Spec.Barchan != nil {
			t.Spec.Barchan.Aliases, t.Spec.Barchan.Public = slices.Clone(other.Spec.Barchan.Aliases), other.Spec.Barchan.Public
			break
		}
	}
	return t, nil
}
