package apiserver_test

import (
	"context"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

func in(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "default", Name: name} }

func template(name string) *extensions.SandboxTemplate {
	return &extensions.SandboxTemplate{ObjectMeta: in(name), Spec: extensions.SandboxTemplateSpec{SandboxBlueprint: sandbox("").Spec.SandboxBlueprint}}
}

func claim(name string) *extensions.SandboxClaim {
	return &extensions.SandboxClaim{ObjectMeta: in(name), Spec: extensions.SandboxClaimSpec{
		WarmPoolRef: extensions.SandboxWarmPoolRef{Name: "p"}, Lifecycle: &extensions.ClaimLifecycle{},
	}}
}

func checkpoint(name string) *barchan.Checkpoint {
	return &barchan.Checkpoint{ObjectMeta: in(name), Spec: barchan.CheckpointSpec{SandboxName: "sb"}}
}

func apiKey(name string) *barchan.APIKey {
	return &barchan.APIKey{ObjectMeta: in(name), Spec: barchan.APIKeySpec{SHA256: strings.Repeat("0a", 32), Prefix: "bk_1234"}}
}

// TestDefaults: what the user left out of each kind is filled in by the server.
func TestDefaults(t *testing.T) {
	c := clientAs(t, start(t), apiserver.UserAdmin)
	sb, tp, p, cl, cp := sandbox("a"), template("a"), pool("a"), claim("a"), checkpoint("a")
	sb.Spec.Barchan = &agents.BarchanSpec{Access: &agents.AccessPolicy{}}
	secret := &corev1.Secret{ObjectMeta: in("a"), StringData: map[string]string{"k": "v"}}
	create(t, c, sb, tp, p, cl, cp, apiKey("a"), secret)
	for name, ok := range map[string]bool{
		"shutdownPolicy":            sb.Spec.ShutdownPolicy == agents.ShutdownRetain,
		"operatingMode":             sb.Spec.OperatingMode == agents.ModeRunning,
		"barchan.onTimeout":         sb.Spec.Barchan.OnTimeout == agents.TimeoutShutdown,
		"access.publicTraffic":      sb.Spec.Barchan.Access.PublicTraffic != nil && *sb.Spec.Barchan.Access.PublicTraffic,
		"networkPolicyManagement":   tp.Spec.NetworkPolicyManagement == extensions.NetworkManaged,
		"envVarsInjectionPolicy":    tp.Spec.EnvVarsInjectionPolicy == extensions.InjectionDisallowed,
		"replicas":                  p.Spec.Replicas != nil && *p.Spec.Replicas == 1,
		"updateStrategy":            p.Spec.UpdateStrategy != nil && p.Spec.UpdateStrategy.Type == extensions.UpdateOnReplenish,
		"lifecycle.shutdownPolicy":  cl.Spec.Lifecycle.ShutdownPolicy == extensions.ClaimRetain,
		"checkpoint content":        cp.Spec.Content == barchan.ContentMemoryAndFiles,
		"secret type":               secret.Type == corev1.SecretTypeOpaque,
		"secret stringData to data": string(secret.Data["k"]) == "v" && secret.StringData == nil,
	} {
		if !ok {
			t.Errorf("%s was not defaulted", name)
		}
	}
}

