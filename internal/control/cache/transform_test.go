package cache_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// twins makes two sandboxes with equal blueprints.
func twins(t *testing.T, c *cache.Cache) (keys []types.NamespacedName) {
	t.Helper()
	for _, name := range []string{"a", "b"} {
		s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		s.Spec.PodTemplate = template("", "x").Spec.PodTemplate
		s.Spec.PodTemplate.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A", Value: "1"}}
		if err := c.Live().Create(t.Context(), s, client.FieldOwner("maker")); err != nil {
			t.Fatal(err)
		}
		keys = append(keys, client.ObjectKeyFromObject(s))
		if _, err := c.WaitSandbox(t.Context(), keys[len(keys)-1], there); err != nil {
			t.Fatal(err)
		}
	}
	return keys
}

// TestTrimmedWrites has the owner of a field in a cache that leaves out owners, and shares blueprints: an update of what was read keeps
// both as the API server has them.
func TestTrimmedWrites(t *testing.T) {
	cfg := serve(t)
	c, _ := synced(t, cache.Config{REST: cfg, Trim: true})
	keys := twins(t, c)
	all, err := c.Sandboxes(t.Context(), "")
	if err != nil || len(all) != 2 {
		t.Fatal(all, err)
	}
	if len(all[0].ManagedFields)+len(all[1].ManagedFields) > 0 {
		t.Error("the cache holds managed fields")
	}
	if &all[0].Spec.PodTemplate.Spec.Containers[0] != &all[1].Spec.PodTemplate.Spec.Containers[0] {
		t.Error("equal blueprints are held twice")
	}
	s, err := c.Sandbox(t.Context(), keys[0])
	if err != nil {
		t.Fatal(err)
	}
	s.Labels = map[string]string{"changed": "yes"}
	s.Spec.PodTemplate.Spec.Containers[0].Env[0].Value = "2"
	if err := c.Live().Update(t.Context(), s, client.FieldOwner("changer")); err != nil {
		t.Fatal(err)
	}
	live := &agents.Sandbox{}
	if err := c.Live().Get(t.Context(), keys[0], live); err != nil {
		t.Fatal(err)
	}
	for _, owner := range []string{"maker", "changer"} {
		if !slices.ContainsFunc(live.ManagedFields, func(f metav1.ManagedFieldsEntry) bool { return f.Manager == owner }) {
			t.Errorf("%s owns no field after an update of what was trimmed: %v", owner, live.ManagedFields)
		}
	}
	if _, err := c.WaitSandbox(t.Context(), keys[0], func(s *agents.Sandbox) (bool, error) { return s.Labels["changed"] != "", nil }); err != nil {
		t.Fatal(err)
	}
	if other, err := c.Sandbox(t.Context(), keys[1]); err != nil || other.Spec.PodTemplate.Spec.Containers[0].Env[0].Value != "1" {
		t.Errorf("the other sandbox changed too: %+v, %v", other, err)
	}
}

// TestHeldKinds: a cache refuses what it does not hold, and has the indexes that were read.
func TestHeldKinds(t *testing.T) {
	c, _ := synced(t, cache.Config{REST: serve(t), Kinds: cache.ReplicaKinds()})
	key := types.NamespacedName{Namespace: "default", Name: "x"}
	for name, read := range map[string]func(context.Context) error{
		"get":      func(ctx context.Context) error { _, err := c.Claim(ctx, key); return err },
		"list":     func(ctx context.Context) error { _, err := c.TemplateRevisions(ctx, key); return err },
		"by index": func(ctx context.Context) error { _, err := c.ClaimsOn(ctx, key); return err },
	} {
		if err := read(t.Context()); err == nil || errors.Is(err, errs.ErrNotFound) {
			t.Errorf("%s of a kind that is not held = %v", name, err)
		}
	}
	if _, err := c.SandboxByID(t.Context(), "x"); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("SandboxByID = %v", err)
	}
	if got := cache.Indexes[*agents.Sandbox](c); !slices.Equal(got, []string{"barchan.sandboxID", "namespace"}) {
		t.Errorf("indexes of sandboxes: %v", got)
	}
	if all, err := c.Owned(t.Context(), ""); err != nil || len(all) > 0 {
		t.Errorf("Owned by none = %v, %v", all, err)
	}
}

// TestSecrets: any Secret is seen, also by its metadata alone, which sandboxes wait for; its values are not.
func TestSecrets(t *testing.T) {
	c, _ := synced(t, cache.Config{REST: serve(t)})
	meta := &metav1.PartialObjectMetadata{}
	meta.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
	if _, err := c.Informers().GetInformer(t.Context(), meta); err != nil {
		t.Fatal(err)
	}
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "plain"}, Data: map[string][]byte{"token": []byte("swordfish")}}
	s.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: "swordfish", "kept": "yes"}
	if err := c.Live().Create(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	key, held := client.ObjectKeyFromObject(s), &corev1.Secret{}
	for _, o := range []client.Object{held, meta} {
		eventually.NoError(t, "it is in the cache", func() error { return c.Informers().Get(t.Context(), key, o) })
		if a := o.GetAnnotations(); len(a) != 1 || a["kept"] != "yes" {
			t.Errorf("%T has annotations %v", o, a)
		}
	}
	if len(held.Data) > 0 {
		t.Errorf("the cache holds %v", held.Data)
	}
	if o := c.Watchable(held); o != client.Object(held) {
		t.Errorf("a kind that is held is watched as %T too", o)
	}
	if o, ok := c.Watchable(&corev1.ConfigMap{}).(*metav1.PartialObjectMetadata); !ok || o.GroupVersionKind() != corev1.SchemeGroupVersion.WithKind("ConfigMap") {
		t.Errorf("a kind that is not held is watched as %+v", o)
	}
}
