package apiserver_test

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

func sandbox(name string) *agents.Sandbox {
	return &agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: agents.SandboxSpec{SandboxBlueprint: agents.SandboxBlueprint{PodTemplate: agents.PodTemplate{
			Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "base:1"}}},
		}}},
	}
}

func pool(name string) *extensions.SandboxWarmPool {
	return &extensions.SandboxWarmPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       extensions.SandboxWarmPoolSpec{SandboxTemplateRef: extensions.SandboxTemplateRef{Name: "base"}},
	}
}

func create(t testing.TB, c client.Client, objects ...client.Object) {
	t.Helper()
	for _, o := range objects {
		if err := c.Create(t.Context(), o); err != nil {
			t.Fatalf("create %T %s: %v", o, o.GetName(), err)
		}
	}
}

// owned creates a sandbox that a pool owns.
func owned(t testing.TB, c client.Client, name string, owner client.Object, block bool) *agents.Sandbox {
	t.Helper()
	sb := sandbox(name)
	if err := controllerutil.SetOwnerReference(owner, sb, c.Scheme(), controllerutil.WithBlockOwnerDeletion(block)); err != nil {
		t.Fatal(err)
	}
	create(t, c, sb)
	return sb
}

func exists(t testing.TB, c client.Client, o client.Object) bool {
	t.Helper()
	err := c.Get(t.Context(), client.ObjectKeyFromObject(o), o.DeepCopyObject().(client.Object))
	if err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	return err == nil
}

func gone(t testing.TB, c client.Client, o client.Object) {
	t.Helper()
	until(t, fmt.Sprintf("end of %T %s", o, o.GetName()), func(ctx context.Context) (bool, error) {
		err := c.Get(ctx, client.ObjectKeyFromObject(o), o.DeepCopyObject().(client.Object))
		return apierrors.IsNotFound(err), client.IgnoreNotFound(err)
	})
}

// unfinalize takes a finalizer off an object as it is now.
func unfinalize(t testing.TB, c client.Client, o client.Object, finalizer string) {
	t.Helper()
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		t.Fatal(err)
	}
	before := o.DeepCopyObject().(client.Object)
	controllerutil.RemoveFinalizer(o, finalizer)
	if err := c.Patch(t.Context(), o, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
}

func TestGarbageCollection(t *testing.T) {
	s := start(t)
	c := clientAs(t, s, apiserver.UserAdmin)

	t.Run("background", func(t *testing.T) {
		p, other := pool("bg"), sandbox("bg-other")
		create(t, c, p, other)
		a, b := owned(t, c, "bg-a", p, true), owned(t, c, "bg-b", p, false)
		if err := c.Delete(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		gone(t, c, a)
		gone(t, c, b)
		if !exists(t, c, other) {
			t.Error("an object without owners was collected")
		}
	})
	t.Run("grandchildren", func(t *testing.T) {
		p := pool("gp")
		create(t, c, p)
		child := owned(t, c, "gp-child", p, true)
		grandchild := owned(t, c, "gp-grandchild", child, true)
		if err := c.Delete(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		gone(t, c, grandchild)
	})
	t.Run("foreground", func(t *testing.T) { testForeground(t, c) })
	t.Run("orphan", func(t *testing.T) {
		p := pool("orphan")
		create(t, c, p)
		sb := owned(t, c, "orphan-a", p, true)
		if err := c.Delete(t.Context(), p, client.PropagationPolicy(metav1.DeletePropagationOrphan)); err != nil {
			t.Fatal(err)
		}
		gone(t, c, p)
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(sb), sb); err != nil || len(sb.OwnerReferences) > 0 || sb.DeletionTimestamp != nil {
			t.Errorf("the orphan: %v, owners %v", err, sb.OwnerReferences)
		}
	})
	t.Run("absent owner", func(t *testing.T) {
		sb := sandbox("absent")
		sb.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: extensions.GroupVersion.String(), Kind: "SandboxWarmPool", Name: "never", UID: "00000000-0000-0000-0000-000000000000",
		}}
		create(t, c, sb)
		gone(t, c, sb)
	})
	t.Run("owner of the same name", func(t *testing.T) {
		p := pool("again")
		create(t, c, p)
		sb := sandbox("again-a")
		sb.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: extensions.GroupVersion.String(), Kind: "SandboxWarmPool", Name: p.Name, UID: p.UID + types.UID("x"),
		}}
		create(t, c, sb)
		gone(t, c, sb)
	})
	t.Run("two owners", func(t *testing.T) { testTwoOwners(t, c) })
	t.Run("unknown kind of owner", func(t *testing.T) {
		sb, marker := sandbox("unknown"), sandbox("unknown-marker")
		sb.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "Deployment", Name: "d", UID: "u"}}
		marker.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "never", UID: "u2"}}
		create(t, c, sb, marker)
		gone(t, c, marker)
		if !exists(t, c, sb) {
			t.Error("collected on no knowledge of its owner")
		}
	})
	t.Run("circle", func(t *testing.T) { testCircle(t, c) })
}