// TestValidation: each kind is refused by its own rules, with the field's name.
func TestValidation(t *testing.T) {
	c := clientAs(t, start(t), apiserver.UserAdmin)
	minus, yes, big := int32(-1), true, strings.Repeat("x", 1<<20+1)
	for name, tc := range map[string]struct {
		o     client.Object
		field string
	}{
		"sandbox": {with(sandbox("a"), func(s *agents.Sandbox) { s.Spec.ShutdownPolicy = "Maybe" }), "spec.shutdownPolicy"},
		"egress": {with(sandbox("a"), func(s *agents.Sandbox) {
			s.Spec.Barchan = &agents.BarchanSpec{Network: &agents.EgressPolicy{DenyOut: []string{"x"}}}
		}), "spec.barchan.network.denyOut[0]"},
		"template":   {with(template("a"), func(s *extensions.SandboxTemplate) { s.Spec.EnvVarsInjectionPolicy = "Maybe" }), "spec.envVarsInjectionPolicy"},
		"pool":       {with(pool("a"), func(p *extensions.SandboxWarmPool) { p.Spec.Replicas = &minus }), "spec.replicas"},
		"claim":      {with(claim("a"), func(c *extensions.SandboxClaim) { c.Spec.WarmPoolRef.Name = "" }), "spec.warmPoolRef.name"},
		"checkpoint": {with(checkpoint("a"), func(c *barchan.Checkpoint) { c.Spec.Content = "Maybe" }), "spec.content"},
		"key":        {with(apiKey("a"), func(k *barchan.APIKey) { k.Spec.SHA256 = "short" }), "spec.sha256"},
		"lease":      {&coordinationv1.Lease{ObjectMeta: in("a"), Spec: coordinationv1.LeaseSpec{LeaseDurationSeconds: &minus}}, "spec.leaseDurationSeconds"},
		"secret key": {&corev1.Secret{ObjectMeta: in("a"), Data: map[string][]byte{"a/b": nil}}, "data[a/b]"},
		"big secret": {&corev1.Secret{ObjectMeta: in("a"), StringData: map[string]string{"a": big}}, "data"},
		"config map": {&corev1.ConfigMap{ObjectMeta: in("a"), Data: map[string]string{"a": ""}, BinaryData: map[string][]byte{"a": nil}}, "data[a]"},
		"event":      {&corev1.Event{ObjectMeta: in("a"), InvolvedObject: corev1.ObjectReference{Namespace: "other"}}, "involvedObject.namespace"},
		"name":       {sandbox("A"), "metadata.name"},
		"owner": {with(sandbox("a"), func(s *agents.Sandbox) {
			s.OwnerReferences = []metav1.OwnerReference{{Kind: "X", APIVersion: "v1", UID: "u", BlockOwnerDeletion: &yes}}
		}), "metadata.ownerReferences"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.Create(t.Context(), tc.o)
			if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), tc.field) {
				t.Errorf("create = %v, want %s invalid", err, tc.field)
			}
		})
	}
}

func with[T any](o T, change func(T)) T {
	change(o)
	return o
}

func TestImmutable(t *testing.T) {
	c := clientAs(t, start(t), apiserver.UserAdmin)
	yes := true
	sb, cp := sandbox("a"), checkpoint("a")
	sealed := &corev1.ConfigMap{ObjectMeta: in("a"), Data: map[string]string{"a": "b"}, Immutable: &yes}
	secret := &corev1.Secret{ObjectMeta: in("a"), Data: map[string][]byte{"a": []byte("b")}, Immutable: &yes}
	create(t, c, sb, cp, sealed, secret)
	for name, tc := range map[string]struct {
		o     client.Object
		patch string
		field string
	}{
		"volume claims": {sb, `{"spec":{"volumeClaimTemplates":[{"metadata":{"name":"v"},"spec":{}}]}}`, "spec.volumeClaimTemplates"},
		"source":        {cp, `{"spec":{"sandboxName":"other"}}`, "spec"},
		"config map":    {sealed, `{"data":{"a":"c"}}`, "data"},
		"secret":        {secret, `{"immutable":false}`, "immutable"},
		"secret's type": {secret, `{"type":"other"}`, "type"},
		"name":          {sb, `{"metadata":{"name":"b"}}`, "name"},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.Patch(t.Context(), tc.o.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, []byte(tc.patch)))
			if (!apierrors.IsInvalid(err) && !apierrors.IsBadRequest(err)) || !strings.Contains(err.Error(), tc.field) {
				t.Errorf("patch = %v, want %s refused", err, tc.field)
			}
		})
	}
}

// view is what TestSpecAndStatus compares.
type view struct {
	mode       agents.OperatingMode
	node       string
	label      string
	generation int64
}

func viewOf(sb *agents.Sandbox) view {
	return view{sb.Spec.OperatingMode, sb.Status.NodeName, sb.Labels["a"], sb.Generation}
}

