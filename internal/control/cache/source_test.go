package cache_test

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// interruption cuts the watches of sources. While it lasts there are none, and the first after it are from a version that is too old.
type interruption struct {
	mu      sync.Mutex
	over    chan struct{}         // closed; nil: watches are not cut
	watches []watch.Interface     // that are open
	stale   map[reflect.Type]bool // kinds whose next watch is from a version that is too old
	lists   map[reflect.Type]int  // by kind
}

func (i *interruption) begin() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.over = make(chan struct{})
	for kind := range i.lists {
		i.stale[kind] = true
	}
	for _, w := range i.watches {
		w.Stop()
	}
	i.watches = nil
}

func (i *interruption) end() {
	i.mu.Lock()
	defer i.mu.Unlock()
	close(i.over)
}

// of returns a source that is cut.
func (i *interruption) of(source func(client.Object) toolscache.ListerWatcher) func(client.Object) toolscache.ListerWatcher {
	return func(o client.Object) toolscache.ListerWatcher {
		kind, whole := reflect.TypeOf(o), source(o)
		from := toolscache.ToListerWatcherWithContext(whole)
		return toolscache.ToListWatcherWithWatchListSemantics(&toolscache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
				i.mu.Lock()
				i.lists[kind]++
				i.mu.Unlock()
				return from.ListWithContext(ctx, opts)
			},
			WatchFuncWithContext: func(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
				i.mu.Lock()
				over, stale := i.over, i.stale[kind]
				delete(i.stale, kind)
				i.mu.Unlock()
				if stale {
					select {
					case <-over:
					case <-ctx.Done():
					}
					opts.ResourceVersion = "1"
				}
				w, err := from.WatchWithContext(ctx, opts)
				i.mu.Lock()
				defer i.mu.Unlock()
				if err == nil {
					i.watches = append(i.watches, w)
				}
				return w, err
			},
		}, whole)
	}
}

