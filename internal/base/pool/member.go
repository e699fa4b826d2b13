package pool

import (
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// LabelOrigin is the UID of the pool through which a sandbox was claimed, warm or cold.
	LabelOrigin = "barchan.dev/warm-pool"
	// AnnotationTemplateID is the ID of the template of a sandbox. Its name is in
	// [agents.AnnotationTemplateRef]. On a template that a build made it is [BuiltTemplateID].
	AnnotationTemplateID = "barchan.dev/template-id"
	// AnnotationTemplateName is that template's [TemplateName], if it differs from its object's.
	AnnotationTemplateName = "barchan.dev/template-name"
	// AnnotationTemplateNamespace is that template's namespace.
	AnnotationTemplateNamespace = "barchan.dev/template-namespace"
	// AnnotationForkedFrom is the ID of the sandbox that a fork is a copy of, which may be gone.
	AnnotationForkedFrom = "barchan.dev/forked-from"
	// AnnotationPending is "true" on a cold-started sandbox of the API until its create is complete.
	AnnotationPending = "barchan.dev/idempotency-pending"
	// AnnotationClaimedAt is when a sandbox got its owner, by a claim or at creation, as RFC 3339 with
	// nanoseconds. It never changes.
	AnnotationClaimedAt = "barchan.dev/claimed-at"
	// AnnotationClaimedBy is the identity of the process that claimed a member: a replica, or the leader of the controllers.
	AnnotationClaimedBy = "barchan.dev/claimed-by"
	// AnnotationCreatedByKey is the name of the API key whose request created a sandbox. It is for people: a user who may
	// change the sandbox may change it.
	AnnotationCreatedByKey = "barchan.dev/created-by-key"
	// AnnotationClaimWaits is what a claim waited for before its sandbox was written, in the form of [Waits].
	AnnotationClaimWaits = "barchan.dev/claim-waits"
	// AnnotationResumedAt is when the API last resumed a sandbox, in the same form.
	AnnotationResumedAt = "barchan.dev/resumed-at"
	// AnnotationIdempotencyKey is the hash of the key of the request that created a sandbox.
	AnnotationIdempotencyKey = "barchan.dev/idempotency-key"
)

// TemplateOf returns the name of a pool's template.
func TemplateOf(p *extensions.SandboxWarmPool) types.NamespacedName {
	key := types.NamespacedName{Namespace: p.Namespace, Name: p.Spec.SandboxTemplateRef.Name}
	if b := p.Spec.Barchan; b != nil && b.TemplateNamespace != "" {
		key.Namespace = b.TemplateNamespace
	}
	return key
}

// templateLead is the first letter of templates' IDs, which distinguishes them from sandboxes'.
const templateLead = "t"

// TemplateID returns the ID of a template: 20 lower-case letters and digits. It is that of the object, or, where the
// annotation has that, of its name, which the objects of all its tags share.
func TemplateID(t *extensions.SandboxTemplate) string {
	name, _ := t.NameAndTag()
	if id := BuiltTemplateID(t.Namespace, name); t.Annotations[AnnotationTemplateID] == id {
		return id
	}
	return templateIDOf(t.UID)
}

// BuiltTemplateID returns the ID of a template that a build makes. Clients get it before the template exists.
func BuiltTemplateID(namespace, name string) string {
	return templateIDOf(types.UID(namespace + "/" + name)) // no UID has a slash
}

func templateIDOf(uid types.UID) string { return templateLead + string(sandbox.IDOf(uid))[1:] }

// TemplateName returns the users' name of a template, without a tag. E2B's names may have underscores, which object
// names cannot: such a name is an alias of the template, the first one if there are several.
func TemplateName(t *extensions.SandboxTemplate) string {
	if t.Spec.Barchan != nil {
		for _, alias := range t.Spec.Barchan.Aliases {
			if strings.Contains(alias, "_") {
				return alias
			}
		}
	}
	name, _ := t.NameAndTag()
	return name
}

// NewSandbox returns a sandbox of a template, not written yet, with the template's revision. The
// caller sets its name and own fields.
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