// TestSpecAndStatus: each is written through its own door, and only a spec counts generations.
func TestSpecAndStatus(t *testing.T) {
	c := clientAs(t, start(t), apiserver.UserAdmin)
	sb := sandbox("a")
	sb.Status.NodeName, sb.Generation = "forged", 7
	create(t, c, sb)
	for _, step := range []struct {
		name   string
		change func()
		write  func() error
		want   view
	}{
		{"nothing", func() {}, func() error { return nil }, view{agents.ModeRunning, "", "", 1}},
		{
			"labels and a forged status",
			func() { sb.Labels, sb.Status.NodeName = map[string]string{"a": "b"}, "forged" },
			func() error { return c.Update(t.Context(), sb) },
			view{agents.ModeRunning, "", "b", 1},
		},
		{
			"status and a forged spec",
			func() { sb.Spec.OperatingMode, sb.Status.NodeName, sb.Labels = agents.ModeSuspended, "real", nil },
			func() error { return c.Status().Update(t.Context(), sb) },
			view{agents.ModeRunning, "real", "b", 1},
		},
		{
			"spec",
			func() { sb.Spec.OperatingMode = agents.ModeSuspended },
			func() error { return c.Update(t.Context(), sb) },
			view{agents.ModeSuspended, "real", "b", 2},
		},
	} {
		step.change()
		if err := step.write(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		if got := viewOf(sb); got != step.want {
			t.Errorf("after %s: %+v, want %+v", step.name, got, step.want)
		}
	}
}

// TestConditionalWrites: what was read is what is changed, or nothing is.
func TestConditionalWrites(t *testing.T) {
	c := clientAs(t, start(t), apiserver.UserAdmin)
	sb := sandbox("a")
	create(t, c, sb)
	stale := sb.DeepCopy()
	sb.Spec.OperatingMode = agents.ModeSuspended
	if err := c.Update(t.Context(), sb); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"update":   c.Update(t.Context(), stale.DeepCopy()),
		"status":   c.Status().Update(t.Context(), stale.DeepCopy()),
		"deletion": c.Delete(t.Context(), sb, client.Preconditions{ResourceVersion: &stale.ResourceVersion}),
	} {
		if !apierrors.IsConflict(err) {
			t.Errorf("%s of an old version = %v, want a conflict", name, err)
		}
	}
	if err := c.Create(t.Context(), sandbox("a")); !apierrors.IsAlreadyExists(err) {
		t.Errorf("a second create = %v, want already exists", err)
	}
	version := sb.ResourceVersion
	if err := c.Update(t.Context(), sb); err != nil || sb.ResourceVersion != version {
		t.Errorf("an update that changes nothing: %v, version %s after %s", err, sb.ResourceVersion, version)
	}
}

func TestAdmission(t *testing.T) {
	refuse := false
	var olds []bool
	admit := func(_ context.Context, obj, old runtime.Object) field.ErrorList {
		sb, ok := obj.(*agents.Sandbox)
		if !ok {
			return nil
		}
		olds = append(olds, old != nil)
		if refuse && sb.Spec.PodTemplate.Spec.HostNetwork {
			return field.ErrorList{field.Forbidden(field.NewPath("spec", "podTemplate", "spec", "hostNetwork"), "this node offers none")}
		}
		return nil
	}
	c := clientAs(t, start(t, func(cfg *apiserver.Config) { cfg.Admission = admit }), apiserver.UserAdmin)
	sb := sandbox("a")
	sb.Spec.PodTemplate.Spec.HostNetwork = true
	create(t, c, sb)
	refuse = true
	sb.Finalizers = []string{"barchan.dev/hold"}
	if err := c.Update(t.Context(), sb); err != nil {
		t.Errorf("an update beside the spec of what was admitted before: %v", err)
	}
	sb.Spec.OperatingMode = agents.ModeSuspended
	if err := c.Update(t.Context(), sb); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.podTemplate.spec.hostNetwork: Forbidden: this node offers none") {
		t.Errorf("update = %v, want the field refused", err)
	}
	if err := c.Status().Update(t.Context(), sb); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		t.Errorf("status: %v", err)
	}
	other := sandbox("b")
	other.Spec.PodTemplate.Spec.HostNetwork = true
	if err := c.Create(t.Context(), other); !apierrors.IsInvalid(err) {
		t.Errorf("create = %v, want invalid", err)
	}
	if len(olds) != 3 || olds[0] || !olds[1] || olds[2] {
		t.Errorf("admission got old objects: %v, want create, update, create", olds)
	}
}
