// Package admission refuses objects that this host cannot run, and objects that a tenant may not have.
//
// It changes no object, and reads nothing but the quotas.
package admission

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/apiserver/registry"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// Tenants admits objects of tenants.
type Tenants struct {
	DefaultRuntime string
	// Quotas are there when a tenant is authenticated.
	Quotas func() *quota.Quotas
}

// After returns the admission of all objects: first that of the host, then, for a tenant's request, that of the tenant.
func (t Tenants) After(onHost registry.AdmissionFunc) registry.AdmissionFunc {
	return func(ctx context.Context, obj, old runtime.Object) field.ErrorList {
		list := onHost(ctx, obj, old)
		if tenant, ok := apiserver.TenantOf(ctx); ok && len(list) == 0 {
			list = t.admitTenant(ctx, tenant, obj, old)
		}
		return list
	}
}

// admitTenant refuses a weaker isolation than the server's own choice, and sandboxes beyond the
// quota. The REST API has no field for the former, and reserves the latter itself.
func (t Tenants) admitTenant(ctx context.Context, tenant apiserver.Tenant, obj, old runtime.Object) field.ErrorList {
	switch o := obj.(type) {
	case *extensions.SandboxTemplate:
		return t.checkClass(&o.Spec.PodTemplate.Spec)
	case *agents.Sandbox:
		if list := t.checkClass(&o.Spec.PodTemplate.Spec); len(list) > 0 {
			return list
		}
		before, _ := old.(*agents.Sandbox)
		runs := before != nil && before.Spec.OperatingMode != agents.ModeSuspended
		if runs || o.Spec.OperatingMode == agents.ModeSuspended {
			return nil
		}
		hold, err := t.Quotas().Hold(ctx, quota.Request{
			Namespace: tenant.Namespace, Size: t.Quotas().SizeOf(&o.Spec.PodTemplate.Spec), Paused: before != nil,
		})
		if err != nil {
			message, _ := errs.PublicMessage(err)
			return field.ErrorList{field.Forbidden(field.NewPath("spec"), message)}
		}
		hold.For(o.Name) // until the watch brings the sandbox
	}
	return nil
}

func (t Tenants) checkClass(pod *corev1.PodSpec) field.ErrorList {
	c := pod.RuntimeClassName
	if c == nil || *c != agents.RuntimeRunc || t.DefaultRuntime == agents.RuntimeRunc {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec", "podTemplate", "spec", "runtimeClassName"),
		"an API key may not choose runc, which isolates less; leave it out")}
}
