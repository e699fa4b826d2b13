package podrun

import (
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// TestEnvironmentOfAgent: variables have in commands the values that kubelet gives the container's program: "$$" is a dollar. What refers to
// other variables, or comes from other objects, only kubelet knows.
func TestEnvironmentOfAgent(t *testing.T) {
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	s := &agents.Sandbox{}
	s.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Env: []corev1.EnvVar{
		{Name: "PLAIN", Value: "a $5 b"},
		{Name: "EMPTY"},
		{Name: "DOLLARS", Value: "$$5 $$$$"},
		{Name: "LITERAL", Value: "$$(PLAIN)"},
		{Name: "REFERENCE", Value: "$(PLAIN)"},
		{Name: "BOTH", Value: "$$$(PLAIN)"},
		{Name: "SECRET", ValueFrom: &corev1.EnvVarSource{}},
	}}}
	got := newRunner(Config{Tokens: tokens}).initRequest(s).EnvVars
	if want := map[string]string{"PLAIN": "a $5 b", "EMPTY": "", "DOLLARS": "$5 $$", "LITERAL": "$(PLAIN)"}; !maps.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
