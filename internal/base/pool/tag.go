package pool

import (
	"maps"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// Result is what a build decides of a template.
type Result struct {
	// Build is the name of the TemplateBuild.
	Build     string
	Blueprint *agents.SandboxBlueprint
	// Policies has what sandboxes start from and by whom; the rest of it is of templates that have no policies yet.
	Policies *agents.BarchanSpec
}

// ResultOf returns the result of the build that last made a template.
func ResultOf(t *extensions.SandboxTemplate) Result {
	r := Result{Build: t.Labels[barchan.LabelBuild], Blueprint: &t.Spec.SandboxBlueprint, Policies: &agents.BarchanSpec{}}
	if t.Spec.Barchan != nil && t.Spec.Barchan.Sandbox != nil {
		r.Policies = t.Spec.Barchan.Sandbox
	}
	return r
}

// NewTag returns the object of a tag of a template that builds make, not written yet, without a result.
func NewTag(namespace, template, tag string) *extensions.SandboxTemplate {
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{
		Namespace: namespace, Name: extensions.TagObject(template, tag),
		Annotations: map[string]string{AnnotationTemplateID: BuiltTemplateID(namespace, template)},
	}}
	SetTag(t, template, tag)
	return t
}

// SetTag makes a template a tag.
func SetTag(t *extensions.SandboxTemplate, template, tag string) {
	if t.Spec.Barchan == nil {
		t.Spec.Barchan = &extensions.TemplateBarchanSpec{}
	}
	t.Spec.Barchan.TagOf = nil
	if tag != agents.DefaultTag {
		t.Spec.Barchan.TagOf = &extensions.TagOf{TemplateName: template, Tag: tag}
	}
}

// SetBuild gives a template the result of a build. It keeps what a build does not decide.
func SetBuild(t *extensions.SandboxTemplate, r Result) {
	t.Labels, t.Annotations = maps.Clone(t.Labels), maps.Clone(t.Annotations)
	if t.Labels == nil {
		t.Labels = map[string]string{}
	}
	if t.Annotations == nil {
		t.Annotations = map[string]string{}
	}
	t.Labels[barchan.LabelBuild], t.Annotations[barchan.AnnotationTaggedAt] = r.Build, barchan.ExactNow()
	t.Spec.SandboxBlueprint = *r.Blueprint.DeepCopy()
	if t.Spec.Barchan == nil {
		t.Spec.Barchan = &extensions.TemplateBarchanSpec{}
	}
	policies := r.Policies.DeepCopy()
	if t.Spec.Barchan.Sandbox == nil {
		t.Spec.Barchan.Sandbox = policies
	}
	t.Spec.Barchan.Sandbox.Restore, t.Spec.Barchan.Sandbox.DefaultUser = policies.Restore, policies.DefaultUser
	extensions.SetTemplateDefaults(t)
}
