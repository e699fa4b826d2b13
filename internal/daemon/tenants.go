package daemon

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// tenantOf looks an API key up, as the REST API does; it is an apiserver.KeyFunc.
func (d *Daemon) tenantOf(ctx context.Context, secret string) (apiserver.Tenant, error) {
	if err := d.booted(); err != nil {
		return apiserver.Tenant{}, err
	}
	id, err := d.manager.Authenticate(ctx, secret)
	return apiserver.Tenant{Namespace: id.Namespace, Key: id.Key}, err
}

// admit is the admission of all objects: what this host can run and, of a tenant's, what the
// tenant may have.
func (d *Daemon) admit(onHost apiserver.AdmissionFunc) apiserver.AdmissionFunc {
	return func(ctx context.Context, obj, old runtime.Object) field.ErrorList {
		list := onHost(ctx, obj, old)
		if tenant, ok := apiserver.TenantOf(ctx); ok && len(list) == 0 {
			list = d.admitTenant(ctx, tenant, obj, old)
		}
		return list
	}
}

// admitTenant refuses a weaker isolation than the server's own choice, and sandboxes beyond the
// quota. The REST API has no field for the former, and asks for the latter itself.
func (d *Daemon) admitTenant(ctx context.Context, tenant apiserver.Tenant, obj, old runtime.Object) field.ErrorList {
	switch o := obj.(type) {
	case *extensions.SandboxTemplate:
		return d.checkClass(&o.Spec.PodTemplate.Spec)
	case *agents.Sandbox:
		if list := d.checkClass(&o.Spec.PodTemplate.Spec); len(list) > 0 {
			return list
		}
		before, _ := old.(*agents.Sandbox)
		runs := before != nil && before.Spec.OperatingMode != agents.ModeSuspended
		if runs || o.Spec.OperatingMode == agents.ModeSuspended {
			return nil
		}
		hold, err := d.quotas.Hold(ctx, quota.Request{
			Namespace: tenant.Namespace, Size: d.quotas.SizeOf(&o.Spec.PodTemplate.Spec), Paused: before != nil,
		})
		if err != nil {
			message, _ := errs.PublicMessage(err)
			return field.ErrorList{field.Forbidden(field.NewPath("spec"), message)}
		}
		hold.For(o.Name) // until the sandbox counts by itself
	}
	return nil
}

func (d *Daemon) checkClass(pod *corev1.PodSpec) field.ErrorList {
	c := pod.RuntimeClassName
	if c == nil || *c != agents.RuntimeRunc || d.cfg.DefaultRuntime == agents.RuntimeRunc {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec", "podTemplate", "spec", "runtimeClassName"),
		"an API key may not choose runc, which isolates less; leave it out")}
}
