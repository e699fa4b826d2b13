package sandbox

import (
	"errors"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/podsource"
)

// ErrPodRefused is in the chain of the errors that PodRefused marks.
var ErrPodRefused = errors.New("the Pod is refused")

// PodRefused marks the error of a Pod that a cluster's admission refuses until somebody changes an object, such as the label of the
// namespace with its Pod security. Text and kind stay.
func PodRefused(err error) error { return markedError{err, ErrPodRefused} }

// ReasonPodRefused is the reason of condition Ready after such an error.
const ReasonPodRefused = "PodRefused"

// LacksObject returns which Secret, ConfigMap or key of one a sandbox waits for, or why a cluster refuses its Pod. It starts when that
// has changed; clients should not wait for it.
func LacksObject(s *agents.Sandbox) (message string, lacks bool) {
	for _, reason := range []string{podsource.ReasonConfig, podsource.ReasonMount, ReasonPodRefused} {
		if message, lacks = unreadyFor(s, reason); lacks {
			return message, true
		}
	}
	return "", false
}
