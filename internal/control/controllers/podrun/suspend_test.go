package podrun

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/controllers/placement"
)

// single is a cache with one sandbox and its Pods.
type single struct {
	s    *agents.Sandbox
	pods []*corev1.Pod
}

func (c *single) Sandbox(context.Context, types.NamespacedName) (*agents.Sandbox, error) {
	return c.s, nil
}

func (c *single) PodsOf(context.Context, types.UID) ([]*corev1.Pod, error) { return c.pods, nil }

// suspending is a Runner for one sandbox with a volume and a Service, and the requests that it sends.
type suspending struct {
	*Runner
	*single
	requests []string
	fail     error // of each create
}

func newSuspending(t *testing.T) *suspending {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	x := &suspending{single: &single{s: &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s", UID: "u"}}}}
	x.s.Spec.Service, x.s.Spec.OperatingMode = new(true), agents.ModeSuspended
	x.s.Spec.Barchan = &agents.BarchanSpec{} // which asks for the memory
	volume := agents.PersistentVolumeClaimTemplate{}
	volume.Name = "data"
	x.s.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{volume}
	stored := fake.NewClientBuilder().WithScheme(scheme).Build()
	counted := interceptor.NewClient(stored, interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			x.requests = append(x.requests, fmt.Sprintf("create %T", o))
			if x.fail != nil {
				return x.fail
			}
			return c.Create(ctx, o, opts...)
		},
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			x.requests = append(x.requests, fmt.Sprintf("get %T", o))
			return c.Get(ctx, key, o, opts...)
		},
	})
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	placer, err := placement.New(placement.Config{Client: counted, Cache: stored, Tokens: tokens, AgentImage: "agent:1", Namespace: "roles"})
	if err != nil {
		t.Fatal(err)
	}
	x.Runner = newRunner(Config{Cache: x.single, Placer: placer, Tokens: tokens})
	return x
}

func (x *suspending) suspend(t *testing.T, want ...string) {
	t.Helper()
	x.requests = nil
	seen, err := x.Suspend(t.Context(), sandbox.Ref{Namespace: "a", Name: "s", UID: "u"}, agents.SuspendMemory)
	if err != nil || seen.State != sandbox.ContainerAbsent || seen.Service != "s" || !slices.Equal(x.requests, want) {
		t.Errorf("%+v, %v after %q, want %q", seen, err, x.requests, want)
	}
}

// TestSuspendedWithoutPod: a sandbox that is suspended from the start gets its claims and its Service, once. What its spec asks for its
// memory counts only where there is a Pod.
func TestSuspendedWithoutPod(t *testing.T) {
	x := newSuspending(t)
	x.suspend(t, "create *v1.Service", "create *v1.PersistentVolumeClaim", "get *v1.Pod")
	x.s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionSuspended, Status: metav1.ConditionTrue}}
	x.suspend(t)
	x.single.pods = []*corev1.Pod{{}}
	if _, err := x.Suspend(t.Context(), sandbox.Ref{Namespace: "a", Name: "s", UID: "u"}, agents.SuspendMemory); err == nil {
		t.Error("a Pod with memory was deleted")
	}
}

// TestSuspendedWithoutVolumes: a sandbox whose claims cannot be created is not suspended yet, so that they are tried again.
func TestSuspendedWithoutVolumes(t *testing.T) {
	x := newSuspending(t)
	x.fail = errors.New("over quota")
	seen, err := x.Suspend(t.Context(), sandbox.Ref{Namespace: "a", Name: "s", UID: "u"}, "")
	if !errors.Is(err, x.fail) || seen.State != sandbox.ContainerPending || seen.Reason != sandbox.ReasonSuspendFailed {
		t.Errorf("%+v, %v", seen, err)
	}
	x.fail = nil
	x.suspend(t, "create *v1.Service", "create *v1.PersistentVolumeClaim", "get *v1.Pod")
}

// TestSuspendedAfterRun: a sandbox that has run has its claims, and no request is sent for them.
func TestSuspendedAfterRun(t *testing.T) {
	x := newSuspending(t)
	x.s.Status.Barchan = &agents.BarchanStatus{StartedAt: new(metav1.Now())}
	x.suspend(t, "create *v1.Service", "get *v1.Pod")
}
