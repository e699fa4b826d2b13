package sandbox

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// VolumeMount is a Volume of the sandbox's namespace, by the name of its object, and where it is mounted.
type VolumeMount struct{ Volume, Path string }

// ClaimOf returns the Volume that a Pod's volume of a name mounts.
func ClaimOf(spec *corev1.PodSpec, name string) (volume string, ok bool) {
	i := slices.IndexFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if i < 0 || spec.Volumes[i].PersistentVolumeClaim == nil {
		return "", false
	}
	return spec.Volumes[i].PersistentVolumeClaim.ClaimName, true
}

// VolumeMounts returns the Volumes that a sandbox's container mounts.
func VolumeMounts(spec *corev1.PodSpec) (mounts []VolumeMount) {
	if len(spec.Containers) == 0 {
		return nil
	}
	for _, m := range spec.Containers[0].VolumeMounts {
		if volume, ok := ClaimOf(spec, m.Name); ok {
			mounts = append(mounts, VolumeMount{volume, m.MountPath})
		}
	}
	return mounts
}

// VolumesOf returns the names of the Volumes that a sandbox mounts, or will mount when it resumes; each once. A dead one mounts none.
func VolumesOf(s *agents.Sandbox) (names []string) {
	if DeadForGood(s) {
		return nil
	}
	for _, m := range VolumeMounts(&s.Spec.PodTemplate.Spec) {
		names = append(names, m.Volume)
	}
	slices.Sort(names)
	return slices.Compact(names)
}
