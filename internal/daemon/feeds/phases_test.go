package feeds

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

func TestPhases(t *testing.T) {
	pending, running, stopping := &agents.Sandbox{}, &agents.Sandbox{}, &agents.Sandbox{}
	running.Status.PodIPs = []string{"10.0.0.2"}
	running.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	stopping.DeletionTimestamp = new(metav1.Now())
	var p Phases
	for _, step := range []struct {
		older, newer *agents.Sandbox
		want         string
	}{
		{nil, pending, "map[Pending:1]"},
		{nil, running, "map[Pending:1 Running:1]"},
		{pending, running, "map[Running:2]"},
		{running, running, "map[Running:2]"},
		{running, stopping, "map[Running:1 Stopping:1]"},
		{stopping, nil, "map[Running:1]"},
		{running, nil, "map[]"},
	} {
		if p.Observe(step.older, step.newer); fmt.Sprint(p.Counts()) != step.want {
			t.Errorf("counts are %v, want %s", p.Counts(), step.want)
		}
	}
}
