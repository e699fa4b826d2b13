package pool

import (
	"maps"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

const (
	// LabelOrigin is the UID of the pool through which a sandbox was claimed, warm or cold.
	LabelOrigin = "barchan.dev/warm-pool"
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
	return MemberOf(s) != "" && sandbox.PhaseOf(s) == sandbox.Running
}

// Adopt makes a copy of a member the sandbox of a claim: nothing of the pool but its origin
// stays. owner, if any, controls it from now on. The caller writes it on the condition that
// nobody else has written since it was read.
func Adopt(member *agents.Sandbox, owner *metav1.OwnerReference) *agents.Sandbox {
	s := member.DeepCopy()
	s.Labels = maps.Clone(s.Labels)
	s.Labels[LabelOrigin] = string(MemberOf(member))
	s.Labels[agents.LabelLaunchType] = agents.LaunchWarm
	delete(s.Labels, agents.LabelWarmPoolSandbox)
	s.OwnerReferences = nil
	if owner != nil {
		s.OwnerReferences = []metav1.OwnerReference{*owner}
		s.Labels[agents.LabelClaimUID] = string(owner.UID)
	}
	return s
}
