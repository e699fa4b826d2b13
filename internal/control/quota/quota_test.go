package quota_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

const team = "team-a"

// namespaces is a Reader of one namespace whose annotations tests change.
type namespaces struct {
	mu          sync.Mutex
	annotations map[string]string
	err         error
}

func (n *namespaces) Namespace(_ context.Context, name string) (*corev1.Namespace, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.err != nil {
		return nil, n.err
	}
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: n.annotations}}, nil
}

func newQuotas(t *testing.T, defaults quota.Limits, annotations map[string]string) (*quota.Quotas, *namespaces) {
	t.Helper()
	reader := &namespaces{annotations: annotations}
	q, err := quota.New(quota.Config{Reader: reader, Log: telemetry.Discard(), Defaults: defaults, DefaultSize: quota.Size{MilliCPU: 500, Memory: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	return q, reader
}

func box(name string, change ...func(*agents.Sandbox)) *agents.Sandbox {
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: name, UID: types.UID("uid-" + name)}}
	s.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main"}}
	for _, f := range change {
		f(s)
	}
	return s
}

func paused(s *agents.Sandbox) {
	s.Spec.OperatingMode = agents.ModeSuspended
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionSuspended, Status: metav1.ConditionTrue}}
}

func member(s *agents.Sandbox) { s.Labels = map[string]string{agents.LabelWarmPoolSandbox: "pool"} }

func dying(s *agents.Sandbox) { s.DeletionTimestamp = new(metav1.Now()) }

func of(cpu, memory string) func(*agents.Sandbox) {
	return func(s *agents.Sandbox) {
		s.Spec.PodTemplate.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse(cpu), "memory": resource.MustParse(memory)}
	}
}

func TestRefusals(t *testing.T) {
	big := quota.Size{MilliCPU: 1500, Memory: 3 << 30}
	for name, give := range map[string]struct {
		annotations map[string]string
		defaults    quota.Limits
		there       []*agents.Sandbox
		want        string // empty: granted
	}{
		"none":              {there: []*agents.Sandbox{box("a")}},
		"default, free":     {defaults: quota.Limits{Sandboxes: quota.AtMost(2)}, there: []*agents.Sandbox{box("a")}},
		"default, used":     {defaults: quota.Limits{Sandboxes: quota.AtMost(1)}, there: []*agents.Sandbox{box("a")}, want: "at most 1 sandboxes; 1 are running"},
		"annotation wins":   {map[string]string{quota.AnnotationSandboxes: "2"}, quota.Limits{Sandboxes: quota.AtMost(1)}, []*agents.Sandbox{box("a")}, ""},
		"zero refuses all":  {annotations: map[string]string{quota.AnnotationSandboxes: "0"}, want: "at most 0 sandboxes"},
		"CPU":               {annotations: map[string]string{quota.AnnotationCPU: "2.5"}, there: []*agents.Sandbox{box("a", of("1250m", "1Gi"))}, want: "at most 2.5 CPU cores; sandboxes that are running use 1.25, and this one would use 1.5"},
		"CPU, just":         {annotations: map[string]string{quota.AnnotationCPU: "2750m"}, there: []*agents.Sandbox{box("a", of("1250m", "1Gi"))}},
		"memory":            {annotations: map[string]string{quota.AnnotationMemory: "4Gi"}, there: []*agents.Sandbox{box("a", of("1", "2Gi"))}, want: "at most 4Gi of memory; sandboxes that are running use 2Gi, and this one would use 3Gi"},
		"default size":      {annotations: map[string]string{quota.AnnotationCPU: "1.9"}, there: []*agents.Sandbox{box("a")}, want: "use 0.5"},
		"spare members":     {annotations: map[string]string{quota.AnnotationSandboxes: "1"}, there: []*agents.Sandbox{box("a", member)}},
		"dying":             {annotations: map[string]string{quota.AnnotationSandboxes: "1"}, there: []*agents.Sandbox{box("a", dying)}},
		"paused":            {annotations: map[string]string{quota.AnnotationSandboxes: "1"}, there: []*agents.Sandbox{box("a", paused)}},
		"paused, all count": {annotations: map[string]string{quota.AnnotationSandboxes: "1", quota.AnnotationCounts: "all"}, there: []*agents.Sandbox{box("a", paused)}, want: "1 are running or paused"},
		"bad, with default": {map[string]string{quota.AnnotationSandboxes: "many"}, quota.Limits{Sandboxes: quota.AtMost(1)}, []*agents.Sandbox{box("a")}, "at most 1 sandboxes"},
		"bad, no default":   {annotations: map[string]string{quota.AnnotationMemory: "-1Gi"}, want: "at most 0 of memory"},
		"bad count":         {annotations: map[string]string{quota.AnnotationSandboxes: "1", quota.AnnotationCounts: "some"}, there: []*agents.Sandbox{box("a", paused)}, want: "1 are running or paused"},
	} {
		t.Run(name, func(t *testing.T) {
			q, _ := newQuotas(t, give.defaults, give.annotations)
			for _, s := range give.there {
				q.Observe(nil, s)
			}
			_, err := q.Hold(t.Context(), quota.Request{Namespace: team, Size: big})
			text, _ := errs.PublicMessage(err)
			if granted := err == nil; granted != (give.want == "") || !strings.Contains(text, give.want) || (err != nil && !errors.Is(err, errs.ErrExhausted)) {
				t.Errorf("Hold = %v (public %q), want %q", err, text, give.want)
			}
		})
	}
}

func TestAnnotationErrorIsLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	reader := &namespaces{annotations: map[string]string{quota.AnnotationCPU: "a lot"}}
	q, err := quota.New(quota.Config{Reader: reader, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		_, _ = q.Hold(t.Context(), quota.Request{Namespace: team})
	}
	if n := strings.Count(log.String(), "annotation "+quota.AnnotationCPU); n != 1 {
		t.Errorf("logged %d times, want once: %s", n, log.String())
	}
}

func TestUnreadableNamespaceGrantsNothing(t *testing.T) {
	q, reader := newQuotas(t, quota.Limits{}, nil)
	reader.err = errs.ErrUnavailable
	if _, err := q.Hold(t.Context(), quota.Request{Namespace: team}); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("Hold = %v", err)
	}
	reader.err = errs.ErrNotFound
	if _, err := q.Hold(t.Context(), quota.Request{Namespace: team}); err != nil {
		t.Errorf("Hold in a missing namespace = %v", err)
	}
}

// TestExactlyTheQuota creates sandboxes concurrently and shows them in the cache before or after the
// claim returns: the quota is granted exactly.
func TestExactlyTheQuota(t *testing.T) {
	for _, late := range []bool{false, true} {
		q, _ := newQuotas(t, quota.Limits{Sandboxes: quota.AtMost(50)}, nil)
		var granted atomic.Int64
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				r, err := q.Hold(t.Context(), quota.Request{Namespace: team})
				if err != nil {
					return
				}
				s := box(fmt.Sprint(i))
				r.For("conflicting") // a member that another claim took
				r.For(s.Name)
				if !late {
					q.Observe(nil, s)
				}
				granted.Add(1)
			})
		}
		wg.Wait()
		if n := granted.Load(); n != 50 {
			t.Errorf("late %v: %d granted, want 50", late, n)
		}
		if running, _ := q.Used(team); running.Sandboxes != 50 {
			t.Errorf("late %v: %d used, want 50", late, running.Sandboxes)
		}
	}
}

func TestReservationLifecycle(t *testing.T) {
	q, _ := newQuotas(t, quota.Limits{Sandboxes: quota.AtMost(1)}, nil)
	ctx := t.Context()
	used := func(step string, running, paused int64) {
		t.Helper()
		if r, p := q.Used(team); r.Sandboxes != running || p.Sandboxes != paused {
			t.Errorf("%s: %d running, %d paused; want %d and %d", step, r.Sandboxes, p.Sandboxes, running, paused)
		}
	}
	hold := func(req quota.Request) *quota.Reservation {
		t.Helper()
		r, err := q.Hold(ctx, req)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := hold(quota.Request{Namespace: team})
	used("reserved", 1, 0)
	r.Release()
	r.Release()
	used("released", 0, 0)

	r = hold(quota.Request{Namespace: team})
	running, stored := box("a"), box("a", paused)
	r.For("a")
	q.Observe(nil, running)
	used("seen", 1, 0)
	r.Release()
	used("released after it was seen", 1, 0)
	r.For("b")
	used("named after its release", 1, 0)
	q.Observe(running, stored)
	used("paused", 0, 1)

	other := hold(quota.Request{Namespace: team})
	if _, err := q.Hold(ctx, quota.Request{Namespace: team, Paused: true}); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("resume beyond the quota = %v", err)
	}
	other.Release()
	r = hold(quota.Request{Namespace: team, Paused: true})
	r.For("a")
	used("resuming", 1, 1)
	q.Observe(stored, stored) // no change
	used("still resuming", 1, 1)
	q.Observe(stored, running)
	used("resumed", 1, 0)

	at := func(s *agents.Sandbox, version string) *agents.Sandbox {
		s.ResourceVersion = version
		return s
	}
	q.Observe(nil, at(box("a", paused), "10"))
	q.Observe(nil, at(box("a"), "9"))
	used("late event of the running sandbox", 0, 1)
	q.Observe(nil, at(box("a"), "11"))
	used("running again", 1, 0)
	q.Observe(box("a", func(s *agents.Sandbox) { s.UID = "older" }), nil)
	used("deletion of another sandbox of that name", 1, 0)
	q.Observe(running, nil)
	used("deleted", 0, 0)
	q.Observe(running, nil)
	used("deleted twice", 0, 0)
}

// TestSandboxesInAnyState: paused sandboxes count against a number too, also those that never ran, and their creates against the rate.
func TestSandboxesInAnyState(t *testing.T) {
	q, _ := newQuotas(t, quota.Limits{Creates: quota.AtMost(2)}, nil)
	for i := range 2 * quota.Burst {
		if err := q.AddPaused(t.Context(), team); err != nil {
			t.Fatalf("create %d: %v", i, err)
		}
	}
	if err := q.AddPaused(t.Context(), team); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("beyond the rate: %v", err)
	}

	q, _ = newQuotas(t, quota.Limits{Sandboxes: quota.AtMost(10)}, nil)
	for i := range quota.MaxSandboxes {
		q.Observe(nil, box(strconv.Itoa(i), paused))
	}
	_, held := q.Hold(t.Context(), quota.Request{Namespace: team})
	if err := q.AddPaused(t.Context(), team); !errors.Is(err, errs.ErrExhausted) || !errors.Is(held, errs.ErrExhausted) {
		t.Errorf("one more: %v; %v", err, held)
	}
	if _, err := q.Hold(t.Context(), quota.Request{Namespace: team, Paused: true}); err != nil {
		t.Errorf("a resume: %v", err)
	}
}
