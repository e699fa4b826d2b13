package daemon

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/events"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/guest/envd/identity"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

// clusterReplica is a replica as on a cluster, over the API server of a test, of which it may read no Secrets. It runs until the test ends.
func clusterReplica(t *testing.T, api *apiserver.Server) *Daemon {
	t.Helper()
	d := wired(t, config.RoleReplica)
	d.rest = api.RESTConfig(apiserver.UserAdmin)
	d.rest.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if strings.Contains(r.URL.Path, "/secrets") || strings.Contains(r.URL.Path, "/templatebuilds") {
				t.Errorf("the role of a replica does not allow %s %s", r.Method, r.URL.Path)
			}
			return next.RoundTrip(r)
		})
	})
	var err error
	if d.tokens, err = sandbox.NewTokens([]byte(strings.Repeat("s", 32))); err != nil {
		t.Fatal(err)
	}
	d.verifier = identity.NewVerifier(d.tokens)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	for _, phase := range []boot.Phase{
		{Run: d.makeCache, Services: d.cacheServices}, {Run: d.makeTables, Services: d.tableServices}, {Run: d.makeManager, Services: d.managerServices},
	} {
		if err := phase.Run(ctx); err != nil {
			t.Fatal(err)
		}
		for _, s := range phase.Services() {
			ready := make(chan struct{})
			running.Go(func() {
				if err := s.Run(ctx, sync.OnceFunc(func() { close(ready) })); err != nil && ctx.Err() == nil {
					t.Errorf("%s: %v", s.Name, err)
				}
			})
			<-ready
		}
	}
	return d
}

func startedAPI(t *testing.T) *apiserver.Server {
	t.Helper()
	return embedded.APIServer(t)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestClusterReplica: the replicas of a cluster have events and metrics of teams, each from its own watch, and delete templates.
func TestClusterReplica(t *testing.T) {
	api := startedAPI(t)
	first := clusterReplica(t, api)
	ctx, objects := t.Context(), first.cache.Live()
	box := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "box", Finalizers: []string{agents.NodeFinalizer}}}
	box.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "base"}}
	box.Spec.Barchan = &agents.BarchanSpec{}
	template := fakecluster.Template("default", "mine", "base")
	for _, obj := range []client.Object{box, template} {
		if err := objects.Create(ctx, obj); err != nil {
			t.Fatal(err)
		}
	}
	reconcile := func() {
		t.Helper()
		if err := objects.Get(ctx, client.ObjectKeyFromObject(box), box); err != nil {
			t.Fatal(err)
		}
		if err := fakecluster.Reconcile(ctx, objects, box); err != nil {
			t.Fatal(err)
		}
	}
	reconcile()
	eventsOf(t, first, events.Created)
	second := clusterReplica(t, api) // begins later, and has what runs
	eventsOf(t, second, events.Created)
	if err := objects.Get(ctx, client.ObjectKeyFromObject(box), box); err != nil {
		t.Fatal(err)
	}
	box.Spec.Barchan.Metadata = map[string]string{"a": "b"}
	if err := objects.Update(ctx, box); err != nil {
		t.Fatal(err)
	}
	eventsOf(t, first, events.Created, events.Updated)
	if err := objects.Delete(ctx, box); err != nil {
		t.Fatal(err)
	}
	reconcile()
	one, two := eventsOf(t, first, events.Created, events.Updated, events.Killed), eventsOf(t, second, events.Created, events.Updated, events.Killed)
	for i := range one {
		if one[i].ID != two[i].ID || one[i].ID == one[(i+1)%len(one)].ID {
			t.Errorf("event %d, %s, is %s to one replica and %s to the other", i, one[i].Type, one[i].ID, two[i].ID)
		}
	}
	samples, err := second.manager.Events.Samples("default", time.Now().Add(-time.Minute), time.Now().Add(time.Minute))
	if started := slices.ContainsFunc(samples, func(s events.Sample) bool { return s.Rate > 0 }); err != nil || !started {
		t.Errorf("metrics of the team: %v, %v", samples, err)
	}
	if first.manager.Webhooks != nil || first.manager.Builds != nil {
		t.Error("a cluster's replica has webhooks or builds")
	}
	testDeleteTemplate(t, first)
}

// eventsOf returns the events of the default namespace once they are of these types.
func eventsOf(t *testing.T, d *Daemon, want ...events.Type) (list []events.Event) {
	t.Helper()
	eventually.NoError(t, "events", func() (err error) {
		if list, err = d.manager.Events.List(events.Query{Namespace: "default", Limit: 10, OldestFirst: true}); err != nil {
			return err
		}
		var got []events.Type
		for _, e := range list {
			got = append(got, e.Type)
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("got %v, want %v", got, want)
		}
		return nil
	})
	return list
}

// testDeleteTemplate deletes an applied template, once no pool has it, and none that is not the team's.
func testDeleteTemplate(t *testing.T, d *Daemon) {
	t.Helper()
	ctx, objects := t.Context(), d.cache.Live()
	pool := fakecluster.Pool("default", "pool", "", "mine")
	if err := objects.Create(ctx, pool); err != nil {
		t.Fatal(err)
	}
	remove := func(namespace, id string) error { return d.manager.DeleteTemplate(ctx, namespace, id) }
	eventually.NoError(t, "the pool is seen", func() error {
		_, err := d.cache.Pool(ctx, client.ObjectKeyFromObject(pool))
		return err
	})
	if err := remove("default", "mine"); !errors.Is(err, errs.ErrConflict) || !strings.Contains(errs.Text(err), `used by the warm pool "pool"`) {
		t.Errorf("a template that a pool uses: %v", err)
	}
	if err := objects.Delete(ctx, pool); err != nil {
		t.Fatal(err)
	}
	if err := remove("other", "mine"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("another team's template: %v", err)
	}
	eventually.True(t, "the pool is gone", func() bool {
		_, err := d.cache.Pool(ctx, client.ObjectKeyFromObject(pool))
		return errors.Is(err, errs.ErrNotFound)
	})
	if err := remove("default", "mine"); err != nil {
		t.Error(err)
	}
	if err := objects.Get(ctx, client.ObjectKey{Namespace: "default", Name: "mine"}, &extensions.SandboxTemplate{}); !apierrors.IsNotFound(err) {
		t.Errorf("a deleted template: %v", err)
	}
}
