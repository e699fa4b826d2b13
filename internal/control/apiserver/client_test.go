package apiserver_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/apiserver/registry"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestClaimIsExclusive: of many conditional writes to one object, one wins.
func TestClaimIsExclusive(t *testing.T) {
	c := clientAs(t, start(t), apiserver.UserController)
	create(t, c, sandbox("a"))
	var seen agents.Sandbox
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(sandbox("a")), &seen); err != nil {
		t.Fatal(err)
	}
	var won, lost atomic.Int32
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			mine := seen.DeepCopy()
			mine.Labels = map[string]string{agents.LabelClaimUID: fmt.Sprint(i)}
			switch err := c.Update(t.Context(), mine); {
			case err == nil:
				won.Add(1)
			case apierrors.IsConflict(err):
				lost.Add(1)
			default:
				t.Errorf("update: %v", err)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 || lost.Load() != 15 {
		t.Errorf("%d won and %d lost, want 1 and 15", won.Load(), lost.Load())
	}
}

func TestListInPages(t *testing.T) {
	c := clientAs(t, start(t), apiserver.UserAdmin)
	for i := range 7 {
		create(t, c, sandbox(fmt.Sprintf("s%d", i)))
	}
	var names []string
	opts := &client.ListOptions{Namespace: "default", Limit: 3}
	for {
		var page agents.SandboxList
		if err := c.List(t.Context(), &page, opts); err != nil {
			t.Fatal(err)
		}
		if len(page.Items) > 3 {
			t.Fatalf("a page of %d", len(page.Items))
		}
		for i := range page.Items {
			names = append(names, page.Items[i].Name)
		}
		if opts.Continue = page.Continue; opts.Continue == "" {
			break
		}
	}
	if got := strings.Join(names, " "); got != "s0 s1 s2 s3 s4 s5 s6" {
		t.Errorf("pages held %s", got)
	}
}

func TestSelectors(t *testing.T) {
	c := clientAs(t, start(t), apiserver.UserAdmin)
	paused := sandbox("paused")
	create(t, c, sandbox("plain"), paused, apiKey("k1"), with(apiKey("k2"), func(k *barchan.APIKey) { k.Spec.SHA256 = strings.Repeat("1b", 32) }))
	paused.Status.Barchan = &agents.BarchanStatus{Phase: "Paused"}
	if err := c.Status().Update(t.Context(), paused); err != nil {
		t.Fatal(err)
	}
	var sbs agents.SandboxList
	var keys barchan.APIKeyList
	for selector, list := range map[string]client.ObjectList{
		"status.barchan.phase=Paused":                     &sbs,
		"spec.sha256=" + strings.Repeat("1b", 32):         &keys,
		"metadata.name=paused":                            &sbs,
		"metadata.namespace=default,metadata.name!=plain": &sbs,
	} {
		fs, err := fields.ParseSelector(selector)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.List(t.Context(), list, client.MatchingFieldsSelector{Selector: fs}); err != nil {
			t.Fatalf("%s: %v", selector, err)
		}
		var got []string
		for i := range sbs.Items {
			got = append(got, sbs.Items[i].Name)
		}
		for i := range keys.Items {
			got = append(got, keys.Items[i].Name)
		}
		if len(got) != 1 || (got[0] != "paused" && got[0] != "k2") {
			t.Errorf("%s selects %v", selector, got)
		}
		sbs.Items, keys.Items = nil, nil
	}
}

