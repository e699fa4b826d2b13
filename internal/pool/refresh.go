package pool

import (
	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// Refresh gives a sandbox that is not written yet what its template says now and what is no
// part of the revision: labels and annotations, and the policies that act on a claimed
// sandbox. What runs stays as it is. Between [Adopt] and the claim's own wishes.
func Refresh(s *agents.Sandbox, t *extensions.SandboxTemplate) {
}