func testTwoOwners(t *testing.T, c client.Client) {
	p, q := pool("two-p"), pool("two-q")
	create(t, c, p, q)
	sb := owned(t, c, "two-a", p, true)
	before := sb.DeepCopy()
	if err := controllerutil.SetOwnerReference(q, sb, c.Scheme()); err != nil {
		t.Fatal(err)
	}
	if err := c.Patch(t.Context(), sb, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	// A fresh orphan collected afterwards shows that the collector is past that deletion.
	marker := sandbox("two-marker")
	marker.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "never", UID: "u"}}
	create(t, c, marker)
	gone(t, c, marker)
	if !exists(t, c, sb) {
		t.Fatal("collected although one owner is left")
	}
	if err := c.Delete(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	gone(t, c, sb)
}

func testCircle(t *testing.T, c client.Client) {
	p := pool("circle")
	create(t, c, p)
	sb := owned(t, c, "circle-a", p, true)
	before := p.DeepCopy()
	if err := controllerutil.SetOwnerReference(sb, p, c.Scheme(), controllerutil.WithBlockOwnerDeletion(true)); err != nil {
		t.Fatal(err)
	}
	if err := c.Patch(t.Context(), p, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(t.Context(), p, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
		t.Fatal(err)
	}
	gone(t, c, p)
	gone(t, c, sb)
}

func testForeground(t *testing.T, c client.Client) {
	const hold = "barchan.dev/hold"
	p := pool("fg")
	create(t, c, p)
	blocking, free := owned(t, c, "fg-blocking", p, true), owned(t, c, "fg-free", p, false)
	before := blocking.DeepCopy()
	controllerutil.AddFinalizer(blocking, hold)
	if err := c.Patch(t.Context(), blocking, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	if err := c.Delete(t.Context(), p, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
		t.Fatal(err)
	}
	until(t, "deletion of the blocking dependent", func(ctx context.Context) (bool, error) {
		err := c.Get(ctx, client.ObjectKeyFromObject(blocking), blocking)
		return blocking.DeletionTimestamp != nil, err
	})
	if !exists(t, c, p) {
		t.Fatal("the owner went before the dependent that blocks it")
	}
	unfinalize(t, c, blocking, hold)
	gone(t, c, blocking)
	gone(t, c, p)
	gone(t, c, free)
}

// TestCollectedAfterRestart: an object that lost its owner while no server ran is collected at the start.
func TestCollectedAfterRestart(t *testing.T) {
	dir := t.TempDir()
	at := func(c *apiserver.Config) { c.DataDir, c.Listen = dir, "" }
	s := start(t, at)
	c := clientAs(t, s, apiserver.UserAdmin)
	p := pool("restart")
	create(t, c, p)
	a, kept := owned(t, c, "restart-a", p, true), sandbox("restart-kept")
	create(t, c, kept)
	if err := c.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	s.Stop() // most likely before the collector came to it; either way it must be gone below
	c = clientAs(t, start(t, at), apiserver.UserAdmin)
	gone(t, c, a)
	if !exists(t, c, kept) {
		t.Error("an object without owners was collected")
	}
}
