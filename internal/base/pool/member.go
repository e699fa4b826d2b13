package pool

import (
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// LabelOrigin is the UID of the pool through which a sandbox was claimed, warm or cold.
	LabelOrigin = "barchan.dev/warm-pool"
	// AnnotationTemplateID is the ID of the template that a sandbox was made of. Its name is in
	// [agents.AnnotationTemplateRef].
	AnnotationTemplateID = "barchan.dev/template-id"
	// AnnotationTemplateName is that template's [TemplateName], where it is another than its object's.
	AnnotationTemplateName = "barchan.dev/template-name"
	// AnnotationTemplateNamespace is where that template lies.
	AnnotationTemplateNamespace = "barchan.dev/template-namespace"
	// AnnotationClaimedAt is when a sandbox got its owner, as a member or made for it, as RFC 3339 with
	// nanoseconds. It never changes.
	AnnotationClaimedAt = "barchan.dev/claimed-at"
	// AnnotationResumedAt is when the API last resumed a sandbox, in the same form.
	AnnotationResumedAt = "barchan.dev/resumed-at"
	// AnnotationIdempotencyKey is the hash of the key of the request that a sandbox was made for.
	AnnotationIdempotencyKey = "barchan.dev/idempotency-key"
)

// TemplateOf names the template of a pool.
func TemplateOf(p *extensions.SandboxWarmPool) types.NamespacedName {
	key := types.NamespacedName{Namespace: p.Namespace, Name: p.Spec.SandboxTemplateRef.Name}
	if b := p.Spec.Barchan; b != nil && b.TemplateNamespace != "" {
		key.Namespace = b.TemplateNamespace
	}
	return key
}

// templateLead is the first letter of templates' IDs, by which they differ from sandboxes'.
const templateLead = "t"

// TemplateID is the ID of a template: 20 lower-case letters and digits.
func TemplateID(t *extensions.SandboxTemplate) string {
	return templateLead + string(sandbox.IDOf(t.UID))[1:]
}

// TemplateName is what users call a template. E2B's names may have underscores, which names of objects cannot
// have: such a name is an alias of the template, the first one if there are several, and its object has any name.
func TemplateName(t *extensions.SandboxTemplate) string {
	if t.Spec.Barchan != nil {
		for _, alias := range t.Spec.Barchan.Aliases {
			if strings.Contains(alias, "_") {
				return alias
			}
		}
	}
	return t.Name
}

// NewSandbox is a sandbox of a template that is not written yet, with the template's revision.
// Whoever makes it sets its name and what is its own.
func NewSandbox(t *extensions.SandboxTemplate, revision, namespace string) *agents.Sandbox {
	s := &agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace,
			Labels:    map[string]string{agents.LabelTemplateHash: revision, agents.LabelLaunchType: agents.LaunchCold},
			Annotations: map[string]string{
				agents.AnnotationTemplateRef: t.Name,
				AnnotationTemplateID:         TemplateID(t),
				AnnotationTemplateNamespace:  t.Namespace,
			},
			Finalizers: []string{agents.NodeFinalizer},
		},
		Spec: agents.SandboxSpec{
			SandboxBlueprint: *t.Spec.SandboxBlueprint.DeepCopy(),
			ShutdownPolicy:   agents.ShutdownDelete,
			OperatingMode:    agents.ModeRunning,
		},
	}
	if name := TemplateName(t); name != t.Name {
		s.Annotations[AnnotationTemplateName] = name
	}
	Refresh(s, t)
	return s
}

// NewMember is a member of a pool that is not written yet. The server makes up its name.
func NewMember(p *extensions.SandboxWarmPool, t *extensions.SandboxTemplate, revision string) *agents.Sandbox {
	s := NewSandbox(t, revision, p.Namespace)
	s.GenerateName = p.Name + "-"
	s.Labels[agents.LabelWarmPoolSandbox] = string(p.UID)
	s.Labels[agents.LabelLaunchType] = agents.LaunchWarm
	s.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(p, extensions.GroupVersion.WithKind("SandboxWarmPool"))}
	return s
}

// MemberOf is the UID of the pool that an unclaimed sandbox is a member of; empty for others.
func MemberOf(s *agents.Sandbox) types.UID { return types.UID(s.Labels[agents.LabelWarmPoolSandbox]) }

// OriginOf is the UID of the pool through which a sandbox was claimed; empty for others.
func OriginOf(s *agents.Sandbox) types.UID { return types.UID(s.Labels[LabelOrigin]) }

// RevisionOf is the revision of the template that a sandbox was made of; empty if of none.
func RevisionOf(s *agents.Sandbox) string { return s.Labels[agents.LabelTemplateHash] }

// Fits reports whether a claim may have a sandbox, as far as its template is concerned: it is
// of the revision, which must be the template's as it is now, and neither ends nor has ended.
func Fits(s *agents.Sandbox, revision string) bool {
	return revision != "" && RevisionOf(s) == revision && !sandbox.DeadForGood(s)
}

// Spare reports whether a sandbox is an unclaimed member of a pool that can be handed out now.
func Spare(s *agents.Sandbox) bool {
	return MemberOf(s) != "" && sandbox.PhaseOf(s) == sandbox.Running && sandbox.Ready(s)
}

// Adopt makes a copy of a member the sandbox of a claim: nothing of the pool but its origin
// stays. owner, if any, controls it from now on. The caller writes it on the condition that
// nobody else has written since it was read.
func Adopt(member *agents.Sandbox, owner *metav1.OwnerReference) *agents.Sandbox {
	s := member.DeepCopy()
	s.Labels[LabelOrigin] = string(MemberOf(member))
	s.Labels[agents.LabelLaunchType] = agents.LaunchWarm
	delete(s.Labels, agents.LabelWarmPoolSandbox)
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[AnnotationClaimedAt] = time.Now().UTC().Format(time.RFC3339Nano)
	s.OwnerReferences = nil
	if owner != nil {
		s.OwnerReferences = []metav1.OwnerReference{*owner}
		s.Labels[agents.LabelClaimUID] = string(owner.UID)
	}
	return s
}
