package pool_test

import (
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	checkpoints "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

// TestWhoseVariables: one request or claim after the other brings variables, and another's never become own.
func TestWhoseVariables(t *testing.T) {
	for name, give := range map[string]struct {
		bring        []bool // by whom: true is the tenant itself
		allow        bool
		secrets, own bool
	}{
		"none":              {},
		"own":               {bring: []bool{true}, secrets: true, own: true},
		"own twice":         {bring: []bool{true, true}, secrets: true, own: true},
		"a claim's":         {bring: []bool{false}, secrets: true},
		"own, then claim's": {bring: []bool{true, false}, secrets: true},
		"claim's, then own": {bring: []bool{false, true}, secrets: true},
		"handed on":         {bring: []bool{true}, allow: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := &agents.Sandbox{}
			for _, own := range give.bring {
				pool.BindEnv(s, own)
			}
			if give.allow {
				s.Spec.Barchan = &agents.BarchanSpec{Fork: &agents.ForkPolicy{Secrets: agents.SecretsAllow}}
			}
			var source checkpoints.CheckpointSource
			pool.NoteSecrets(&source, s)
			if source.Secrets != give.secrets || source.OwnVariables != give.own || pool.BoundEnv(s) != (len(give.bring) > 0) {
				t.Errorf("secrets %v, own %v, annotations %v", source.Secrets, source.OwnVariables, s.Annotations)
			}
			if pool.AllowsSecrets(s) != give.allow {
				t.Errorf("a sandbox with variables may start from others': %v", pool.AllowsSecrets(s))
			}
		})
	}
}
