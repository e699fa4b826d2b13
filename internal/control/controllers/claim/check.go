package claim

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// reservedDomains are domains whose keys, subdomains included, a claim may not set.
var reservedDomains = []string{"agents.x-k8s.io", "kubernetes.io", "k8s.io", "barchan.dev"}

// checkMetadata checks what a claim adds to the labels and annotations that the template sets.
func checkMetadata(add, set *agents.PodMetadata, at *field.Path) (errs field.ErrorList) {
	for _, kind := range []struct {
		name     string
		add, set map[string]string
		isLabel  bool
	}{
		{"labels", add.Labels, set.Labels, true},
		{"annotations", add.Annotations, set.Annotations, false},
	} {
		for _, key := range slices.Sorted(maps.Keys(kind.add)) {
			path := at.Child(kind.name).Key(key)
			errs = append(errs, checkKey(key, kind.isLabel, path)...)
			value := kind.add[key]
			if kind.isLabel {
				for _, problem := range validation.IsValidLabelValue(value) {
					errs = append(errs, field.Invalid(path, value, problem))
				}
			}
			if theirs, ok := kind.set[key]; ok && theirs != value {
				errs = append(errs, field.Invalid(path, value, fmt.Sprintf("the template sets it to %q, which a claim cannot change", theirs)))
			}
		}
	}
	return errs
}

// checkKey checks the key of a label or annotation. An annotation key may have capitals anywhere.
func checkKey(key string, isLabel bool, path *field.Path) (errs field.ErrorList) {
	form := key
	if !isLabel {
		form = strings.ToLower(key)
	}
	for _, problem := range validation.IsQualifiedName(form) {
		errs = append(errs, field.Invalid(path, key, problem))
	}
	domain, _, prefixed := strings.Cut(strings.ToLower(key), "/")
	if !prefixed {
		return errs
	}
	for _, reserved := range reservedDomains {
		if domain == reserved || strings.HasSuffix(domain, "."+reserved) {
			errs = append(errs, field.Forbidden(path, reserved+" is reserved; use a domain of your own, or none"))
		}
	}
	return errs
}

// checkEnv checks a claim's variables against the template and its policy.
func checkEnv(env []extensions.EnvVar, t *extensions.SandboxTemplate, at *field.Path) (errs field.ErrorList) {
	if len(env) == 0 {
		return nil
	}
	policy := t.Spec.EnvVarsInjectionPolicy
	if policy != extensions.InjectionAllowed && policy != extensions.InjectionOverrides {
		return field.ErrorList{field.Forbidden(at, fmt.Sprintf(
			"template %s lets claims bring no variables; leave them out, or set its envVarsInjectionPolicy to Allowed", t.Name))}
	}
	containers := t.Spec.PodTemplate.Spec.Containers
	for i, e := range env {
		path := at.Index(i)
		for _, problem := range validation.IsRelaxedEnvVarName(e.Name) {
			errs = append(errs, field.Invalid(path.Child("name"), e.Name, problem))
		}
		c := containerOf(&t.Spec.PodTemplate.Spec, e.ContainerName)
		if c < 0 {
			errs = append(errs, field.NotSupported(path.Child("containerName"), e.ContainerName, namesOf(containers)))
			continue
		}
		set := slices.ContainsFunc(containers[c].Env, func(o corev1.EnvVar) bool { return o.Name == e.Name })
		if set && policy != extensions.InjectionOverrides {
			errs = append(errs, field.Forbidden(path.Child("name"), fmt.Sprintf(
				"template %s sets %s; use another name, or set its envVarsInjectionPolicy to Overrides", t.Name, e.Name)))
		}
	}
	return errs
}

func namesOf(containers []corev1.Container) (names []string) {
	for i := range containers {
		names = append(names, containers[i].Name)
	}
	return names
}

// checkVolumes checks a claim's volumes against the template and its policy. sandbox is the name of the sandbox that gets them.
func checkVolumes(claims []agents.PersistentVolumeClaimTemplate, sandbox string, t *extensions.SandboxTemplate, at *field.Path) (errs field.ErrorList) {
	if len(claims) == 0 {
		return nil
	}
	policy := t.Spec.VolumeClaimTemplatesPolicy
	if policy != extensions.InjectionAllowed && policy != extensions.InjectionOverrides {
		return field.ErrorList{field.Forbidden(at, fmt.Sprintf(
			"template %s lets claims bring no volumes; leave them out, or set its volumeClaimTemplatesPolicy to Allowed", t.Name))}
	}
	seen := map[string]bool{}
	for i := range claims {
		path, name := at.Index(i).Child("metadata", "name"), claims[i].Name
		for _, problem := range validation.IsDNS1123Label(name) {
			errs = append(errs, field.Invalid(path, name, problem))
		}
		if object := name + "-" + sandbox; len(object) > validation.DNS1123SubdomainMaxLength {
			errs = append(errs, field.Invalid(path, name, fmt.Sprintf(
				"its PersistentVolumeClaim %s would have a name of %d characters, of at most %d; use a shorter one, or a shorter metadata.name", object, len(object), validation.DNS1123SubdomainMaxLength)))
		}
		if seen[name] {
			errs = append(errs, field.Duplicate(path, name))
		}
		seen[name] = true
		set := slices.ContainsFunc(t.Spec.VolumeClaimTemplates, func(o agents.PersistentVolumeClaimTemplate) bool { return o.Name == name })
		if set && policy != extensions.InjectionOverrides {
			errs = append(errs, field.Forbidden(path, fmt.Sprintf(
				"template %s has a volume of this name; use another, or set its volumeClaimTemplatesPolicy to Overrides", t.Name)))
		}
	}
	return errs
}
