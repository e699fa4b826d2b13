package admission

import (
	"context"
	"fmt"
	goruntime "runtime"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
	"github.com/barchan-dev/barchan/internal/node/egress"
)

// Host refuses what this machine could not run.
type Host struct {
	// machine is what there is of CPUs and memory.
	machine corev1.ResourceList
}

// NewHost reads the CPUs and the memory of this machine.
func NewHost() (Host, error) {
	_, memory, err := hostcheck.ReadMemory()
	if err != nil {
		return Host{}, fmt.Errorf("read the size of the memory: %w", err)
	}
	return Host{corev1.ResourceList{
		corev1.ResourceCPU: *resource.NewQuantity(int64(goruntime.NumCPU()), resource.DecimalSI), corev1.ResourceMemory: *resource.NewQuantity(memory, resource.BinarySI),
	}}, nil
}

// Admit is a registry.AdmissionFunc; old is nil for what is new.
func (d Host) Admit(_ context.Context, obj, old runtime.Object) field.ErrorList {
	pod := field.NewPath("spec", "podTemplate", "spec")
	switch o := obj.(type) {
	case *agents.Sandbox:
		errs := append(sandbox.CheckRunnable(&o.Spec.PodTemplate.Spec, pod), sandbox.CheckMounts(&o.Spec.SandboxBlueprint, pod)...)
		var before *corev1.PodSpec
		if was, isUpdate := old.(*agents.Sandbox); isUpdate {
			before = &was.Spec.PodTemplate.Spec
			errs = append(errs, sandbox.CheckChange(o, was, pod)...)
		}
		errs = append(errs, sandbox.CheckFits(&o.Spec.PodTemplate.Spec, before, d.machine, pod)...)
		if b := o.Spec.Barchan; b != nil && b.NetworkPolicy != nil {
			errs = append(errs, egress.CheckRules(b.NetworkPolicy.Egress, field.NewPath("spec", "barchan", "networkPolicy", "egress"))...)
		}
		return errs
	case *extensions.SandboxTemplate:
		errs := append(sandbox.CheckRunnable(&o.Spec.PodTemplate.Spec, pod), sandbox.CheckMounts(&o.Spec.SandboxBlueprint, pod)...)
		var before *corev1.PodSpec
		if was, isUpdate := old.(*extensions.SandboxTemplate); isUpdate {
			before = &was.Spec.PodTemplate.Spec
		}
		errs = append(errs, sandbox.CheckFits(&o.Spec.PodTemplate.Spec, before, d.machine, pod)...)
		if p := extensions.ManagedPolicy(o); p != nil {
			errs = append(errs, egress.CheckRules(p.Egress, field.NewPath("spec", "networkPolicy", "egress"))...)
		}
		return errs
	default:
		return nil
	}
}
