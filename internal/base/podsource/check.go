package podsource

import (
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxSources limits the sources of a volume and of an environment, which are read at each start.
const maxSources = 100

var (
	// envFields are the fields that variables may refer to, and volumeFields those of files. Both may refer to
	// single labels and annotations.
	envFields    = []string{"metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.podIP"}
	volumeFields = []string{"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels", "metadata.annotations"}
	resources    = []string{"limits.cpu", "limits.memory", "limits.ephemeral-storage", "requests.cpu", "requests.memory", "requests.ephemeral-storage"}
)

func validName(name string) bool { return name != "" && !strings.ContainsAny(name, "=\x00") }

// CheckEnv reports what is wrong with the environment of a container, by field.
func CheckEnv(c *corev1.Container, at *field.Path) (errs field.ErrorList) {
	for i, e := range c.Env {
		where := at.Child("env").Index(i)
		if !validName(e.Name) {
			errs = append(errs, field.Invalid(where.Child("name"), e.Name, "must be the name of a variable"))
		}
		if strings.ContainsRune(e.Value, 0) {
			errs = append(errs, field.Invalid(where.Child("value"), e.Value, "must not contain a zero byte"))
		}
		if e.ValueFrom != nil {
			errs = append(errs, checkValueFrom(&e, c.Name, where.Child("valueFrom"))...)
		}
	}
	if len(c.EnvFrom) > maxSources {
		errs = append(errs, field.TooMany(at.Child("envFrom"), len(c.EnvFrom), maxSources))
	}
	for i, from := range c.EnvFrom {
		errs = append(errs, checkEnvFrom(&from, at.Child("envFrom").Index(i))...)
	}
	return errs
}

func checkEnvFrom(from *corev1.EnvFromSource, at *field.Path) (errs field.ErrorList) {
	if strings.ContainsAny(from.Prefix, "=\x00") {
		errs = append(errs, field.Invalid(at.Child("prefix"), from.Prefix, "must be the beginning of a variable's name"))
	}
	switch {
	case from.SecretRef != nil && from.ConfigMapRef != nil:
		errs = append(errs, field.Invalid(at, "", "may not have more than one field specified at a time"))
	case from.SecretRef != nil:
		errs = append(errs, checkObject(from.SecretRef.Name, at.Child("secretRef", "name"))...)
	case from.ConfigMapRef != nil:
		errs = append(errs, checkObject(from.ConfigMapRef.Name, at.Child("configMapRef", "name"))...)
	default:
		errs = append(errs, field.Required(at, "name a secretRef or a configMapRef"))
	}
	return errs
}

func checkValueFrom(e *corev1.EnvVar, container string, at *field.Path) (errs field.ErrorList) {
	from, count := e.ValueFrom, 0
	if e.Value != "" {
		errs = append(errs, field.Invalid(at, "", "may not be specified when value is not empty"))
	}
	if ref := from.FieldRef; ref != nil {
		count++
		errs = append(errs, checkField(ref.FieldPath, envFields, at.Child("fieldRef", "fieldPath"))...)
	}
	if ref := from.ResourceFieldRef; ref != nil {
		count++
		errs = append(errs, checkResource(ref, container, at.Child("resourceFieldRef"))...)
	}
	if ref := from.SecretKeyRef; ref != nil {
		count++
		errs = append(errs, checkKey(ref.Name, ref.Key, at.Child("secretKeyRef"))...)
	}
	if ref := from.ConfigMapKeyRef; ref != nil {
		count++
		errs = append(errs, checkKey(ref.Name, ref.Key, at.Child("configMapKeyRef"))...)
	}
	if from.FileKeyRef != nil {
		errs = append(errs, field.Forbidden(at.Child("fileKeyRef"), "is not supported on one machine: use a configMapKeyRef or secretKeyRef"))
	} else if count != 1 {
		errs = append(errs, field.Invalid(at, "", "must have exactly one of fieldRef, resourceFieldRef, configMapKeyRef and secretKeyRef"))
	}
	return errs
}

func checkObject(name string, at *field.Path) (errs field.ErrorList) {
	for _, problem := range validation.IsDNS1123Subdomain(name) {
		errs = append(errs, field.Invalid(at, name, problem))
	}
	return errs
}

func checkKey(name, key string, at *field.Path) field.ErrorList {
	errs := checkObject(name, at.Child("name"))
	for _, problem := range validation.IsConfigMapKey(key) {
		errs = append(errs, field.Invalid(at.Child("key"), key, problem))
	}
	return errs
}

func checkField(name string, known []string, at *field.Path) field.ErrorList {
	if _, _, ok := Subscript(name); ok || slices.Contains(known, name) {
		return nil
	}
	return field.ErrorList{field.NotSupported(at, name, append(slices.Clone(known), "metadata.labels['KEY']", "metadata.annotations['KEY']"))}
}

// Subscript splits the path of a single label or annotation, as metadata.labels['app'].
func Subscript(name string) (of, key string, ok bool) {
	of, rest, ok := strings.Cut(name, "['")
	key, closed := strings.CutSuffix(rest, "']")
	return of, key, ok && closed && key != "" && (of == "metadata.labels" || of == "metadata.annotations")
}

func checkResource(ref *corev1.ResourceFieldSelector, container string, at *field.Path) (errs field.ErrorList) {
	if !slices.Contains(resources, ref.Resource) {
		errs = append(errs, field.NotSupported(at.Child("resource"), ref.Resource, resources))
	}
	if ref.ContainerName != "" && ref.ContainerName != container {
		errs = append(errs, field.Invalid(at.Child("containerName"), ref.ContainerName, "must be "+container))
	}
	if ref.Divisor.Sign() < 0 {
		errs = append(errs, field.Invalid(at.Child("divisor"), ref.Divisor.String(), "must not be negative"))
	}
	return errs
}

// CheckVolume reports what is wrong with a volume for which Projected returns p, by field. container is the name of the
// main container.
func CheckVolume(v *corev1.Volume, p *corev1.ProjectedVolumeSource, container string, at *field.Path) (errs field.ErrorList) {
	kind, plain := "projected", false
	switch {
	case v.Secret != nil:
		kind, plain = "secret", true
	case v.ConfigMap != nil:
		kind, plain = "configMap", true
	case v.DownwardAPI != nil:
		kind, plain = "downwardAPI", true
	}
	at = at.Child(kind)
	errs = checkMode(p.DefaultMode, at.Child("defaultMode"))
	if len(p.Sources) > maxSources {
		errs = append(errs, field.TooMany(at.Child("sources"), len(p.Sources), maxSources))
	}
	for i := range p.Sources {
		where := at
		if !plain {
			where = at.Child("sources").Index(i)
		}
		errs = append(errs, checkSource(&p.Sources[i], plain, container, where)...)
	}
	return errs
}

func checkSource(s *corev1.VolumeProjection, plain bool, container string, at *field.Path) (errs field.ErrorList) {
	child := func(name string) *field.Path {
		if plain {
			return at
		}
		return at.Child(name)
	}
	count := 0
	if s.Secret != nil {
		count++
		name := "name"
		if plain {
			name = "secretName"
		}
		errs = append(errs, checkObject(s.Secret.Name, child("secret").Child(name))...)
		errs = append(errs, checkItems(s.Secret.Items, child("secret").Child("items"))...)
	}
	if s.ConfigMap != nil {
		count++
		errs = append(errs, checkObject(s.ConfigMap.Name, child("configMap").Child("name"))...)
		errs = append(errs, checkItems(s.ConfigMap.Items, child("configMap").Child("items"))...)
	}
	if s.DownwardAPI != nil {
		count++
		for i, item := range s.DownwardAPI.Items {
			errs = append(errs, checkDownward(&item, container, child("downwardAPI").Child("items").Index(i))...)
		}
	}
	for name, set := range map[string]bool{
		"serviceAccountToken": s.ServiceAccountToken != nil, "clusterTrustBundle": s.ClusterTrustBundle != nil, "podCertificate": s.PodCertificate != nil,
	} {
		if set {
			return append(errs, field.Forbidden(at.Child(name), "is not supported on one machine: use a configMap, secret or downwardAPI"))
		}
	}
	if count != 1 {
		errs = append(errs, field.Invalid(at, "", "must have exactly one source"))
	}
	return errs
}

func checkItems(items []corev1.KeyToPath, at *field.Path) (errs field.ErrorList) {
	for i, item := range items {
		where := at.Index(i)
		if item.Key == "" {
			errs = append(errs, field.Required(where.Child("key"), "name a key of the object"))
		}
		errs = append(errs, checkPath(item.Path, where.Child("path"))...)
		errs = append(errs, checkMode(item.Mode, where.Child("mode"))...)
	}
	return errs
}

func checkDownward(item *corev1.DownwardAPIVolumeFile, container string, at *field.Path) field.ErrorList {
	errs := append(checkPath(item.Path, at.Child("path")), checkMode(item.Mode, at.Child("mode"))...)
	switch {
	case (item.FieldRef == nil) == (item.ResourceFieldRef == nil):
		errs = append(errs, field.Invalid(at, "", "must have exactly one of fieldRef and resourceFieldRef"))
	case item.FieldRef != nil:
		errs = append(errs, checkField(item.FieldRef.FieldPath, volumeFields, at.Child("fieldRef", "fieldPath"))...)
	case item.ResourceFieldRef.ContainerName == "":
		errs = append(errs, field.Required(at.Child("resourceFieldRef", "containerName"), "must be "+container))
	default:
		errs = append(errs, checkResource(item.ResourceFieldRef, container, at.Child("resourceFieldRef"))...)
	}
	return errs
}

// checkPath requires a path below the volume. Names that begin with two dots are those of the scheme by which a volume is
// updated.
func checkPath(name string, at *field.Path) field.ErrorList {
	switch {
	case name == "":
		return field.ErrorList{field.Required(at, "name a file of the volume")}
	case path.IsAbs(name) || slices.Contains(strings.Split(name, "/"), "..") || strings.HasPrefix(name, "..") || strings.ContainsRune(name, 0) || path.Clean(name) == ".":
		return field.ErrorList{field.Invalid(at, name, "must be a relative path that has no .. and does not begin with it")}
	}
	return nil
}

func checkMode(mode *int32, at *field.Path) field.ErrorList {
	if mode == nil || *mode >= 0 && *mode <= 0o777 {
		return nil
	}
	return field.ErrorList{field.Invalid(at, *mode, "must be a number between 0 and 0777 (octal), both inclusive")}
}
