package v1beta1

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

const (
	// MaxVolumes is how many volumes a sandbox may have.
	MaxVolumes = 32
	// maxEgressEntries is how long a list of an egress policy may be.
	maxEgressEntries = 1000
	// maxWarmUpWords is how long a warm-up's command may be, maxWarmUpSeconds how long it may run.
	maxWarmUpWords, maxWarmUpSeconds = 256, 3600
	// maxUserName is how long a user's name may be, with that of a group.
	maxUserName = 64
)

// userName is a user's name or ID, alone or with that of a group.
var userName = regexp.MustCompile(`^[^:\s]+(:[^:\s]+)?$`)

// Validate checks a Sandbox after defaulting. old is nil on create. Each error names its field.
func Validate(s, old *Sandbox) field.ErrorList {
	spec := field.NewPath("spec")
	errs := ValidateBlueprint(&s.Spec.SandboxBlueprint, spec)
	errs = append(errs, OneOf(spec.Child("shutdownPolicy"), s.Spec.ShutdownPolicy, ShutdownDelete, ShutdownRetain)...)
	errs = append(errs, OneOf(spec.Child("operatingMode"), s.Spec.OperatingMode, ModeRunning, ModeSuspended)...)
	if b := s.Spec.Barchan; b != nil {
		errs = append(errs, ValidateBarchan(b, spec.Child("barchan"))...)
	}
	if old != nil && !apiequality.Semantic.DeepEqual(restoreOf(&s.Spec), restoreOf(&old.Spec)) {
		errs = append(errs, field.Forbidden(spec.Child("barchan", "restore"), "is immutable"))
	}
	if old != nil && !apiequality.Semantic.DeepEqual(s.Spec.VolumeClaimTemplates, old.Spec.VolumeClaimTemplates) {
		errs = append(errs, field.Forbidden(spec.Child("volumeClaimTemplates"), "volumeClaimTemplates is immutable"))
	}
	return errs
}

func restoreOf(s *SandboxSpec) *RestoreSource {
	if s.Barchan == nil {
		return nil
	}
	return s.Barchan.Restore
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

// ValidateVolumeClaims checks the volumes of a sandbox.
func ValidateVolumeClaims(claims []PersistentVolumeClaimTemplate, path *field.Path) (errs field.ErrorList) {
	if len(claims) > MaxVolumes {
		return field.ErrorList{field.TooMany(path, len(claims), MaxVolumes)}
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
	errs = append(errs, OneOf(path.Child("resume"), b.Resume, ResumeMemory, ResumeFiles)...)
	errs = append(errs, validateOrigin(b, path)...)
	if b.Wake != nil && b.Wake.TimeoutSeconds < 0 {
		errs = append(errs, field.Invalid(path.Child("wake", "timeoutSeconds"), b.Wake.TimeoutSeconds, "must be positive"))
	}
	if i := b.Idle; i != nil {
		if i.AfterSeconds < 1 {
			errs = append(errs, field.Invalid(path.Child("idle", "afterSeconds"), i.AfterSeconds, "must be at least 1"))
		}
		errs = append(errs, OneOf(path.Child("idle", "action"), i.Action, TimeoutPause, TimeoutShutdown)...)
	}
	if a := b.Access; a != nil && a.RequestsPerSecond < 0 {
		errs = append(errs, field.Invalid(path.Child("access", "requestsPerSecond"), a.RequestsPerSecond, "must be positive"))
	}
	if n := b.Network; n != nil {
		errs = append(errs, ValidateEgress(n, path.Child("network"))...)
	}
	return errs
}

// validateOrigin checks what a sandbox starts from, and what others may start from it.
func validateOrigin(b *BarchanSpec, path *field.Path) (errs field.ErrorList) {
	if r := b.Restore; r != nil {
		if at := path.Child("restore", "checkpointName"); r.CheckpointName == "" {
			errs = append(errs, field.Required(at, "name a Checkpoint of this namespace"))
		} else if problems := validation.IsDNS1123Subdomain(r.CheckpointName); len(problems) > 0 {
			errs = append(errs, field.Invalid(at, r.CheckpointName, strings.Join(problems, "; ")))
		}
	}
	if w := b.WarmUp; w != nil {
		switch at := path.Child("warmUp", "command"); {
		case len(w.Command) == 0:
			errs = append(errs, field.Required(at, "name a program"))
		case len(w.Command) > maxWarmUpWords:
			errs = append(errs, field.TooMany(at, len(w.Command), maxWarmUpWords))
		case w.Command[0] == "":
			errs = append(errs, field.Invalid(at.Index(0), "", "must name a program"))
		}
		if w.TimeoutSeconds < 1 || w.TimeoutSeconds > maxWarmUpSeconds {
			errs = append(errs, field.Invalid(path.Child("warmUp", "timeoutSeconds"), w.TimeoutSeconds, "must be from 1 to 3600"))
		}
	}
	if u := b.DefaultUser; u != "" && (len(u) > maxUserName || !userName.MatchString(u)) {
		errs = append(errs, field.Invalid(path.Child("defaultUser"), u, fmt.Sprintf("must be a user's name or ID, with \":\" and a group if wanted, of at most %d characters", maxUserName)))
	}
	if f := b.Fork; f != nil {
		errs = append(errs, OneOf(path.Child("fork", "secrets"), f.Secrets, SecretsRefuse, SecretsAllow)...)
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