// TestSource: a cache over the server's own source reads as one over REST that decodes all by itself: what was there before it started, what
// was made, changed and deleted since, and after a list, since its watches were from a version that is too old. It holds the objects of the
// server's watch cache, and nothing that a caller does to what it read shows anywhere else.
func TestSource(t *testing.T) {
	dir := t.TempDir()
	startAPI(t, dir).Stop()
	api := startAPI(t, dir) // whose watch cache does not begin with the first version
	source := api.Direct(apiserver.UserController).ListerWatcher
	plain, _ := synced(t, cache.Config{REST: api.RESTConfig(apiserver.UserController)})
	write := plain.Live()
	meta := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "default", Name: name, Labels: map[string]string{"of": "test"}, Annotations: map[string]string{"a": "b"}}
	}
	sandboxNamed := func(name string) *agents.Sandbox {
		s := &agents.Sandbox{ObjectMeta: meta(name)}
		s.Spec.PodTemplate = template("", "x").Spec.PodTemplate
		s.Spec.PodTemplate.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A", Value: "1"}}
		return s
	}
	checkpoint := &barchan.Checkpoint{ObjectMeta: meta("c")}
	checkpoint.Spec.SandboxName = "a"
	secret := &corev1.Secret{ObjectMeta: meta("s"), Data: map[string][]byte{"token": []byte("swordfish")}}
	secret.Annotations[corev1.LastAppliedConfigAnnotation] = "swordfish"
	a, gone := sandboxNamed("a"), sandboxNamed("gone")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, o := range []client.Object{a, gone, template("t", "x"), checkpoint, secret, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}}} {
		must(write.Create(t.Context(), o, client.FieldOwner("maker")))
	}
	cut := &interruption{stale: map[reflect.Type]bool{}, lists: map[reflect.Type]int{}}
	direct, _ := synced(t, cache.Config{REST: api.RESTConfig(apiserver.UserController), Source: cut.of(source)})
	lists := map[string]func() client.ObjectList{
		"sandboxes": func() client.ObjectList { return &agents.SandboxList{} }, "templates": func() client.ObjectList { return &extensions.SandboxTemplateList{} },
		"checkpoints": func() client.ObjectList { return &barchan.CheckpointList{} }, "secrets": func() client.ObjectList { return &corev1.SecretList{} },
		"namespaces": func() client.ObjectList { return &corev1.NamespaceList{} },
	}
	compare := func(when string) {
		t.Helper()
		for name, list := range lists {
			eventually.True(t, when+" "+name+" are equal in both caches, and not empty", func() bool {
				one, other := list(), list()
				for c, into := range map[*cache.Cache]client.ObjectList{plain: one, direct: other} {
					must(c.Informers().List(t.Context(), into))
				}
				x, y := byName(one), byName(other)
				return len(x) > 0 && apiequality.Semantic.DeepEqual(x, y)
			})
		}
	}
	arrive := func(last *agents.Sandbox) {
		t.Helper()
		for _, c := range []*cache.Cache{plain, direct} {
			eventually.True(t, "the last write has arrived", func() bool {
				_, err := c.Sandbox(t.Context(), client.ObjectKeyFromObject(last))
				return errors.Is(err, errs.ErrNotFound) == (last == gone)
			})
		}
	}
	compare("at first")

	b := sandboxNamed("b")
	must(write.Create(t.Context(), b))
	a.Labels["changed"] = "yes"
	a.Spec.PodTemplate.Spec.Containers[0].Env[0].Value = "2"
	must(write.Update(t.Context(), a))
	b.Status.Selector = "x=y"
	b.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Test", LastTransitionTime: metav1.Now()}}
	must(write.Status().Update(t.Context(), b))
	must(write.Delete(t.Context(), gone))
	arrive(gone)
	compare("after changes")

	cut.begin()
	c := sandboxNamed("c")
	must(write.Delete(t.Context(), a))
	must(write.Create(t.Context(), c))
	b.Labels["changed"] = "yes"
	must(write.Update(t.Context(), b))
	cut.end()
	arrive(c)
	compare("after a gap")
	last := sandboxNamed("last")
	must(write.Create(t.Context(), last))
	arrive(last)
	compare("after the gap, by a watch,")
	cut.mu.Lock()
	if kind := reflect.TypeFor[*agents.Sandbox](); cut.lists[kind] != 2 {
		t.Errorf("sandboxes were listed %d times, want 2", cut.lists[kind])
	}
	cut.mu.Unlock()

	watched, err := toolscache.ToListerWithContext(source(&agents.Sandbox{})).ListWithContext(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
	must(err)
	held, err := direct.Sandboxes(t.Context(), "default")
	must(err)
	own := byName(watched.(*agents.SandboxList))
	for _, s := range held {
		if o := own[client.ObjectKeyFromObject(s)]; reflect.ValueOf(o.GetLabels()).Pointer() != reflect.ValueOf(s.Labels).Pointer() {
			t.Errorf("sandbox %s is not that of the server's watch cache", s.Name)
		}
	}
	mine, err := direct.Sandbox(t.Context(), client.ObjectKeyFromObject(b))
	must(err)
	mine.Labels["of"], mine.Annotations["a"] = "mine", "mine"
	mine.Spec.PodTemplate.Spec.Containers[0].Env[0].Value, mine.Status.Conditions[0].Reason = "mine", "Mine"
	compare("after a caller's change")
	live := &corev1.Secret{}
	must(write.Get(t.Context(), client.ObjectKeyFromObject(secret), live, &client.GetOptions{Raw: &metav1.GetOptions{ResourceVersion: "0"}}))
	if string(live.Data["token"]) != "swordfish" || live.Annotations[corev1.LastAppliedConfigAnnotation] != "swordfish" {
		t.Errorf("what the cache leaves out of a Secret is gone from the API server: %+v", live)
	}
}

// startAPI starts an API server over a directory. It runs until the test ends.
func startAPI(t testing.TB, dir string) *apiserver.Server {
	t.Helper()
	api, err := apiserver.New(apiserver.Config{DataDir: dir, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	if err := api.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Stop)
	return api
}

// byName returns the objects of a list by their keys.
func byName(list client.ObjectList) map[client.ObjectKey]client.Object {
	all := map[client.ObjectKey]client.Object{}
	items := reflect.ValueOf(list).Elem().FieldByName("Items")
	for i := range items.Len() {
		o := items.Index(i).Addr().Interface().(client.Object)
		all[client.ObjectKeyFromObject(o)] = o
	}
	return all
}
