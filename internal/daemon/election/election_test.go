package election_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/barchan-dev/barchan/internal/daemon/election"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

var (
	errWork  = errors.New("work failed")
	errTaken = errors.New("taken")
)

// candidate runs in the background. Its times are short, and long enough for a busy machine.
type candidate struct {
	leads atomic.Bool
	ended chan error
	stop  context.CancelFunc
}

func run(t *testing.T, c *fake.Clientset, name string, work error) *candidate {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	p := &candidate{ended: make(chan error, 1), stop: stop}
	go func() {
		p.ended <- election.Run(ctx, election.Config{
			Leases: c.CoordinationV1(), Namespace: "ns", Name: "lease", Identity: name,
			Duration: 3 * time.Second, Renew: 2 * time.Second, Retry: 50 * time.Millisecond,
		}, func(ctx context.Context) error {
			p.leads.Store(true)
			defer p.leads.Store(false)
			if work != nil {
				return work
			}
			<-ctx.Done()
			return nil
		})
	}()
	return p
}

func holder(t *testing.T, c *fake.Clientset) string {
	t.Helper()
	lease, err := c.CoordinationV1().Leases("ns").Get(t.Context(), "lease", metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// One leads; when it is stopped the other follows at once, for the Lease was released after the work had ended.
func TestOneLeadsAndTheOtherFollows(t *testing.T) {
	c := fake.NewClientset()
	a := run(t, c, "a", nil)
	eventually.True(t, "a leads", a.leads.Load)
	b := run(t, c, "b", nil)
	time.Sleep(200 * time.Millisecond)
	if b.leads.Load() || holder(t, c) != "a" {
		t.Errorf("b leads beside a; the holder is %s", holder(t, c))
	}
	a.stop()
	if err := <-a.ended; err != nil || a.leads.Load() {
		t.Errorf("a ended with %v, still leading %v", err, a.leads.Load())
	}
	eventually.True(t, "b leads", b.leads.Load)
	b.stop()
	if err := <-b.ended; err != nil || holder(t, c) != "" {
		t.Errorf("b ended with %v; the holder is %q", err, holder(t, c))
	}
}

// Stopped while it waits, a candidate never works.
func TestStoppedWhileItWaits(t *testing.T) {
	c := fake.NewClientset()
	a := run(t, c, "a", nil)
	eventually.True(t, "a leads", a.leads.Load)
	b := run(t, c, "b", nil)
	b.stop()
	if err := <-b.ended; err != nil || holder(t, c) != "a" {
		t.Errorf("b ended with %v; the holder is %s", err, holder(t, c))
	}
	a.stop()
	<-a.ended //nolint:errcheck // see the test before
}

// Who cannot renew the Lease, as when another has taken it, stops working and says so.
func TestLostLease(t *testing.T) {
	c := fake.NewClientset()
	var taken atomic.Bool
	c.PrependReactor("update", "leases", func(k8stesting.Action) (bool, runtime.Object, error) {
		return taken.Load(), nil, apierrors.NewConflict(schema.GroupResource{Resource: "leases"}, "lease", errTaken)
	})
	a := run(t, c, "a", nil)
	eventually.True(t, "a leads", a.leads.Load)
	taken.Store(true)
	if err := <-a.ended; !errors.Is(err, election.ErrLost) || a.leads.Load() {
		t.Errorf("a ended with %v, still leading %v", err, a.leads.Load())
	}
}

// Work that fails ends the process's turn, with its error, and releases the Lease.
func TestFailedWork(t *testing.T) {
	c := fake.NewClientset()
	a := run(t, c, "a", errWork)
	if err := <-a.ended; !errors.Is(err, errWork) || holder(t, c) != "" {
		t.Errorf("a ended with %v; the holder is %q", err, holder(t, c))
	}
}
