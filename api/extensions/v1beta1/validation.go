package v1beta1

import (
	"slices"

	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// SetTemplateDefaults fills what the user left out.
func SetTemplateDefaults(t *SandboxTemplate) {
	setIfEmpty(&t.Spec.NetworkPolicyManagement, NetworkManaged)
	setIfEmpty(&t.Spec.EnvVarsInjectionPolicy, InjectionDisallowed)
	setIfEmpty(&t.Spec.VolumeClaimTemplatesPolicy, InjectionDisallowed)
	if b := t.Spec.Barchan; b != nil && b.Sandbox != nil {
		agents.SetBarchanDefaults(b.Sandbox)
	}
}

// SetWarmPoolDefaults fills what the user left out.
func SetWarmPoolDefaults(p *SandboxWarmPool) {
	if p.Spec.Replicas == nil {
		one := int32(1)
		p.Spec.Replicas = &one
	}
	if p.Spec.UpdateStrategy == nil {
		p.Spec.UpdateStrategy = &UpdateStrategy{}
	}
	setIfEmpty(&p.Spec.UpdateStrategy.Type, UpdateOnReplenish)
}

// SetClaimDefaults fills what the user left out.
func SetClaimDefaults(c *SandboxClaim) {
	if c.Spec.Lifecycle != nil {
		setIfEmpty(&c.Spec.Lifecycle.ShutdownPolicy, ClaimRetain)
	}
}

// ValidateTemplate checks a template after defaulting.
func ValidateTemplate(t *SandboxTemplate) field.ErrorList {
	spec := field.NewPath("spec")
	errs := agents.ValidateBlueprint(&t.Spec.SandboxBlueprint, spec)
	errs = append(errs, agents.OneOf(spec.Child("networkPolicyManagement"), t.Spec.NetworkPolicyManagement, NetworkManaged, NetworkUnmanaged)...)
	errs = append(errs, validateInjection(spec.Child("envVarsInjectionPolicy"), t.Spec.EnvVarsInjectionPolicy)...)
	errs = append(errs, validateInjection(spec.Child("volumeClaimTemplatesPolicy"), t.Spec.VolumeClaimTemplatesPolicy)...)
	if b := t.Spec.Barchan; b != nil {
		if b.Sandbox != nil {
			errs = append(errs, agents.ValidateBarchan(b.Sandbox, spec.Child("barchan", "sandbox"))...)
		}
		for i, alias := range b.Aliases {
			if slices.Contains(b.Aliases[:i], alias) {
				errs = append(errs, field.Duplicate(spec.Child("barchan", "aliases").Index(i), alias))
			}
		}
	}
	return errs
}

// ValidateWarmPool checks a pool after defaulting.
func ValidateWarmPool(p *SandboxWarmPool) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if *p.Spec.Replicas < 0 {
		errs = append(errs, field.Invalid(spec.Child("replicas"), *p.Spec.Replicas, "must be 0 or more"))
	}
	if p.Spec.SandboxTemplateRef.Name == "" {
		errs = append(errs, field.Required(spec.Child("sandboxTemplateRef", "name"), ""))
	}
	return append(errs, agents.OneOf(spec.Child("updateStrategy", "type"), p.Spec.UpdateStrategy.Type, UpdateRecreate, UpdateOnReplenish)...)
}

// ValidateClaim checks a claim after defaulting.
func ValidateClaim(c *SandboxClaim) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if c.Spec.WarmPoolRef.Name == "" {
		errs = append(errs, field.Required(spec.Child("warmPoolRef", "name"), ""))
	}
	if l := c.Spec.Lifecycle; l != nil {
		at := spec.Child("lifecycle")
		errs = append(errs, agents.OneOf(at.Child("shutdownPolicy"), l.ShutdownPolicy, ClaimDelete, ClaimDeleteForeground, ClaimRetain)...)
		if l.TTLSecondsAfterFinished != nil && *l.TTLSecondsAfterFinished < 0 {
			errs = append(errs, field.Invalid(at.Child("ttlSecondsAfterFinished"), *l.TTLSecondsAfterFinished, "must be 0 or more"))
		}
	}
	for i, e := range c.Spec.Env {
		if e.Name == "" {
			errs = append(errs, field.Required(spec.Child("env").Index(i).Child("name"), ""))
		}
	}
	return errs
}

func validateInjection(path *field.Path, p InjectionPolicy) field.ErrorList {
	return agents.OneOf(path, p, InjectionDisallowed, InjectionAllowed, InjectionOverrides)
}

func setIfEmpty[T ~string](p *T, value T) {
	if *p == "" {
		*p = value
	}
}
