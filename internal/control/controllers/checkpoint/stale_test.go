package checkpoint

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

// stored is a cache that shows one checkpoint.
type stored struct {
	Objects
	c *barchan.Checkpoint
}

func (s stored) Checkpoint(context.Context, types.NamespacedName) (*barchan.Checkpoint, error) {
	return s.c.DeepCopy(), nil
}

// idle is a Runner that must not be called.
type idle struct{ controllers.CheckpointRunner }

// newStale returns a sandbox that runs on a node, and a checkpoint of it that suspends it first.
func newStale(t *testing.T, node string) (client.Client, *barchan.Checkpoint) {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{agents.AddToScheme, barchan.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s", UID: "u1"}}
	s.Spec.OperatingMode = agents.ModeRunning
	s.Status = agents.SandboxStatus{NodeName: node, PodIPs: []string{"10.9.0.2"}, Conditions: []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}}
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "c", UID: "u2", Finalizers: []string{barchan.NodeFinalizer}}}
	c.Spec.SandboxName, c.Status.Phase = "s", barchan.CheckpointPending
	api := fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(s, c).WithObjects(s, c).Build()
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(c), c); err != nil {
		t.Fatal(err)
	}
	return api, c
}

// look reconciles a checkpoint as a cache shows it, and returns what its source is to do then.
func look(t *testing.T, api client.Client, c *barchan.Checkpoint) agents.OperatingMode {
	t.Helper()
	r := &reconciler{Config: Config{Log: telemetry.Discard(), Client: api, Objects: stored{c: c}, Runner: idle{}, Node: "n1"}}
	if _, err := r.Reconcile(t.Context(), reconcile.Request{NamespacedName: client.ObjectKeyFromObject(c)}); err != nil {
		t.Fatal(err)
	}
	s := &agents.Sandbox{}
	if err := api.Get(t.Context(), types.NamespacedName{Namespace: "a", Name: "s"}, s); err != nil {
		t.Fatal(err)
	}
	return s.Spec.OperatingMode
}

// A sandbox that runs again after its checkpoint was taken is not suspended for a cache that lags behind.
func TestSourceIsNotSuspendedTwice(t *testing.T) {
	api, c := newStale(t, "n1")
	was := c.DeepCopy()
	c.Status.Phase = barchan.CheckpointReady
	if err := api.Status().Update(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if mode := look(t, api, was); mode != agents.ModeRunning {
		t.Errorf("the source is to be %s", mode)
	}
}

func TestSourceIsSuspendedOnce(t *testing.T) {
	api, c := newStale(t, "n1")
	if mode := look(t, api, c); mode != agents.ModeSuspended {
		t.Errorf("the source is to be %s", mode)
	}
}

// Checkpoints of sandboxes on other nodes, and those that are there, are left alone.
func TestCheckpointOfAnotherNodeIsLeftAlone(t *testing.T) {
	api, c := newStale(t, "n2")
	if mode := look(t, api, c); mode != agents.ModeRunning {
		t.Errorf("the source is to be %s", mode)
	}
	api, c = newStale(t, "n1")
	c.Status.Phase, c.Status.Source = barchan.CheckpointReady, &barchan.CheckpointSource{Node: "n2"}
	if err := api.Status().Update(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	look(t, api, c) // idle has no data, and panics when it is called
	if err := api.Delete(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if err := api.Get(t.Context(), client.ObjectKeyFromObject(c), c); err != nil {
		t.Fatal(err)
	}
	look(t, api, c)
	if len(c.Finalizers) != 1 {
		t.Error("it was released by a node that has nothing of it")
	}
}
