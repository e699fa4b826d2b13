package sandbox

import (
	"k8s.io/apimachinery/pkg/api/meta"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// ReasonSecrets is the reason of condition Ready of a sandbox that is not started because its
// checkpoint holds variables of another claim, and this is not allowed. It is started once that is
// allowed; clients should not wait for it.
const ReasonSecrets = "SecretsRefused"

// RefusedSecrets returns why a sandbox may not start from its checkpoint, and how to allow it.
func RefusedSecrets(s *agents.Sandbox) (message string, refused bool) {
	return unreadyFor(s, ReasonSecrets)
}

// HandsOnSecrets reports whether policies let others start with the variables of their sandbox's
// claim. They may be nil.
func HandsOnSecrets(policies *agents.BarchanSpec) bool {
	return policies != nil && policies.Fork != nil && policies.Fork.Secrets == agents.SecretsAllow
}

// unreadyFor returns the message of condition Ready, if it has that reason.
func unreadyFor(s *agents.Sandbox, reason string) (message string, is bool) {
	c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
	if c == nil || c.Reason != reason {
		return "", false
	}
	return c.Message, true
}
