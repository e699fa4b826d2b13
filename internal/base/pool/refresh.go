package pool

import (
	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// Refresh updates a sandbox that is not written yet from its template's current fields outside the
// revision: labels and annotations of the Pod, and the policies that act on a claimed sandbox; and its
// networkPolicy, which is part of it. The container does not change, if both are of one revision, nor
// does the origin of a written sandbox, which may be a checkpoint of the template's warm-up and cannot
// change. Call it on the result of [Adopt], before the claim's own settings: it replaces existing
// ones.
func Refresh(s *agents.Sandbox, t *extensions.SandboxTemplate) {
	s.Spec.PodTemplate.ObjectMeta = *t.Spec.PodTemplate.ObjectMeta.DeepCopy()
	was := s.Spec.Barchan
	s.Spec.Barchan = nil
	if b := t.Spec.Barchan; b != nil && b.Sandbox != nil {
		s.Spec.Barchan = b.Sandbox.DeepCopy()
	}
	if rules := extensions.ManagedPolicy(t); rules != nil {
		if s.Spec.Barchan == nil {
			s.Spec.Barchan = &agents.BarchanSpec{}
		}
		own := agents.NetworkPolicy(*rules.DeepCopy())
		s.Spec.Barchan.NetworkPolicy = &own
	}
	if s.UID != "" {
		keepOrigin(s, was)
	}
	agents.SetDefaults(s)
}

// keepOrigin restores the origin that a sandbox was started from.
func keepOrigin(s *agents.Sandbox, was *agents.BarchanSpec) {
	var origin *agents.RestoreSource
	if was != nil {
		origin = was.Restore
	}
	if s.Spec.Barchan == nil && origin == nil {
		return
	}
	if s.Spec.Barchan == nil {
		s.Spec.Barchan = &agents.BarchanSpec{}
	}
	s.Spec.Barchan.Restore = origin
}
