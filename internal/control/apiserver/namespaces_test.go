package apiserver_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/apiserver/kinds"
	"github.com/barchan-dev/barchan/internal/control/apiserver/registry"
)

func namespace(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

func TestNamespaces(t *testing.T) {
	s := start(t)
	c := clientAs(t, s, apiserver.UserAdmin)

	t.Run("made at start", func(t *testing.T) {
		for _, name := range []string{"default", registry.SystemNamespace} {
			var ns corev1.Namespace
			if err := c.Get(t.Context(), client.ObjectKey{Name: name}, &ns); err != nil || ns.Status.Phase != corev1.NamespaceActive {
				t.Errorf("namespace %s: %v, phase %q", name, err, ns.Status.Phase)
			}
			if err := c.Delete(t.Context(), &ns); !apierrors.IsForbidden(err) {
				t.Errorf("delete of %s = %v, want forbidden", name, err)
			}
		}
	})
	t.Run("missing", func(t *testing.T) {
		sb := sandbox("a")
		sb.Namespace = "nowhere"
		err := c.Create(t.Context(), sb)
		if !apierrors.IsNotFound(err) || !strings.Contains(err.Error(), `namespaces "nowhere" not found`) {
			t.Errorf("create = %v, want the namespace not found", err)
		}
	})
	t.Run("deleted with its contents", func(t *testing.T) { testNamespaceDeletion(t, c) })
	t.Run("bad name", func(t *testing.T) {
		if err := c.Create(t.Context(), namespace("a.b")); !apierrors.IsInvalid(err) {
			t.Errorf("create = %v, want invalid", err)
		}
	})
}

func testNamespaceDeletion(t *testing.T, c client.Client) {
	const hold = "barchan.dev/hold"
	create(t, c, namespace("tenant"))
	held, cm := sandbox("held"), configMap("cm")
	held.Namespace, cm.Namespace = "tenant", "tenant"
	controllerutil.AddFinalizer(held, hold)
	create(t, c, held, cm)
	// The finalizer is not a user's to remove.
	ns := namespace("tenant")
	unfinalize(t, c, ns, kinds.NamespaceFinalizer)
	if err := c.Delete(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	gone(t, c, cm)
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(ns), ns); err != nil || ns.Status.Phase != corev1.NamespaceTerminating {
		t.Fatalf("while something is left: %v, phase %q", err, ns.Status.Phase)
	}
	late := configMap("late")
	late.Namespace = "tenant"
	err := c.Create(t.Context(), late)
	if !apierrors.IsForbidden(err) || !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		t.Errorf("create in a namespace that goes = %v, want forbidden", err)
	}
	unfinalize(t, c, held, hold)
	gone(t, c, ns)

	create(t, c, namespace("tenant"))
	again := configMap("again")
	again.Namespace = "tenant"
	create(t, c, again)
}

// TestNothingOutlivesItsNamespace creates objects while their namespace is deleted: each was
// either refused or is gone with it.
func TestNothingOutlivesItsNamespace(t *testing.T) {
	s := start(t)
	c := clientAs(t, s, apiserver.UserAdmin)
	for range 5 {
		create(t, c, namespace("race"))
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					sb := sandbox("")
					sb.Namespace, sb.GenerateName = "race", "sb-"
					err := c.Create(ctx, sb)
					if err != nil && ctx.Err() == nil && !apierrors.IsForbidden(err) && !apierrors.IsNotFound(err) {
						t.Errorf("create: %v", err)
					}
				}
			})
		}
		until(t, "some sandboxes", func(ctx context.Context) (bool, error) {
			var list agents.SandboxList
			err := c.List(ctx, &list, client.InNamespace("race"))
			return len(list.Items) > 20, err
		})
		if err := c.Delete(t.Context(), namespace("race")); err != nil {
			t.Error(err)
		}
		gone(t, c, namespace("race"))
		cancel()
		wg.Wait()
		var list agents.SandboxList
		if err := c.List(t.Context(), &list, client.InNamespace("race")); err != nil || len(list.Items) > 0 {
			t.Fatalf("%d sandboxes outlive their namespace (%v)", len(list.Items), err)
		}
	}
}
