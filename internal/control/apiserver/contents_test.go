package apiserver_test

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

// TestContents has the sum of a namespace's objects follow every write, those of metadata too, and begin with what is stored.
func TestContents(t *testing.T) {
	const least, large = 4 << 10, 100 << 10
	s := start(t)
	c := clientAs(t, s, apiserver.UserAdmin)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	want := func(what string, from, to int64) {
		t.Helper()
		if got, err := s.Contents(t.Context(), "acme"); err != nil || got < from || got > to {
			t.Errorf("%s: %d bytes (%v), want %d to %d", what, got, err, from, to)
		}
	}
	must(c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "acme"}}))
	claim := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "acme", Name: "a"}}
	claim.Spec.WarmPoolRef.Name = "x"
	must(c.Create(t.Context(), claim.DeepCopy()))
	want("listed", least, least)
	claim.Name = "b"
	must(c.Create(t.Context(), claim))
	want("another", 2*least, 2*least)
	must(c.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "acme", Name: "m"}, Data: map[string]string{"a": strings.Repeat("a", large)}}))
	want("a large one", 2*least+large, 3*least+large)
	claim.Annotations = map[string]string{"a": strings.Repeat("a", large)}
	must(c.Update(t.Context(), claim))
	want("larger metadata", 2*large, 2*large+3*least)
	claim.Finalizers = []string{"acme.example/stay"}
	must(c.Update(t.Context(), claim))
	must(c.Delete(t.Context(), claim))
	want("one that stays after its deletion", 2*large, 2*large+3*least)
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "acme", Name: "m"}}
	must(c.Delete(t.Context(), m, client.DryRunAll))
	want("a deletion that is none", 2*large, 2*large+3*least)
	must(c.Delete(t.Context(), m))
	want("without it", large, large+3*least)
	must(c.Get(t.Context(), client.ObjectKeyFromObject(claim), claim))
	claim.Finalizers = nil
	must(c.Update(t.Context(), claim))
	want("without both", least, least)
	must(c.Create(t.Context(), &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "acme", Name: "e"}, InvolvedObject: corev1.ObjectReference{Namespace: "acme"}}))
	want("with an event", least, least)
}

// TestBoundSeesMetadata: what bounds a tenant's objects is asked for a change of metadata alone too, in which labels, owners and
// finalizers have no largest number.
func TestBoundSeesMetadata(t *testing.T) {
	s := start(t, func(c *apiserver.Config) {
		c.Bound = func(_ context.Context, obj, _ runtime.Object) field.ErrorList {
			if o := obj.(metav1.Object); o.GetLabels()["large"] == "" {
				return nil
			}
			return field.ErrorList{field.Forbidden(field.NewPath("metadata"), "too large")}
		}
	})
	c := clientAs(t, s, apiserver.UserAdmin)
	box := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}}
	box.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "x"}}
	if err := c.Create(t.Context(), box); err != nil {
		t.Fatal(err)
	}
	box.Labels = map[string]string{"large": "yes"}
	if err := c.Update(t.Context(), box); err == nil || !strings.Contains(err.Error(), "too large") {
		t.Errorf("an update of metadata: %v", err)
	}
	box.Labels = map[string]string{"small": "yes"}
	if err := c.Update(t.Context(), box); err != nil {
		t.Error(err)
	}
}
