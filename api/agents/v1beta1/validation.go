package v1beta1

import (
	"net/netip"
	"slices"
	"strings"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

const (
	// maxVolumes is how many volumes a sandbox may have.
	maxVolumes = 32
	// maxEgressEntries is how long a list of an egress policy may be.
	maxEgressEntries = 1000
)

// Validate checks a Sandbox after defaulting. old is nil on create. Each error names its field.
func Validate(s, old *Sandbox) field.ErrorList {
	spec := field.NewPath("spec")
	errs := ValidateBlueprint(&s.Spec.SandboxBlueprint, spec)
	errs = append(errs, OneOf(spec.Child("shutdownPolicy"), s.Spec.ShutdownPolicy, ShutdownDelete, ShutdownRetain)...)
	errs = append(errs, OneOf(spec.Child("operatingMode"), s.Spec.OperatingMode, ModeRunning, ModeSuspended)...)
	if b := s.Spec.Barchan; b != nil {
		errs = append(errs, ValidateBarchan(b, spec.Child("barchan"))...)
	}
	if old != nil && !apiequality.Semantic.DeepEqual(s.Spec.VolumeClaimTemplates, old.Spec.VolumeClaimTemplates) {
		errs = append(errs, field.Forbidden(spec.Child("volumeClaimTemplates"), "is immutable"))
	}
	return errs
}

// ValidateBlueprint checks what Sandbox and SandboxTemplate share.
func ValidateBlueprint(b *SandboxBlueprint, path *field.Path) (errs field.ErrorList) {
	pod := path.Child("podTemplate", "spec")
	if len(b.PodTemplate.Spec.Containers) == 0 {
		errs = append(errs, field.Required(pod.Child("containers"), "name at least one container"))
	}
	seen := map[string]bool{}
	for i := range b.PodTemplate.Spec.Containers {
		c, at := &b.PodTemplate.Spec.Containers[i], pod.Child("containers").Index(i)
		switch {
		case c.Name == "":
			errs = append(errs, field.Required(at.Child("name"), ""))
		case len(validation.IsDNS1123Label(c.Name)) > 0:
			errs = append(errs, field.Invalid(at.Child("name"), c.Name, strings.Join(validation.IsDNS1123Label(c.Name), "; ")))
		case seen[c.Name]:
			errs = append(errs, field.Duplicate(at.Child("name"), c.Name))
		}
		seen[c.Name] = true
	}
	errs = append(errs, ValidateVolumeClaims(b.VolumeClaimTemplates, path.Child("volumeClaimTemplates"))...)
	return errs
}

// ValidateVolumeClaims checks the volumes of a sandbox, or those that a claim brings.
func ValidateVolumeClaims(claims []PersistentVolumeClaimTemplate, path *field.Path) (errs field.ErrorList) {
	if len(claims) > maxVolumes {
		return field.ErrorList{field.TooMany(path, len(claims), maxVolumes)}
	}
	seen := map[string]bool{}
	for i := range claims {
		at := path.Index(i).Child("metadata", "name")
		switch name := claims[i].Name; {
		case name == "":
			errs = append(errs, field.Required(at, "the claim needs a name"))
		case len(validation.IsDNS1123Label(name)) > 0:
			errs = append(errs, field.Invalid(at, name, strings.Join(validation.IsDNS1123Label(name), "; ")))
		case seen[name]:
			errs = append(errs, field.Duplicate(at, name))
		}
		seen[claims[i].Name] = true
	}
	return errs
}

// ValidateBarchan checks Barchan's own part of a spec, after defaulting.
func ValidateBarchan(b *BarchanSpec, path *field.Path) (errs field.ErrorList) {
	errs = append(errs, OneOf(path.Child("onTimeout"), b.OnTimeout, TimeoutShutdown, TimeoutPause)...)
	errs = append(errs, OneOf(path.Child("suspend"), b.Suspend, SuspendMemory, SuspendFiles, SuspendDelete)...)
	if b.Wake != nil && b.Wake.TimeoutSeconds < 0 {
		errs = append(errs, field.Invalid(path.Child("wake", "timeoutSeconds"), b.Wake.TimeoutSeconds, "must be positive"))
	}
	if n := b.Network; n != nil {
		errs = append(errs, ValidateEgress(n, path.Child("network"))...)
	}
	return errs
}

// ValidateEgress checks an egress policy: a domain name in allowOut needs 0.0.0.0/0 in denyOut,
// or no internet at all; without that it would allow nothing that is not allowed already.
func ValidateEgress(n *EgressPolicy, path *field.Path) (errs field.ErrorList) {
	if len(n.AllowOut) > maxEgressEntries {
		return field.ErrorList{field.TooMany(path.Child("allowOut"), len(n.AllowOut), maxEgressEntries)}
	}
	if len(n.DenyOut) > maxEgressEntries {
		return field.ErrorList{field.TooMany(path.Child("denyOut"), len(n.DenyOut), maxEgressEntries)}
	}
	denyAll := slices.Contains(n.DenyOut, "0.0.0.0/0") || (n.Internet != nil && !*n.Internet)
	for i, entry := range n.AllowOut {
		at := path.Child("allowOut").Index(i)
		switch {
		case IsAddressOrPrefix(entry):
		case len(validation.IsWildcardDNS1123Subdomain(entry)) > 0 && len(validation.IsDNS1123Subdomain(entry)) > 0:
			errs = append(errs, field.Invalid(at, entry, "must be an IP address, a CIDR or a domain name"))
		case !denyAll:
			errs = append(errs, field.Invalid(at, entry, "a domain name needs 0.0.0.0/0 in denyOut"))
		}
	}
	for i, entry := range n.DenyOut {
		if !IsAddressOrPrefix(entry) {
			errs = append(errs, field.Invalid(path.Child("denyOut").Index(i), entry, "must be an IP address or a CIDR"))
		}
	}
	return errs
}

// IsAddressOrPrefix reports whether text is an IP address or a CIDR prefix. An address with a
// zone is none, nor is an IPv4 address in the clothes of IPv6.
func IsAddressOrPrefix(text string) bool {
	a, err := netip.ParseAddr(text)
	if err != nil {
		p, err := netip.ParsePrefix(text)
		return err == nil && !p.Addr().Is4In6()
	}
	return a.Zone() == "" && !a.Is4In6()
}

// OneOf checks that a value is one of those allowed.
func OneOf[T ~string](path *field.Path, value T, allowed ...T) field.ErrorList {
	if slices.Contains(allowed, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(path, value, allowed)}
}
