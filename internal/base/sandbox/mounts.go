package sandbox

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// CheckMounts returns an error for each mount of a volume that is missing in the blueprint. at is the
// path of the Pod's spec.
func CheckMounts(b *agents.SandboxBlueprint, at *field.Path) (errs field.ErrorList) {
	errs = checkMounts(b, b.PodTemplate.Spec.InitContainers, at.Child("initContainers"))
	return append(errs, checkMounts(b, b.PodTemplate.Spec.Containers, at.Child("containers"))...)
}

func checkMounts(b *agents.SandboxBlueprint, containers []corev1.Container, at *field.Path) (errs field.ErrorList) {
	for i := range containers {
		for j, m := range containers[i].VolumeMounts {
			isVolume := func(v corev1.Volume) bool { return v.Name == m.Name }
			isClaim := func(c agents.PersistentVolumeClaimTemplate) bool { return c.Name == m.Name }
			if !slices.ContainsFunc(b.PodTemplate.Spec.Volumes, isVolume) && !slices.ContainsFunc(b.VolumeClaimTemplates, isClaim) {
				errs = append(errs, field.NotFound(at.Index(i).Child("volumeMounts").Index(j).Child("name"), m.Name))
			}
		}
	}
	return errs
}
