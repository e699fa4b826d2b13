package dashboard

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/dashboard/timeline"
)

func box(namespace, uid string, ready bool) *agents.Sandbox {
	o := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: uid, UID: types.UID(uid), CreationTimestamp: metav1.Now()}}
	status := metav1.ConditionFalse
	if ready {
		status = metav1.ConditionTrue
	}
	o.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: status, Message: "waits", LastTransitionTime: metav1.NewTime(time.Now().Add(time.Second))}}
	return o
}

// openWatch reads a watch of the namespace team.
func openWatch(t *testing.T, s *Server) (next func() message, end func()) {
	t.Helper()
	srv := httptest.NewServer(s)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, srv.URL+"/ui/api/watch", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.AddCookie(signedIn(t, s, "good"))
	req.Header.Set(headerPage, "0")
	res, err := http.DefaultClient.Do(req) //nolint:bodyclose // end closes it
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("watch = %v %v", res, err)
	}
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	next = func() (m message) {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("the watch ended: %v", lines.Err())
		}
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	return next, func() { _ = res.Body.Close(); srv.Close() }
}

func TestWatch(t *testing.T) {
	s, f := newTestServer(t)
	for i := range 2*rowsAtOnce + 1 {
		f.boxes = append(f.boxes, box("team", fmt.Sprintf("uid-%d", i), true))
	}
	f.boxes = append(f.boxes, box("rival", "secret", true))
	next, end := openWatch(t, s)
	defer end()
	seen := map[sandbox.ID]bool{}
	for {
		m := next()
		if m.Synced {
			break
		}
		for _, r := range m.Rows {
			seen[r.ID] = true
		}
	}
	if len(seen) != 2*rowsAtOnce+1 || seen[sandbox.IDOf("secret")] {
		t.Fatalf("%d rows at first", len(seen))
	}
	s.Observe(nil, box("rival", "secret-2", true))
	fresh := box("team", "fresh", false)
	s.Observe(nil, fresh)
	if m := next(); len(m.Rows) != 1 || m.Rows[0].Name != "fresh" || m.Rows[0].Reason != "waits" {
		t.Errorf("a new one: %+v", m)
	}
	s.Observe(fresh, nil)
	if m := next(); len(m.Rows) != 0 || len(m.Gone) != 1 || m.Gone[0] != sandbox.IDOf("fresh") {
		t.Errorf("a deleted one: %+v", m)
	}
}

// TestSlowPage: what a page has not read is kept once for each sandbox, however often that changes.
func TestSlowPage(t *testing.T) {
	h := newHub()
	p, err := h.subscribe("team")
	if err != nil {
		t.Fatal(err)
	}
	defer h.unsubscribe(p)
	for range 1000 {
		h.observe(box("team", "a", false), box("team", "a", true))
		h.observe(box("team", "a", true), box("team", "a", false))
	}
	if changed, gone := p.take(); len(changed) != 1 || len(gone) != 0 {
		t.Errorf("%d changed, %d gone", len(changed), len(gone))
	}
}

// TestPagesOfANamespace: one namespace cannot take all places for pages.
func TestPagesOfANamespace(t *testing.T) {
	h := newHub()
	for range maxOfNamespace {
		if _, err := h.subscribe("team"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.subscribe("team"); errs.Kind(err) != errs.ErrExhausted { //nolint:errorlint // a kind
		t.Errorf("one too many: %v", err)
	}
	if _, err := h.subscribe("other"); err != nil {
		t.Errorf("another namespace's: %v", err)
	}
}

func TestTimeline(t *testing.T) {
	synctest.Test(t, testTimeline)
}

func testTimeline(t *testing.T) {
	s, _ := newTestServer(t)
	starting, running := box("team", "a", false), box("team", "a", true)
	s.Observe(nil, starting)
	time.Sleep(3 * time.Millisecond)
	s.Observe(starting, running)
	all := s.timeline(t.Context(), running)
	var names []string
	for i, m := range all {
		names = append(names, m.What)
		if i > 0 && m.At.Before(all[i-1].At) {
			t.Errorf("%s is before %s", m.What, all[i-1].What)
		}
	}
	if fmt.Sprint(names) != "[Created Pending Running]" {
		t.Errorf("moments %v", names)
	}
	ended := time.Now().Truncate(time.Second).Add(-time.Minute)
	known := box("team", "known", true)
	known.Status.Conditions[0].LastTransitionTime = metav1.NewTime(ended)
	known.Status.Barchan = &agents.BarchanStatus{Operations: []agents.OperationStatus{{Operation: agents.OperationCreate, StartedAt: metav1.NewMicroTime(ended.Add(400 * time.Millisecond)), Milliseconds: 130}}}
	told := timeline.Of(known, time.Now(), nil)
	at := slices.IndexFunc(told, func(m timeline.Moment) bool {
		return m.Source == timeline.FromCondition && m.What == agents.ConditionReady
	})
	if at < 0 || !told[at].At.Equal(ended.Add(530*time.Millisecond)) {
		t.Errorf("a condition of the second in which the create ended: %+v, want it at the end", told)
	}
	known.Status.Conditions[0] = metav1.Condition{Type: agents.ConditionSuspended, Status: metav1.ConditionTrue, Message: "on disk since", LastTransitionTime: metav1.NewTime(ended)}
	told = timeline.Of(known, time.Now(), nil)
	if at := slices.IndexFunc(told, func(m timeline.Moment) bool { return m.What == agents.ConditionSuspended }); at < 0 || told[at].Detail != "" {
		t.Errorf("a past condition has the present message: %+v", told)
	}
}
