package manager

import (
	"errors"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
)

func newPodFixture(t *testing.T) fixture {
	t.Helper()
	return newFixture(t, func(c *Config) { c.Pods = true })
}

// TestCheckpointsOfPods: what no controller of a cluster would do is refused before anything is written.
func TestCheckpointsOfPods(t *testing.T) {
	f := newPodFixture(t)
	v := f.mustCreate(t, request("base"))
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "old-v1", Labels: map[string]string{barchan.LabelSnapshot: "old", barchan.LabelTag: "v1"}}}
	f.cluster.Hold(true) // a capture would wait for ever
	defer f.cluster.Hold(false)
	if err := f.cluster.Create(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	writes := f.objects.writes.Load()
	const text = "snapshots and forks: not available on a Kubernetes cluster, where a Pod has no memory or root file system to keep"
	wantKind(t, second(f.Snapshots.Create(t.Context(), snapshots.Request{Namespace: team, ID: string(v.ID)})), errors.ErrUnsupported, text)
	wantKind(t, second(f.Creates.Fork(t.Context(), forkRequest(v, 1))), errors.ErrUnsupported, text)
	wantKind(t, second(f.Creates.Create(t.Context(), request("old:v1"))), errors.ErrUnsupported, text)
	if n := f.objects.writes.Load() - writes; n != 0 {
		t.Errorf("%d writes", n)
	}
	if got := result(f.Sandboxes.CheckCheckpoints()); got != "refused" {
		t.Errorf("counted as %q, for which operators are alerted", got)
	}
}
