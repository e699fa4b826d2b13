package admission

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// noNamespaces has only defaults.
type noNamespaces struct{}

func (noNamespaces) Namespace(_ context.Context, name string) (*corev1.Namespace, error) {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, nil
}

// TestTenantsKeepToNumbers refuses what a tenant creates by kubectl as the REST API would, and no change of what exists.
func TestTenantsKeepToNumbers(t *testing.T) {
	limits := quota.Limits{}
	for _, kind := range quota.Kinds() {
		limits.Objects[kind] = quota.AtMost(1)
	}
	q, err := quota.New(quota.Config{Reader: noNamespaces{}, Log: slog.New(slog.DiscardHandler), Defaults: limits})
	if err != nil {
		t.Fatal(err)
	}
	tenants, tenant := Tenants{Quotas: func() *quota.Quotas { return q }}, tenancy.Tenant{Namespace: "a"}
	hook := &corev1.Secret{Type: barchan.WebhookSecretType}
	hook.Labels = map[string]string{barchan.LabelWebhook: ""}
	for _, o := range []client.Object{&extensions.SandboxTemplate{}, &barchan.Checkpoint{}, &barchan.TemplateBuild{}, &barchan.APIKey{}, hook} {
		o.SetNamespace("a")
		o.SetName("first")
		if bad := tenants.checkObjects(t.Context(), tenant, o, nil); len(bad) > 0 {
			t.Errorf("the first %T: %v", o, bad)
		}
		next := o.DeepCopyObject().(client.Object)
		next.SetName("second")
		if bad := tenants.checkObjects(t.Context(), tenant, next, nil); len(bad) != 1 || !strings.Contains(bad[0].Detail, "quota of the namespace: at most 1 ") {
			t.Errorf("the second %T: %v", o, bad)
		}
		if bad := tenants.checkObjects(t.Context(), tenant, next, next); len(bad) > 0 {
			t.Errorf("a change of %T: %v", o, bad)
		}
	}
	plain := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "plain"}}
	if bad := tenants.checkObjects(t.Context(), tenant, plain, nil); len(bad) > 0 {
		t.Errorf("a Secret: %v", bad)
	}
	became := hook.DeepCopy()
	became.Name = "plain"
	if bad := tenants.checkObjects(t.Context(), tenant, became, plain); len(bad) != 1 {
		t.Errorf("a Secret that becomes a webhook: %v", bad)
	}
}

// TestTenantsKeepToStoredBytes refuses what would store more, by the field that asks for it.
func TestTenantsKeepToStoredBytes(t *testing.T) {
	q, err := quota.New(quota.Config{Reader: noNamespaces{}, Log: slog.New(slog.DiscardHandler), Defaults: quota.Limits{Stored: quota.AtMost(1)}})
	if err != nil {
		t.Fatal(err)
	}
	tenants, tenant := Tenants{Quotas: func() *quota.Quotas { return q }}, tenancy.Tenant{Namespace: "a"}
	box := func(change func(*agents.SandboxSpec)) *agents.Sandbox {
		s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s"}}
		s.Spec.Barchan = &agents.BarchanSpec{}
		change(&s.Spec)
		return s
	}
	runs := box(func(*agents.SandboxSpec) {})
	suspended := box(func(s *agents.SandboxSpec) { s.OperatingMode = agents.ModeSuspended })
	files := box(func(s *agents.SandboxSpec) {
		s.OperatingMode, s.Barchan.Suspend = agents.ModeSuspended, agents.SuspendFiles
	})
	pauses := box(func(s *agents.SandboxSpec) { s.Barchan.OnTimeout = agents.TimeoutPause })
	large := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "large"}}
	large.Status.Size = new(resource.MustParse("1Gi"))
	for _, full := range []bool{false, true} {
		if full {
			quota.ObserveObjects[*barchan.Checkpoint](q)(nil, large)
		}
		for name, c := range map[string]struct {
			now, before *agents.Sandbox
			refused     string // the field, in a full namespace
		}{
			"pause":                   {suspended, runs, "spec.operatingMode"},
			"change of a paused one":  {suspended, suspended, ""},
			"pause with files":        {files, runs, ""},
			"resume":                  {runs, suspended, ""},
			"create":                  {runs, nil, ""},
			"create that pauses":      {pauses, nil, "spec.barchan"},
			"timeout that now pauses": {pauses, runs, "spec.barchan"},
			"timeout that had paused": {pauses, pauses, ""},
		} {
			var old runtime.Object
			if c.before != nil {
				old = c.before
			}
			bad := tenants.admitTenant(t.Context(), tenant, c.now, old)
			if !full || c.refused == "" {
				if len(bad) > 0 {
					t.Errorf("%s, full %v: %v", name, full, bad)
				}
			} else if len(bad) != 1 || bad[0].Field != c.refused {
				t.Errorf("%s in a full namespace: %v", name, bad)
			}
		}
	}
	next := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "next"}}
	if bad := tenants.checkObjects(t.Context(), tenant, next, nil); len(bad) != 1 || bad[0].Field != "spec" {
		t.Errorf("a checkpoint: %v", bad)
	}
}
