package pool

import (
	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// The environment variables that a sandbox was created with are in its memory, and cannot be taken out of
// it. The rule for starts from that memory:
//
//   - The policy of the source, spec.barchan.fork.secrets: Allow, lets everything that names its checkpoint.
//   - A template or a Sandbox object that names the checkpoint must allow it itself: [AllowsSecrets].
//   - A fork, and a create from a snapshot, by the E2B API are of the tenant that owns the source. Variables
//     that the tenant sent by that API are its own, and it need not allow anything. Those of a SandboxClaim
//     may be another party's, and the request must allow them.
//
// A sandbox that starts from such memory has the same marks, so the rule holds for its own forks.
const (
	// AnnotationBoundEnv is "true" on a sandbox that was created with variables, or started from such memory.
	AnnotationBoundEnv = "barchan.dev/bound-env"
	// AnnotationOwnEnv is "true" beside it if a request by the E2B API brought all of them.
	AnnotationOwnEnv = "barchan.dev/own-env"
	// AnnotationAllowSecrets is "true" on a sandbox that may start from a checkpoint that holds variables. It
	// is for this one, and not for those that start from it.
	AnnotationAllowSecrets = "barchan.dev/allow-secrets"
)

// BindEnv marks a sandbox that gets variables. own: by a request of its tenant by the E2B API, or from
// memory that holds only such. A mark of another's variables stays.
func BindEnv(s *agents.Sandbox, own bool) {
	own = own && (!BoundEnv(s) || OwnEnv(s))
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[AnnotationBoundEnv] = "true"
	delete(s.Annotations, AnnotationOwnEnv)
	if own {
		s.Annotations[AnnotationOwnEnv] = "true"
	}
}

// BoundEnv reports whether a sandbox holds variables that it was created with.
func BoundEnv(s *agents.Sandbox) bool { return s.Annotations[AnnotationBoundEnv] == "true" }

// OwnEnv reports whether all of those were brought by the E2B API.
func OwnEnv(s *agents.Sandbox) bool { return s.Annotations[AnnotationOwnEnv] == "true" }

// NoteSecrets records in the source of a checkpoint what the memory of its sandbox holds.
func NoteSecrets(source *barchan.CheckpointSource, s *agents.Sandbox) {
	source.Secrets = BoundEnv(s) && !sandbox.HandsOnSecrets(s.Spec.Barchan)
	source.OwnVariables = source.Secrets && OwnEnv(s)
}

// AllowsSecrets reports whether a sandbox may start from a checkpoint that holds variables: by its own
// policy, or because the API allowed it at creation.
func AllowsSecrets(s *agents.Sandbox) bool {
	return s.Annotations[AnnotationAllowSecrets] == "true" || sandbox.HandsOnSecrets(s.Spec.Barchan)
}