// TestWatch: events come in order from a given version, and bookmarks report the progress.
func TestWatch(t *testing.T) {
	s := start(t)
	for name, cfg := range map[string]*rest.Config{"in process": s.RESTConfig(apiserver.UserAdmin), "over TLS": overTLS(t, s)} {
		t.Run(name, func(t *testing.T) {
			cs, err := kubernetes.NewForConfig(cfg)
			if err != nil {
				t.Fatal(err)
			}
			api := cs.CoreV1().ConfigMaps("default")
			first, err := api.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "w-"}}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			sendInitial := true
			w, err := api.Watch(t.Context(), metav1.ListOptions{
				FieldSelector: "metadata.name=" + first.Name, AllowWatchBookmarks: true,
				SendInitialEvents: &sendInitial, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
			})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Stop()
			next := func(want watch.EventType) *corev1.ConfigMap {
				t.Helper()
				for {
					select {
					case e := <-w.ResultChan():
						if e.Type == watch.Bookmark && want != watch.Bookmark {
							continue // they also come at intervals
						}
						if e.Type != want {
							t.Fatalf("event %s %v, want %s", e.Type, e.Object, want)
						}
						return e.Object.(*corev1.ConfigMap)
					case <-time.After(eventually.Patience):
						t.Fatalf("no %s", want)
					}
				}
			}
			next(watch.Added)
			if b := next(watch.Bookmark); b.Annotations[metav1.InitialEventsAnnotationKey] != "true" {
				t.Errorf("the bookmark after what was there has annotations %v", b.Annotations)
			}
			first.Data = map[string]string{"a": "b"}
			if _, err := api.Update(t.Context(), first, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := api.Delete(t.Context(), first.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			next(watch.Modified)
			next(watch.Deleted)

			again, err := api.Watch(t.Context(), metav1.ListOptions{ResourceVersion: first.ResourceVersion, FieldSelector: "metadata.name=" + first.Name})
			if err != nil {
				t.Fatal(err)
			}
			w.Stop()
			w = again
			next(watch.Modified)
			next(watch.Deleted)
		})
	}
}

func overTLS(t testing.TB, s *apiserver.Server) *rest.Config {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", s.AdminKubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	cfg.QPS = -1
	return cfg
}

func TestProtobuf(t *testing.T) {
	cfg := start(t).RESTConfig(apiserver.UserAdmin)
	cfg.ContentType = runtime.ContentTypeProtobuf
	cs, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	want := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Data: map[string][]byte{"a": {0, 1, 255}}}
	if _, err := cs.CoreV1().Secrets("default").Create(t.Context(), want, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := cs.CoreV1().Secrets("default").Get(t.Context(), "p", metav1.GetOptions{})
	if err != nil || string(got.Data["a"]) != string(want.Data["a"]) {
		t.Errorf("read back %v (%v)", got, err)
	}
}

// TestEventsAreOne: an event written through one group is read through the other.
func TestEventsAreOne(t *testing.T) {
	cs, err := kubernetes.NewForConfig(start(t).RESTConfig(apiserver.UserAdmin))
	if err != nil {
		t.Fatal(err)
	}
	about := corev1.ObjectReference{Kind: "Sandbox", Namespace: "default", Name: "one", UID: "u1"}
	modern := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "modern"}, Regarding: about, Reason: "Started", Note: "it runs", Type: "Normal",
		EventTime: metav1.NowMicro(), ReportingController: "barchan", ReportingInstance: "x", Action: "Start",
		Series: &eventsv1.EventSeries{Count: 3, LastObservedTime: metav1.NowMicro()},
	}
	old := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: "old"}, InvolvedObject: about, Reason: "Failed", Message: "it fell", Type: "Warning",
		Count: 2, Source: corev1.EventSource{Component: "barchan"}, LastTimestamp: metav1.Now(),
	}
	if _, err := cs.EventsV1().Events("default").Create(t.Context(), modern, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := cs.CoreV1().Events("default").Create(t.Context(), old, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	checkCoreEvent(t, cs, about)
	checkModernEvent(t, cs, about)
	patch := []byte(`{"note":"it still runs","series":{"count":4,"lastObservedTime":"2026-01-01T00:00:00.000000Z"}}`)
	patched, err := cs.EventsV1().Events("default").Patch(t.Context(), "modern", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	if err != nil || patched.Note != "it still runs" || patched.Series.Count != 4 {
		t.Errorf("patched: %+v (%v)", patched, err)
	}
}

func checkCoreEvent(t *testing.T, cs kubernetes.Interface, about corev1.ObjectReference) {
	t.Helper()
	list, err := cs.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.uid=u1,reason=Started"})
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("through v1: %v (%v)", list, err)
	}
	if e := list.Items[0]; e.Message != "it runs" || e.InvolvedObject != about || e.Series.Count != 3 || e.ReportingController != "barchan" {
		t.Errorf("through v1: %+v", e)
	}
}

func checkModernEvent(t *testing.T, cs kubernetes.Interface, about corev1.ObjectReference) {
	t.Helper()
	list, err := cs.EventsV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "regarding.name=one,type=Warning"})
	if err != nil || len(list.Items) != 1 {
		t.Fatalf("through events.k8s.io: %v (%v)", list, err)
	}
	if e := list.Items[0]; e.Note != "it fell" || e.Regarding != about || e.DeprecatedCount != 2 || e.DeprecatedSource.Component != "barchan" {
		t.Errorf("through events.k8s.io: %+v", e)
	}
}

