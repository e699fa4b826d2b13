// Package admission refuses objects that this host cannot run, and objects that a tenant may not have.
//
// It changes no object, and reads nothing but the quotas.
package admission

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver/registry"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
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
		if tenant, ok := tenancy.Of(ctx); ok && len(list) == 0 {
			if list = t.admitTenant(ctx, tenant, obj, old); len(list) == 0 {
				list = t.checkObjects(ctx, tenant, obj, old)
			}
		}
		return list
	}
}

// Bound refuses what a tenant writes that is too large, too much for its namespace, or another membership of a warm pool. Unlike the rest
// it is for metadata too.
func (t Tenants) Bound(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	if tenant, ok := tenancy.Of(ctx); ok {
		return t.checkBound(ctx, tenant, obj, old)
	}
	return nil
}

func (t Tenants) checkBound(ctx context.Context, tenant tenancy.Tenant, obj, old runtime.Object) field.ErrorList {
	size, was := registry.Size(obj), int64(0)
	if old != nil {
		was = registry.Size(old)
	}
	if list := append(checkSize(obj, size, was), checkMember(obj, old)...); len(list) > 0 {
		return list
	}
	if err := t.Quotas().Write(ctx, tenant.Namespace, size, size-was); err != nil {
		return forbidden(field.NewPath("metadata"), err)
	}
	return nil
}

// checkMember refuses a tenant's change of the pool that a sandbox belongs to: members do not count against the quota.
func checkMember(obj, old runtime.Object) field.ErrorList {
	s, is := obj.(*agents.Sandbox)
	if !is {
		return nil
	}
	before, _ := old.(*agents.Sandbox)
	if before == nil {
		before = &agents.Sandbox{}
	}
	now, has := s.Labels[agents.LabelWarmPoolSandbox]
	was, had := before.Labels[agents.LabelWarmPoolSandbox]
	if now == was && has == had {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("metadata", "labels").Key(agents.LabelWarmPoolSandbox), "only the server may set or change it")}
}

// The sizes that an object of a tenant may have, as JSON. Caches have copies of each, and etcd has several revisions. Templates, and what
// becomes one, have a bound on their number.
const (
	maxObject   = 64 << 10
	maxTemplate = 512 << 10
)

// checkSize refuses an object of size bytes that is too large, unless it was as large before.
func checkSize(obj runtime.Object, size, was int64) field.ErrorList {
	most := int64(maxObject)
	switch obj.(type) {
	case *extensions.SandboxTemplate, *barchan.TemplateBuild, *corev1.Secret:
		most = maxTemplate
	}
	if size <= most || size <= was {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec"), fmt.Sprintf("the object has %d bytes as JSON, and may have %d; put large values into files, or into the image", size, most))}
}

// admitTenant refuses a weaker isolation than the server's own choice, and what is beyond the
// quota. The REST API has no field for the former, and asks for the latter itself.
func (t Tenants) admitTenant(ctx context.Context, tenant tenancy.Tenant, obj, old runtime.Object) field.ErrorList {
	switch o := obj.(type) {
	case *extensions.SandboxTemplate:
		return t.checkClass(&o.Spec.PodTemplate.Spec)
	case *agents.Sandbox:
		if list := t.checkClass(&o.Spec.PodTemplate.Spec); len(list) > 0 {
			return list
		}
		before, _ := old.(*agents.Sandbox)
		if list := t.checkPauses(ctx, tenant, o, before); len(list) > 0 {
			return list
		}
		runs := before != nil && before.Spec.OperatingMode != agents.ModeSuspended
		switch {
		case before == nil && o.Spec.OperatingMode == agents.ModeSuspended:
			if err := t.Quotas().AddPaused(ctx, tenant.Namespace); err != nil {
				return forbidden(field.NewPath("spec"), err)
			}
			return nil
		case runs || o.Spec.OperatingMode == agents.ModeSuspended:
			return nil
		}
		hold, err := t.Quotas().Hold(ctx, quota.Request{
			Namespace: tenant.Namespace, Size: t.Quotas().SizeOf(&o.Spec.PodTemplate.Spec), Paused: before != nil,
		})
		if err != nil {
			return forbidden(field.NewPath("spec"), err)
		}
		hold.For(o.Name) // until the watch brings the sandbox
	}
	return nil
}

// checkObjects refuses an object beyond the number that the namespace may have, and a checkpoint beyond its stored bytes.
func (t Tenants) checkObjects(ctx context.Context, tenant tenancy.Tenant, obj, old runtime.Object) field.ErrorList {
	if was, isUpdate := old.(client.Object); isUpdate {
		if _, counted := quota.KindOf(was); counted {
			return nil
		}
	}
	o := obj.(client.Object) //nolint:forcetypeassert // all stored objects are
	if _, is := o.(*barchan.Checkpoint); is {
		if err := t.Quotas().CheckStored(ctx, tenant.Namespace); err != nil {
			return forbidden(field.NewPath("spec"), err)
		}
	}
	if _, err := t.Quotas().Add(ctx, o); err != nil { // until the watch brings the object
		return forbidden(field.NewPath("metadata"), err)
	}
	return nil
}

// checkPauses refuses a pause with the memory, and a new timeout or idle policy that pauses, beyond the namespace's stored bytes.
func (t Tenants) checkPauses(ctx context.Context, tenant tenancy.Tenant, o, before *agents.Sandbox) field.ErrorList {
	spec := field.NewPath("spec")
	if before != nil && before.Spec.OperatingMode != agents.ModeSuspended && o.Spec.OperatingMode == agents.ModeSuspended && quota.KeepsMemory(o.Spec.Barchan) {
		if err := t.Quotas().CheckStored(ctx, tenant.Namespace); err != nil {
			return forbidden(spec.Child("operatingMode"), err)
		}
	}
	if before != nil && quota.PausesItself(before.Spec.Barchan) {
		return nil
	}
	if err := t.Quotas().CheckAutoPause(ctx, tenant.Namespace, o.Spec.Barchan); err != nil {
		return forbidden(spec.Child("barchan"), err)
	}
	return nil
}

func forbidden(path *field.Path, err error) field.ErrorList {
	message, _ := errs.PublicMessage(err)
	return field.ErrorList{field.Forbidden(path, message)}
}

func (t Tenants) checkClass(pod *corev1.PodSpec) field.ErrorList {
	c := pod.RuntimeClassName
	if c == nil || *c != agents.RuntimeRunc || t.DefaultRuntime == agents.RuntimeRunc {
		return nil
	}
	return field.ErrorList{field.Forbidden(field.NewPath("spec", "podTemplate", "spec", "runtimeClassName"),
		"an API key may not choose runc, which isolates less; leave it out")}
}