// NewMember returns a member of a pool, not written yet. The server generates its name.
func NewMember(p *extensions.SandboxWarmPool, t *extensions.SandboxTemplate, revision string) *agents.Sandbox {
	s := NewSandbox(t, revision, p.Namespace)
	s.GenerateName = p.Name + "-"
	s.Labels[agents.LabelWarmPoolSandbox] = string(p.UID)
	s.Labels[agents.LabelLaunchType] = agents.LaunchWarm
	s.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(p, extensions.GroupVersion.WithKind("SandboxWarmPool"))}
	return s
}

// MemberOf returns the UID of the pool of an unclaimed member; empty for others.
func MemberOf(s *agents.Sandbox) types.UID { return types.UID(s.Labels[agents.LabelWarmPoolSandbox]) }

// OriginOf returns the UID of the pool through which a sandbox was claimed; empty for others.
func OriginOf(s *agents.Sandbox) types.UID { return types.UID(s.Labels[LabelOrigin]) }

// RevisionOf returns the template revision of a sandbox; empty without a template.
func RevisionOf(s *agents.Sandbox) string { return s.Labels[agents.LabelTemplateHash] }

// TemplateKey returns the name of the template of a sandbox, or of a checkpoint of a warm-up; empty without one.
func TemplateKey(o metav1.Object) types.NamespacedName {
	notes := o.GetAnnotations()
	return types.NamespacedName{Namespace: notes[AnnotationTemplateNamespace], Name: notes[agents.AnnotationTemplateRef]}
}

// RevisionFor returns the revision of a sandbox of this template; empty for a sandbox of another one, which is not the template's
// even if its content is the same.
func RevisionFor(s *agents.Sandbox, template types.NamespacedName) string {
	if TemplateKey(s) != template {
		return ""
	}
	return RevisionOf(s)
}

// Fits reports whether a claim may get a sandbox, as far as its template is concerned: it is of the template, has the
// revision, which must be the template's current one, and is not ending or ended.
func Fits(s *agents.Sandbox, template types.NamespacedName, revision string) bool {
	return revision != "" && RevisionFor(s, template) == revision && !sandbox.DeadForGood(s)
}

// Spare reports whether a sandbox is an unclaimed member of a pool that can be claimed now.
func Spare(s *agents.Sandbox) bool {
	return MemberOf(s) != "" && sandbox.PhaseOf(s) == sandbox.Running && sandbox.Ready(s)
}

// Adopt turns a copy of a member into the sandbox of a claim: nothing of the pool but its origin
// stays. An annotation has the name of its Pod, as upstream's does. owner, if any, controls it from now on. The caller writes it on the
// condition that it has not changed since it was read.
func Adopt(member *agents.Sandbox, owner *metav1.OwnerReference) *agents.Sandbox {
	s := member.DeepCopy()
	s.Labels[LabelOrigin] = string(MemberOf(member))
	s.Labels[agents.LabelLaunchType] = agents.LaunchWarm
	delete(s.Labels, agents.LabelWarmPoolSandbox)
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[AnnotationClaimedAt] = barchan.ExactNow()
	s.Annotations[agents.AnnotationPodName] = sandbox.PodName(member)
	s.OwnerReferences = nil
	if owner != nil {
		s.OwnerReferences = []metav1.OwnerReference{*owner}
		s.Labels[agents.LabelClaimUID] = string(owner.UID)
	}
	return s
}

// StartedAt is when a sandbox last began to run, but not before its claim or resume. Objects keep seconds, in
// which lists would have no order; the API's annotations have nanoseconds.
func StartedAt(s *agents.Sandbox) time.Time {
	at := s.CreationTimestamp.UTC()
	if b := s.Status.Barchan; b != nil && b.StartedAt != nil {
		at = b.StartedAt.UTC()
	}
	for _, name := range []string{AnnotationClaimedAt, AnnotationResumedAt} {
		if exact := barchan.ExactTime(s, name); exact.After(at) {
			at = exact
		}
	}
	return at
}
