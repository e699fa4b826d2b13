package pool

import (
	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// Refresh gives a sandbox that is not written yet what its template says now and what is no
// part of the revision: labels and annotations of the Pod, and the policies that act on a
// claimed sandbox. What runs stays as it is, if both are of one revision. Call it on what
// [Adopt] returned, before the claim's own wishes are set: it replaces what was there.
func Refresh(s *agents.Sandbox, t *extensions.SandboxTemplate) {
	s.Spec.PodTemplate.ObjectMeta = *t.Spec.PodTemplate.ObjectMeta.DeepCopy()
	s.Spec.Barchan = nil
	if b := t.Spec.Barchan; b != nil && b.Sandbox != nil {
		s.Spec.Barchan = b.Sandbox.DeepCopy()
	}
	agents.SetDefaults(s)
}
