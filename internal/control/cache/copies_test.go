package cache_test

import (
	"context"
	"reflect"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/cache"
)

// Promise 7, for every read of which the result is not shared: eight callers change their results, and none sees a change of another.
func TestEveryReadIsACopy(t *testing.T) {
	c, _ := start(t)
	ctx := t.Context()
	at := metav1.ObjectMeta{Namespace: "default", Name: "x", Labels: map[string]string{"mine": "no"}}
	box := &agents.Sandbox{ObjectMeta: at}
	box.Labels = map[string]string{"mine": "no", agents.LabelWarmPoolSandbox: "p"}
	box.Spec.PodTemplate = template("", "x").Spec.PodTemplate
	tmpl := template("x", "x")
	tmpl.Labels = at.Labels
	swp := &extensions.SandboxWarmPool{ObjectMeta: at}
	swp.Spec.SandboxTemplateRef.Name = "x"
	claim := &extensions.SandboxClaim{ObjectMeta: at}
	claim.Spec.WarmPoolRef.Name = "x"
	for _, o := range []client.Object{box, tmpl, swp, claim} {
		if err := c.Live().Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "copies", Labels: map[string]string{"mine": "no"}}}
	if err := c.Live().Create(ctx, ns); err != nil {
		t.Fatal(err)
	}
	reads := reads(c)
	var wg sync.WaitGroup
	for range 8 {
		for what, get := range reads {
			wg.Go(func() { spoil(ctx, t, what, get) })
		}
	}
	wg.Wait()
}

// reads are all ways to read the objects of the test.
func reads(c *cache.Cache) map[string]func(context.Context) ([]client.Object, error) {
	key := types.NamespacedName{Namespace: "default", Name: "x"}
	return map[string]func(context.Context) ([]client.Object, error){
		"Sandbox": func(ctx context.Context) ([]client.Object, error) {
			return one(cache.Wait(ctx, c, key, is[*agents.Sandbox]))
		},
		"Template": func(ctx context.Context) ([]client.Object, error) {
			return one(cache.Wait(ctx, c, key, is[*extensions.SandboxTemplate]))
		},
		"Pool": func(ctx context.Context) ([]client.Object, error) {
			return one(cache.Wait(ctx, c, key, is[*extensions.SandboxWarmPool]))
		},
		"Claim": func(ctx context.Context) ([]client.Object, error) {
			return one(cache.Wait(ctx, c, key, is[*extensions.SandboxClaim]))
		},
		"Namespace": func(ctx context.Context) ([]client.Object, error) {
			return one(cache.Wait(ctx, c, types.NamespacedName{Name: "copies"}, is[*corev1.Namespace]))
		},
		"SandboxByID": func(ctx context.Context) ([]client.Object, error) {
			all, err := c.Members(ctx, "p")
			if err != nil {
				return nil, err
			}
			return one(c.SandboxByID(ctx, sandbox.IDOf(all[0].UID)))
		},
		"Templates": func(ctx context.Context) ([]client.Object, error) { return many(c.Templates(ctx, "default")) },
		"TemplatesNamed": func(ctx context.Context) ([]client.Object, error) {
			return many(c.TemplatesNamed(ctx, "default", "x"))
		},
		"PoolsOf": func(ctx context.Context) ([]client.Object, error) { return many(c.PoolsOf(ctx, "", key)) },
		"Checkpoints": func(ctx context.Context) ([]client.Object, error) {
			return many[barchan.Checkpoint](c.Checkpoints(ctx, "default"))
		},
		"CurrentTemplate": func(ctx context.Context) ([]client.Object, error) {
			t, _, err := c.CurrentTemplate(ctx, key)
			return one(t, err)
		},
	}
}

func is[T client.Object](o T) (bool, error) { return !reflect.ValueOf(o).IsNil(), nil }

func one[T client.Object](o T, err error) ([]client.Object, error) { return []client.Object{o}, err }

func many[T any, P interface {
	*T
	client.Object
}](items []T, err error) ([]client.Object, error) {
	var all []client.Object
	for i := range items {
		all = append(all, P(&items[i]))
	}
	return all, err
}

// spoil reads, checks for others' changes, and changes its result.
func spoil(ctx context.Context, t *testing.T, what string, get func(context.Context) ([]client.Object, error)) {
	for range 20 {
		got, err := get(ctx)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return
		}
		for _, o := range got {
			if o.GetLabels()["mine"] != "no" && o.GetName() != "default" {
				t.Errorf("%s: another caller's change shows", what)
				return
			}
			o.GetLabels()["mine"] = "yes"
			if b, ok := o.(*agents.Sandbox); ok {
				b.Spec.PodTemplate.Spec.Containers[0].Image = "changed"
			}
			if b, ok := o.(*extensions.SandboxTemplate); ok {
				b.Spec.PodTemplate.Spec.Containers[0].Image = "changed"
			}
		}
	}
}