func TestDryRunChangesNothing(t *testing.T) {
	c := clientAs(t, start(t), apiserver.UserAdmin)
	if err := c.Create(t.Context(), sandbox("a"), client.DryRunAll); err != nil {
		t.Fatal(err)
	}
	if exists(t, c, sandbox("a")) {
		t.Error("a dry run made the object")
	}
	bad := sandbox("a")
	bad.Spec.OperatingMode = "Dozing"
	if err := c.Create(t.Context(), bad, client.DryRunAll); !apierrors.IsInvalid(err) {
		t.Errorf("a dry run of bad input = %v, want invalid", err)
	}
}

// TestManager runs a controller-runtime manager on the server: caches, a reconciler, a field
// index, leader election and events.
func TestManager(t *testing.T) {
	s := start(t)
	lease, renew := 2*eventually.Patience, eventually.Patience // a stalled holder loses its lead
	ctx, cancel := context.WithCancel(t.Context())
	mgr, err := ctrl.NewManager(s.RESTConfig(apiserver.UserController), ctrl.Options{
		Scheme: testScheme(t), Metrics: metricsserver.Options{BindAddress: "0"},
		LeaderElection: true, LeaderElectionID: "test", LeaderElectionNamespace: registry.SystemNamespace, LeaderElectionReleaseOnCancel: true,
		LeaseDuration: &lease, RenewDeadline: &renew,
		Controller: ctrlConfig(),
	})
	if err != nil {
		t.Fatal(err)
	}
	err = mgr.GetFieldIndexer().IndexField(ctx, &agents.Sandbox{}, "mode", func(o client.Object) []string {
		return []string{string(o.(*agents.Sandbox).Spec.OperatingMode)}
	})
	if err != nil {
		t.Fatal(err)
	}
	recorder := mgr.GetEventRecorder("test")
	r := &marker{Client: mgr.GetClient(), report: func(sb *agents.Sandbox) {
		recorder.Eventf(sb, nil, corev1.EventTypeNormal, "Marked", "Mark", "seen %s", sb.Name)
	}}
	if err := ctrl.NewControllerManagedBy(mgr).For(&agents.Sandbox{}).Complete(r); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	c := clientAs(t, s, apiserver.UserAdmin)
	for i := range 20 {
		create(t, c, sandbox(fmt.Sprintf("m%d", i)))
	}
	until(t, "20 marked sandboxes", func(ctx context.Context) (bool, error) {
		var list agents.SandboxList
		err := mgr.GetClient().List(ctx, &list, client.MatchingFields{"mode": string(agents.ModeRunning)})
		n := 0
		for i := range list.Items {
			if list.Items[i].Status.NodeName == "marked" {
				n++
			}
		}
		return n == 20, err
	})
	until(t, "an event", func(ctx context.Context) (bool, error) {
		var events corev1.EventList
		err := c.List(ctx, &events, client.InNamespace("default"))
		return len(events.Items) > 0 && events.Items[0].Reason == "Marked", err
	})
	cancel()
	if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("manager: %v", err)
	}
}

type marker struct {
	client.Client
	report func(*agents.Sandbox)
}

func (m *marker) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var sb agents.Sandbox
	if err := m.Get(ctx, req.NamespacedName, &sb); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if sb.Status.NodeName == "marked" {
		return ctrl.Result{}, nil
	}
	before := sb.DeepCopy()
	sb.Status.NodeName = "marked"
	m.report(&sb)
	return ctrl.Result{}, client.IgnoreNotFound(m.Status().Patch(ctx, &sb, client.MergeFrom(before)))
}

func ctrlConfig() (c config.Controller) {
	yes := true
	c.SkipNameValidation = &yes // tests may run twice in one process
	return c
}
