package election_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
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

// process has Leases as a process has them whose clock differs from that of the others: what it writes has its own time.
type process struct {
	coordination.LeaseInterface
	skew time.Duration
	cut  atomic.Bool // no write arrives any more
}

// Leases implements coordination.LeasesGetter.
func (p *process) Leases(string) coordination.LeaseInterface { return p }

// Create implements coordination.LeaseInterface.
func (p *process) Create(ctx context.Context, l *coordinationv1.Lease, opts metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return p.LeaseInterface.Create(ctx, p.skewed(l), opts)
}

// Update implements coordination.LeaseInterface.
func (p *process) Update(ctx context.Context, l *coordinationv1.Lease, opts metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	if p.cut.Load() {
		return nil, apierrors.NewServiceUnavailable("cut")
	}
	return p.LeaseInterface.Update(ctx, p.skewed(l), opts)
}

func (p *process) skewed(l *coordinationv1.Lease) *coordinationv1.Lease {
	l = l.DeepCopy()
	l.Spec.RenewTime = new(metav1.NewMicroTime(time.Now().Add(p.skew)))
	return l
}

// Clocks may differ by a minute: one process leads at a time, and another follows one that cannot renew, as with equal clocks.
func TestSkewedClocks(t *testing.T) {
	for name, skew := range map[string]time.Duration{"ahead": time.Minute, "behind": -time.Minute} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				leases := fake.NewClientset().CoordinationV1().Leases("ns")
				ctx, stop := context.WithCancel(t.Context())
				var leader atomic.Value
				var leading atomic.Int32
				candidates := map[string]*process{"a": {LeaseInterface: leases, skew: skew}, "b": {LeaseInterface: leases}}
				var all sync.WaitGroup
				defer all.Wait()
				defer stop()
				start := func(name string) {
					all.Go(func() {
						err := election.Run(ctx, election.Config{Leases: candidates[name], Namespace: "ns", Name: "lease", Identity: name}, func(ctx context.Context) error {
							leader.Store(name)
							if leading.Add(1) > 1 {
								t.Error("two lead")
							}
							<-ctx.Done()
							leading.Add(-1)
							return nil
						})
						if err != nil && !errors.Is(err, election.ErrLost) {
							t.Error(err)
						}
					})
				}
				lead := func(want string, within time.Duration) {
					time.Sleep(within)
					if got := leader.Load(); got != want || leading.Load() != 1 {
						t.Errorf("%v leads and %d do, want %s", got, leading.Load(), want)
					}
				}
				start("a")
				lead("a", 5*time.Second)
				start("b")
				lead("a", 10*time.Minute)
				candidates["a"].cut.Store(true)
				lead("b", 25*time.Second)
				candidates["a"].cut.Store(false)
				start("a")
				lead("b", 10*time.Minute)
				candidates["b"].cut.Store(true)
				lead("a", 25*time.Second)
			})
		})
	}
}
