package checkpoint_test

import (
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers/checkpoint"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/running"
)

// TestCheckpointsOfCluster: without a node to keep them, checkpoints and imports fail at once, and nothing holds their deletion.
func TestCheckpointsOfCluster(t *testing.T) {
	api := embedded.APIServer(t)
	c, err := cache.New(t.Context(), cache.Config{REST: api.RESTConfig(apiserver.UserController)})
	if err != nil {
		t.Fatal(err)
	}
	checkpoints, err := checkpoint.New(checkpoint.Config{Log: telemetry.Discard(), Client: c.Live(), Cache: c.Informers(), Objects: c})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(running.Over(t, c, checkpoints.Start))
	create := func(name string, finalizers []string, spec barchan.CheckpointSpec) *barchan.Checkpoint {
		one := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Finalizers: finalizers}, Spec: spec}
		if err := c.Live().Create(t.Context(), one); err != nil {
			t.Fatal(err)
		}
		return one
	}
	gone := func(one *barchan.Checkpoint) {
		t.Helper()
		eventually.NoError(t, one.Name+" is gone", func() error {
			err := c.Live().Get(t.Context(), client.ObjectKeyFromObject(one), one)
			if apierrors.IsNotFound(err) {
				return nil
			}
			return fmt.Errorf("finalizers %q, %w", one.Finalizers, err)
		})
	}
	all := []*barchan.Checkpoint{
		create("taken", nil, barchan.CheckpointSpec{SandboxName: "s"}),
		create("imported", nil, barchan.CheckpointSpec{SandboxName: "s", Origin: barchan.OriginImport}),
		create("held", []string{barchan.NodeFinalizer}, barchan.CheckpointSpec{SandboxName: "s", KeepRunning: true}), // as an earlier replica made them
	}
	for _, one := range all {
		eventually.NoError(t, one.Name+" has failed", func() error {
			err := c.Live().Get(t.Context(), client.ObjectKeyFromObject(one), one)
			if err == nil && !refused(one) {
				err = fmt.Errorf("status %+v", one.Status)
			}
			return err
		})
	}
	if len(all[0].Finalizers) > 0 {
		t.Errorf("finalizers %q", all[0].Finalizers)
	}
	for _, one := range all {
		if err := c.Live().Delete(t.Context(), one); err != nil {
			t.Fatal(err)
		}
		gone(one)
	}
	gone(create("short", nil, barchan.CheckpointSpec{SandboxName: "s", TTLSeconds: new(int32(0))}))
}

// refused reports whether a checkpoint has failed because sandboxes are Pods.
func refused(c *barchan.Checkpoint) bool {
	ready := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady)
	return c.Status.Phase == barchan.CheckpointFailed && ready != nil && ready.Reason == barchan.ReasonFailed &&
		strings.Contains(ready.Message, "not available on a Kubernetes cluster")
}
