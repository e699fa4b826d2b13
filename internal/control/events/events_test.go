package events

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// objects are what a cache lists.
type objects []*agents.Sandbox

func (o *objects) Sandboxes(context.Context, string) ([]*agents.Sandbox, error) { return *o, nil }

func (o *objects) Checkpoints(context.Context, string) ([]barchan.Checkpoint, error) { return nil, nil }

func running(uid, version string, change ...func(*agents.Sandbox)) *agents.Sandbox {
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: uid, UID: types.UID(uid), ResourceVersion: version, CreationTimestamp: metav1.Now()}}
	s.Status.PodIPs = []string{"10.0.0.2"}
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	s.Status.Barchan = &agents.BarchanStatus{StartedAt: new(metav1.Now())}
	for _, c := range change {
		c(s)
	}
	return s
}

func paused(s *agents.Sandbox) {
	s.Spec.OperatingMode = agents.ModeSuspended
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionSuspended, Status: metav1.ConditionTrue}}
}

func member(s *agents.Sandbox) { s.Labels = map[string]string{agents.LabelWarmPoolSandbox: "pool"} }

func newRecorder(t *testing.T, dir string, maxBytes int, o *objects) *Recorder {
	t.Helper()
	store, err := Open(dir, maxBytes)
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewRecorder(Config{
		Store: store, Objects: o, Log: telemetry.Discard(), Recorded: func() {}, SizeOf: func(*agents.Sandbox) Size { return Size{} },
		Gone: func(_ context.Context, namespace string) (bool, error) { return namespace == "gone", nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	return r
}

func (r *Recorder) want(t *testing.T, uid string, want ...Type) {
	t.Helper()
	if err := r.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	list, err := r.cfg.Store.List(Query{Namespace: "a", SandboxID: string(sandbox.IDOf(types.UID(uid))), OldestFirst: true, Limit: 100})
	if err != nil {
		t.Fatal(err)
	}
	var got []Type
	for _, e := range list {
		got = append(got, e.Type)
	}
	if !slices.Equal(got, want) {
		t.Errorf("events of %s are %v, want %v", uid, got, want)
	}
}

// TestChangesWhileAway compares objects with what an earlier process recorded, and ignores older changes that come after.
func TestChangesWhileAway(t *testing.T) {
	dir, o := t.TempDir(), &objects{}
	one, two := running("one", "10"), running("two", "11")
	*o = objects{one, two}
	r := newRecorder(t, dir, 0, o)
	r.Observe(nil, one)
	r.Observe(nil, two)
	r.Observe(nil, running("member", "12", member))
	r.want(t, "one", Created)
	r.want(t, "member")
	if err := r.cfg.Store.Close(); err != nil {
		t.Fatal(err)
	}
	*o = objects{running("one", "20", paused), running("new", "21")}
	r = newRecorder(t, dir, 0, o)
	r.want(t, "one", Created, Paused)
	r.want(t, "two", Created, Killed)
	r.want(t, "new", Created)
	r.Observe(nil, one) // the watch is behind the list
	r.Observe(nil, two)
	r.want(t, "one", Created, Paused)
	r.want(t, "two", Created, Killed)
	r.Observe(one, (*o)[0])
	r.Observe(one, running("one", "30"))
	r.want(t, "one", Created, Paused, Resumed)
}

// TestLogIsBounded removes the oldest events, and the logs of namespaces that are gone.
func TestLogIsBounded(t *testing.T) {
	r := newRecorder(t, t.TempDir(), 4000, &objects{})
	if err := r.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.Observe(nil, running("other", "1", func(s *agents.Sandbox) { s.Namespace = "gone" }))
	s := running("one", "10")
	r.Observe(nil, s)
	for i := range 50 {
		changed := running("one", "11", func(s *agents.Sandbox) {
			s.Spec.Barchan = &agents.BarchanSpec{Metadata: map[string]string{"text": strings.Repeat("x", i*10)}}
		})
		r.Observe(s, changed)
	}
	if err := r.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	list, lost, err := r.cfg.Store.After("a", 0, 100)
	if err != nil || len(list) == 0 || list[len(list)-1].Number != 51 || lost != list[0].Number-1 || lost < 20 {
		t.Errorf("%d events, %d lost, %v", len(list), lost, err)
	}
	if err := r.removeGone(t.Context()); err != nil {
		t.Fatal(err)
	}
	if names, err := r.cfg.Store.namespaces(); err != nil || !slices.Equal(names, []string{"a"}) {
		t.Errorf("logs are left of %v, %v", names, err)
	}
}

// TestEndOfACreate: what a create itself sets is no update.
func TestEndOfACreate(t *testing.T) {
	at := func(version string, seconds int, pending ...string) *agents.Sandbox {
		return running("one", version, func(s *agents.Sandbox) {
			s.Spec.ShutdownTime = new(metav1.NewTime(time.Unix(int64(seconds), 0)))
			for _, value := range pending {
				s.Annotations = map[string]string{pool.AnnotationPending: value}
			}
		})
	}
	r := newRecorder(t, t.TempDir(), 0, &objects{at("1", 1, "true")})
	r.want(t, "one", Created)
	r.Observe(nil, at("2", 2))
	r.want(t, "one", Created)
	r.Observe(nil, at("3", 3))
	r.want(t, "one", Created, Updated)
}

func TestBefore(t *testing.T) {
	r := newRecorder(t, t.TempDir(), 0, &objects{running("one", "1")})
	r.want(t, "one", Created)
	now := time.Now()
	r.Observe(running("one", "1"), nil)
	r.want(t, "one", Created, Killed)
	for at, want := range map[time.Time]uint64{now: 1, now.Add(-time.Hour): 0, now.Add(time.Hour): 2} {
		if got, err := r.cfg.Store.Before("a", at); err != nil || got != want {
			t.Errorf("before %s: %d, %v, want %d", at, got, err, want)
		}
	}
}
