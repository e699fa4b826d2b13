package v1beta1

import (
	"fmt"
	"math"
	"regexp"
	"slices"

	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// SetTemplateDefaults fills what the user left out.
func SetTemplateDefaults(t *SandboxTemplate) {
	agents.SetBlueprintDefaults(&t.Spec.SandboxBlueprint)
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
	if b := p.Spec.Barchan; b != nil && b.Autoscale != nil {
		setIfEmpty(&b.Autoscale.SparePercent, 20)
		setIfEmpty(&b.Autoscale.IdleSeconds, 600)
	}
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
			if b.Sandbox.NetworkPolicy != nil {
				errs = append(errs, field.Forbidden(spec.Child("barchan", "sandbox", "networkPolicy"), "a template's stands in spec.networkPolicy"))
			}
			if r := b.Sandbox.Restore; b.Sandbox.WarmUp != nil && r != nil && !r.FilesOnly {
				errs = append(errs, field.Forbidden(spec.Child("barchan", "sandbox", "warmUp"), "is not run where memory is restored: leave it out, or set restore.filesOnly"))
			}
		}
		errs = append(errs, validateTagOf(t, spec.Child("barchan", "tagOf"))...)
		for i, alias := range b.Aliases {
			if slices.Contains(b.Aliases[:i], alias) {
				errs = append(errs, field.Duplicate(spec.Child("barchan", "aliases").Index(i), alias))
			}
		}
	}
	return errs
}

// TemplateWarnings returns warnings for the parts of a template without effect.
func TemplateWarnings(t *SandboxTemplate) (warnings []string) {
	p := ManagedPolicy(t)
	if p == nil {
		return nil
	}
	path := field.NewPath("spec", "networkPolicy")
	warnings = append(warnings, path.Child("ingress").String()+": has no effect: the gateway alone reaches sandboxes; spec.barchan.sandbox.access restricts access")
	for i, rule := range p.Egress {
		for j, peer := range rule.To {
			if peer.IPBlock == nil {
				at := path.Child("egress").Index(i).Child("to").Index(j)
				warnings = append(warnings, at.String()+": allows nothing but DNS where the rule names port 53: sandboxes reach no Pods")
			}
		}
	}
	return warnings
}

// MaxPoolReplicas is the greatest size of a pool.
const MaxPoolReplicas = 1000

// ValidateWarmPool checks a pool after defaulting.
func ValidateWarmPool(p *SandboxWarmPool) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	errs = append(errs, between(spec.Child("replicas"), *p.Spec.Replicas, 0, MaxPoolReplicas)...)
	if b := p.Spec.Barchan; b != nil {
		errs = append(errs, validatePoolBarchan(b, spec.Child("barchan"))...)
	}
	if p.Spec.SandboxTemplateRef.Name == "" {
		errs = append(errs, field.Required(spec.Child("sandboxTemplateRef", "name"), ""))
	}
	return append(errs, agents.OneOf(spec.Child("updateStrategy", "type"), p.Spec.UpdateStrategy.Type, UpdateRecreate, UpdateOnReplenish)...)
}

func validatePoolBarchan(b *WarmPoolBarchanSpec, path *field.Path) (errs field.ErrorList) {
	errs = append(errs, validateBound(b.MaxSurge, path.Child("maxSurge"))...)
	errs = append(errs, validateBound(b.MaxUnavailable, path.Child("maxUnavailable"))...)
	if zero(b.MaxSurge) && b.MaxUnavailable != nil && zero(b.MaxUnavailable) {
		errs = append(errs, field.Invalid(path.Child("maxUnavailable"), b.MaxUnavailable.String(), "must not be 0 while maxSurge is 0"))
	}
	if a := b.Autoscale; a != nil {
		at := path.Child("autoscale")
		errs = append(errs, between(at.Child("maxReplicas"), a.MaxReplicas, 1, MaxPoolReplicas)...)
		errs = append(errs, between(at.Child("minReplicas"), a.MinReplicas, 0, a.MaxReplicas)...)
		errs = append(errs, between(at.Child("sparePercent"), a.SparePercent, 1, 99)...)
		errs = append(errs, between(at.Child("idleSeconds"), a.IdleSeconds, 1, math.MaxInt32)...)
	}
	return errs
}

// share is one of the whole, in percent.
var share = regexp.MustCompile(`^(100|[1-9]?[0-9])%$`)

// validateBound checks a number of members, or a share of them in percent.
func validateBound(v *intstr.IntOrString, path *field.Path) field.ErrorList {
	if v == nil {
		return nil
	}
	if (v.Type == intstr.Int && v.IntVal < 0) || (v.Type == intstr.String && !share.MatchString(v.StrVal)) {
		return field.ErrorList{field.Invalid(path, v.String(), "must be a number of 0 or more, or a share from 0% to 100%")}
	}
	return nil
}

func zero(v *intstr.IntOrString) bool {
	return v == nil || v.String() == "0" || v.String() == "0%"
}

func between(path *field.Path, value, low, high int32) field.ErrorList {
	if value < low || value > high {
		return field.ErrorList{field.Invalid(path, value, fmt.Sprintf("must be from %d to %d", low, high))}
	}
	return nil
}

// ValidateClaim checks a claim after defaulting. The names of its volumes are left to the claim's controller.
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
	if _, err := QueueTimeout(c); err != nil {
		errs = append(errs, err)
	}
	for i, e := range c.Spec.Env {
		if e.Name == "" {
			errs = append(errs, field.Required(spec.Child("env").Index(i).Child("name"), ""))
		}
	}
	if n := len(c.Spec.VolumeClaimTemplates); n > agents.MaxVolumes {
		errs = append(errs, field.TooMany(spec.Child("volumeClaimTemplates"), n, agents.MaxVolumes))
	}
	return errs
}

func validateInjection(path *field.Path, p InjectionPolicy) field.ErrorList {
	return agents.OneOf(path, p, InjectionDisallowed, InjectionAllowed, InjectionOverrides)
}

func setIfEmpty[T comparable](p *T, value T) {
	var empty T
	if *p == empty {
		*p = value
	}
}
