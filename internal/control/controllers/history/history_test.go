package history_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers/history"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
	"github.com/barchan-dev/barchan/internal/testkit/running"
)

type fixture struct {
	t      *testing.T
	rest   *rest.Config
	client client.WithWatch
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{agents.AddToScheme, extensions.AddToScheme, barchan.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	w := &fixture{t: t, rest: embedded.APIServer(t).RESTConfig(apiserver.UserController)}
	var err error
	if w.client, err = client.NewWithWatch(w.rest, client.Options{Scheme: scheme}); err != nil {
		t.Fatal(err)
	}
	return w
}

// start runs the controller until the test ends or the function that it returns is called.
func (w *fixture) start() (stop func()) {
	w.t.Helper()
	c, err := cache.New(w.t.Context(), cache.Config{REST: w.rest})
	if err != nil {
		w.t.Fatal(err)
	}
	h, err := history.New(history.Config{Log: telemetry.Discard(), Client: c.Live(), Cache: c.Informers(), Revisions: c})
	if err != nil {
		w.t.Fatal(err)
	}
	stop = sync.OnceFunc(running.Over(w.t, c, h.Start))
	w.t.Cleanup(stop)
	return stop
}

// numbers waits until the history of the template t has the numbers, and returns it by number.
func (w *fixture) numbers(want ...int64) map[int64]barchan.TemplateRevision {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), eventually.Patience)
	defer cancel()
	for {
		var list barchan.TemplateRevisionList
		if err := w.client.List(ctx, &list, client.InNamespace("default")); err != nil {
			w.t.Fatal(err)
		}
		got := map[int64]barchan.TemplateRevision{}
		for _, r := range list.Items {
			got[r.Spec.Number] = r
		}
		missing := 0
		for _, n := range want {
			if _, ok := got[n]; !ok {
				missing++
			}
		}
		if missing == 0 && len(list.Items) == len(want) {
			return got
		}
		w.change(ctx, list.ResourceVersion, fmt.Sprint(want), len(list.Items))
	}
}

// change waits for an event after a version.
func (w *fixture) change(ctx context.Context, version, want string, have int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(ctx, eventually.Patience)
	defer cancel()
	events, err := w.client.Watch(ctx, &barchan.TemplateRevisionList{}, client.InNamespace("default"), &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: version}})
	if err != nil {
		w.t.Fatal(err)
	}
	defer events.Stop()
	select {
	case <-events.ResultChan():
	case <-ctx.Done():
		w.t.Fatalf("the history has %d entries, not the numbers %s", have, want)
	}
}

func (w *fixture) setImage(t *extensions.SandboxTemplate, image string) {
	w.t.Helper()
	t.Spec.PodTemplate.Spec.Containers[0].Image = image
	if err := w.client.Update(w.t.Context(), t); err != nil {
		w.t.Fatal(err)
	}
}

func TestHistory(t *testing.T) {
	w := newFixture(t)
	stop := w.start()
	template := fakecluster.Template("default", "t", "image-1")
	if err := w.client.Create(t.Context(), template); err != nil {
		t.Fatal(err)
	}
	entry := w.numbers(1)[1]
	revision, content, _ := pool.Revision(template)
	if entry.Spec.Revision != revision || entry.Name != "t-"+revision[:10] || entry.Spec.TemplateName != "t" || !metav1.IsControlledBy(&entry, template) {
		t.Errorf("the entry is %+v", entry)
	}
	if !sameJSON(t, entry.Spec.Content.Raw, content) {
		t.Errorf("content is %s, want %s", entry.Spec.Content.Raw, content)
	}
	w.setImage(template, "image-2")
	w.numbers(1, 2)
	w.setImage(template, "image-1") // comes back
	stop()
	w.start()
	w.setImage(template, "image-3")
	again := w.numbers(1, 2, 3)
	if again[1].UID != entry.UID {
		t.Error("a revision that came back has a new entry")
	}
	var want []int64
	for n := int64(4); n <= history.Kept+2; n++ {
		w.setImage(template, fmt.Sprint("image-", n))
		want = nil
		for k := max(1, n-history.Kept+1); k <= n; k++ {
			want = append(want, k)
		}
		w.numbers(want...)
	}
	w.setImage(template, "image-3") // the oldest that is kept, and now the current one
	w.setImage(template, "image-99")
	w.numbers(append(want[1:], history.Kept+3)...)
}

func sameJSON(t *testing.T, a, b []byte) bool {
	t.Helper()
	var x, y any
	for raw, into := range map[*[]byte]*any{&a: &x, &b: &y} {
		if err := json.Unmarshal(*raw, into); err != nil {
			t.Fatal(err)
		}
	}
	one, _ := json.Marshal(x)
	two, _ := json.Marshal(y)
	return string(one) == string(two)
}

// A template of the same name is another template: it begins at 1.
func TestHistoryGoesWithItsTemplate(t *testing.T) {
	w := newFixture(t)
	w.start()
	for range 2 {
		template := fakecluster.Template("default", "t", "x")
		if err := w.client.Create(t.Context(), template); err != nil {
			t.Fatal(err)
		}
		entry := w.numbers(1)[1]
		for !metav1.IsControlledBy(&entry, template) { // the old one, which is on its way out
			w.change(t.Context(), entry.ResourceVersion, "1 of the new template", 1)
			entry = w.numbers(1)[1]
		}
		if err := w.client.Delete(t.Context(), template); err != nil {
			t.Fatal(err)
		}
	}
	w.numbers()
}

func TestLongNames(t *testing.T) {
	w := newFixture(t)
	w.start()
	template := fakecluster.Template("default", strings.Repeat("a", 253), "x")
	if err := w.client.Create(t.Context(), template); err != nil {
		t.Fatal(err)
	}
	if entry := w.numbers(1)[1]; len(entry.Name) != 253 || entry.Spec.TemplateName != template.Name {
		t.Errorf("the entry is %s of %s", entry.Name, entry.Spec.TemplateName)
	}
}
