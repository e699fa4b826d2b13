package manager

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
)

// Issue 11: clients of a sandbox that had ended were answered that it does not exist, and not why.
func TestEndedSandboxReportsWhy(t *testing.T) {
	f := newFixture(t)
	check := func(t *testing.T, v sandboxes.Sandbox, why string) {
		t.Helper()
		_, err := f.Sandboxes.Get(t.Context(), team, string(v.ID))
		wantKind(t, err, errs.ErrNotFound, "doesn't exist or you don't have access to it: it has ended: "+why)
		_, err = f.Sandboxes.Get(t.Context(), "team-b", string(v.ID))
		if message, _ := errs.PublicMessage(err); message != errs.Text(sandboxes.NotFound(string(v.ID))) {
			t.Errorf("another tenant is answered %q", message)
		}
	}
	v := f.mustCreate(t, request("base"))
	s, err := f.cluster.Sandbox(t.Context(), types.NamespacedName{Namespace: team, Name: v.Name})
	if err != nil {
		t.Fatal(err)
	}
	meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{
		Type: agents.ConditionFinished, Status: metav1.ConditionTrue, Reason: agents.ReasonPodFailed, Message: "out of memory",
	})
	if err := f.cluster.Status().Update(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	check(t, v, "out of memory")
	_ = f.Sandboxes.Kill(t.Context(), team, string(v.ID)) // answers that it has ended
	check(t, v, "out of memory")

	v = f.mustCreate(t, request("base"))
	if err := f.Sandboxes.Kill(t.Context(), team, string(v.ID)); err != nil {
		t.Fatal(err)
	}
	check(t, v, "it was killed at ")
}
