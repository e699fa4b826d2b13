package cache_test

import (
	"context"
	"errors"
	"reflect"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// A cache that holds the parts of the API server's own objects reads as one that decodes all by itself: what was there before it
// started, what was made, changed, and deleted since. Nothing that a caller does to what it read shows anywhere else.
func TestSameAsTheAPIServers(t *testing.T) {
	api := startAPI(t)
	cfg := api.RESTConfig(apiserver.UserController)
	var shared, alone atomic.Int64
	same := func(ctx context.Context, o client.Object) client.Object {
		got := api.Same(ctx, o)
		if got != o {
			shared.Add(1)
		} else {
			alone.Add(1)
		}
		return got
	}
	plain, _ := synced(t, cache.Config{REST: cfg})
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
	eventually.True(t, "the first cache has all of that", func() bool {
		_, err := plain.Namespace(t.Context(), "n")
		return err == nil
	})
	sharing, _ := synced(t, cache.Config{REST: cfg, Same: same})
	b := sandboxNamed("b")
	must(write.Create(t.Context(), b))
	a.Labels["changed"] = "yes"
	a.Spec.PodTemplate.Spec.Containers[0].Env[0].Value = "2"
	must(write.Update(t.Context(), a))
	b.Status.Selector = "x=y"
	b.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Test", LastTransitionTime: metav1.Now()}}
	must(write.Status().Update(t.Context(), b))
	must(write.Delete(t.Context(), gone))
	lists := map[string]func() client.ObjectList{
		"sandboxes": func() client.ObjectList { return &agents.SandboxList{} }, "templates": func() client.ObjectList { return &extensions.SandboxTemplateList{} },
		"checkpoints": func() client.ObjectList { return &barchan.CheckpointList{} }, "secrets": func() client.ObjectList { return &corev1.SecretList{} },
		"namespaces": func() client.ObjectList { return &corev1.NamespaceList{} },
	}
	compare := func() {
		t.Helper()
		for name, list := range lists {
			eventually.True(t, name+" are equal in both caches", func() bool {
				one, other := list(), list()
				for c, into := range map[*cache.Cache]client.ObjectList{plain: one, sharing: other} {
					if err := c.Informers().List(t.Context(), into); err != nil {
						t.Fatal(err)
					}
				}
				x, y := byName(one), byName(other)
				return len(x) > 0 && apiequality.Semantic.DeepEqual(x, y)
			})
		}
	}
	for _, c := range []*cache.Cache{plain, sharing} {
		eventually.True(t, "the last write has arrived", func() bool {
			_, err := c.Sandbox(t.Context(), client.ObjectKeyFromObject(gone))
			return errors.Is(err, errs.ErrNotFound)
		})
	}
	compare()
	if shared.Load() < 5 || shared.Load() < alone.Load() {
		t.Errorf("%d objects were shared, %d were not", shared.Load(), alone.Load())
	}
	mine, err := sharing.Sandbox(t.Context(), client.ObjectKeyFromObject(b))
	must(err)
	mine.Labels["of"], mine.Annotations["a"] = "mine", "mine"
	mine.Spec.PodTemplate.Spec.Containers[0].Env[0].Value, mine.Status.Conditions[0].Reason = "mine", "Mine"
	compare()
	live := &agents.Sandbox{}
	if err := write.Get(t.Context(), client.ObjectKeyFromObject(b), live, &client.GetOptions{Raw: &metav1.GetOptions{ResourceVersion: "0"}}); err != nil || live.Labels["of"] != "test" || live.Status.Conditions[0].Reason != "Test" {
		t.Errorf("a caller's change shows in the API server: %+v, %v", live, err)
	}
}

func startAPI(t *testing.T) *apiserver.Server {
	t.Helper()
	api, err := apiserver.New(apiserver.Config{DataDir: t.TempDir(), Log: telemetry.Discard()})
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
