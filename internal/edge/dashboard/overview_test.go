package dashboard

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/edge/dashboard/timeline"
)

// TestWaitsOfAPool counts claims by what they got, and lists those that waited, newest first.
func TestWaitsOfAPool(t *testing.T) {
	began := time.Now().Add(-time.Minute)
	var all []*agents.Sandbox
	add := func(uid, launch string, after time.Duration, waits pool.Waits) *agents.Sandbox {
		o := box("team", uid, true)
		o.CreationTimestamp = metav1.NewTime(began)
		o.Labels = map[string]string{pool.LabelOrigin: "p", agents.LabelLaunchType: launch}
		o.Annotations = map[string]string{pool.AnnotationClaimedAt: began.Add(after).UTC().Format(time.RFC3339Nano)}
		waits.Mark(o)
		all = append(all, o)
		return o
	}
	ready := add("ready", agents.LaunchWarm, time.Second, pool.Waits{})
	waited := add("waited", agents.LaunchWarm, 2*time.Second, pool.Waits{Quota: time.Second, Member: 180 * time.Millisecond})
	cold := add("cold", agents.LaunchCold, 3*time.Second, pool.Waits{})
	cold.Status.Barchan = &agents.BarchanStatus{Operations: []agents.OperationStatus{{
		Operation: agents.OperationCreate, StartedAt: metav1.NewMicroTime(began.Add(3*time.Second + 20*time.Millisecond)), Milliseconds: 130,
	}}}
	vain := add("vain", agents.LaunchCold, 4*time.Second, pool.Waits{Member: 30 * time.Second})
	add("of another pool", agents.LaunchWarm, 0, pool.Waits{}).Labels[pool.LabelOrigin] = "q"
	add("member", agents.LaunchWarm, 0, pool.Waits{}).Labels[agents.LabelWarmPoolSandbox] = "p"

	var v poolView
	v.count(all, "p")
	if v.AtOnce != 1 || v.Waited != 1 || v.Cold != 2 {
		t.Errorf("%d at once, %d waited, %d cold; want 1, 1, 2", v.AtOnce, v.Waited, v.Cold)
	}
	var names []string
	for _, x := range v.Waits {
		names = append(names, x.Name)
	}
	if got := strings.Join(names, " "); got != "vain cold waited" {
		t.Errorf("waits of %q", got)
	}
	if x := v.Waits[1]; x.Start != 150 || !x.Cold {
		t.Errorf("the cold start took %d ms, want 150", x.Start)
	}
	if x := v.Waits[2]; x.Quota != 1000 || x.Member != 180 || x.Cold {
		t.Errorf("a wait for a member: %+v", x)
	}
	for o, want := range map[*agents.Sandbox]string{
		ready:  "warm: the pool had it ready",
		waited: "waited 180ms until this one was; it was in the queue of the namespace's quota for 1s",
		cold:   "cold start: the pool had no sandbox",
		vain:   "waited 30s in vain",
	} {
		text := ""
		for _, m := range timeline.Of(o, time.Now(), nil) {
			text += m.Detail
		}
		if !strings.Contains(text, want) {
			t.Errorf("%s: %q, want %q", o.Name, text, want)
		}
	}
}
