package sandbox

import (
	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/podsource"
)

// LacksObject returns which Secret, ConfigMap or key of one a sandbox waits for. It starts when that appears; clients
// should not wait for it.
func LacksObject(s *agents.Sandbox) (message string, lacks bool) {
	if message, lacks = unreadyFor(s, podsource.ReasonConfig); lacks {
		return message, true
	}
	return unreadyFor(s, podsource.ReasonMount)
}
