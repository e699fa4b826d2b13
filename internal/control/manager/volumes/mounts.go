package volumes

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// Limits of the mounts of one sandbox.
const (
	maxMounts = 16
	maxPath   = 1024
)

// taboo are the directories that no volume is mounted in: the agent's and the kernel's.
var taboo = []string{"/.barchan", "/proc", "/sys", "/dev"}

// Mount asks for a volume at a path.
type Mount struct {
	// Name is a volume's in the API.
	Name, Path string
}

// CheckMounts refuses mounts that could not be, by their fields.
func CheckMounts(mounts []Mount) error {
	if len(mounts) > maxMounts {
		return apistatus.Refuse(errs.ErrInvalid, "volumeMounts: at most %d volumes can be mounted", maxMounts)
	}
	used := map[string]bool{}
	for i, m := range mounts {
		if why := faultOf(m.Path); why != "" {
			return apistatus.Refuse(errs.ErrInvalid, "volumeMounts[%d].path: %.80q %s", i, m.Path, why)
		}
		if used[m.Path] {
			return apistatus.Refuse(errs.ErrInvalid, "volumeMounts[%d].path: %.80q is already used", i, m.Path)
		}
		used[m.Path] = true
		if len(m.Name) > maxName || !validName.MatchString(m.Name) {
			return apistatus.Refuse(errs.ErrInvalid, "volumeMounts[%d].name: %.80q is no name of a volume", i, m.Name)
		}
	}
	return nil
}

func faultOf(at string) string {
	switch {
	case at == "" || len(at) > maxPath:
		return fmt.Sprintf("must have from 1 to %d bytes", maxPath)
	case !path.IsAbs(at) || strings.ContainsRune(at, 0):
		return "must be an absolute path"
	case path.Clean(at) != at:
		return "must not have '.', '..', or a slash too many"
	case at == "/":
		return "is the whole sandbox"
	}
	for _, dir := range taboo {
		if at == dir || strings.HasPrefix(at, dir+"/") {
			return "is the system's own"
		}
	}
	return ""
}

// Resolve finds the volumes of mounts, in the order of the mounts. One that is not there, or that no sandbox may mount, is refused by its field.
func (s *Service) Resolve(ctx context.Context, namespace string, mounts []Mount) ([]sandbox.VolumeMount, error) {
	out := make([]sandbox.VolumeMount, len(mounts))
	for i, m := range mounts {
		out[i] = sandbox.VolumeMount{Volume: barchan.VolumeObjectName(m.Name), Path: m.Path}
		if err := s.mountable(ctx, namespace, out[i].Volume, m.Name, fmt.Sprintf("volumeMounts[%d].name", i)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// CheckPod refuses a Pod that mounts a volume which is gone, such as one of a snapshot.
func (s *Service) CheckPod(ctx context.Context, namespace string, pod *corev1.PodSpec) error {
	for _, m := range sandbox.VolumeMounts(pod) {
		if err := s.mountable(ctx, namespace, m.Volume, s.NameOf(ctx, namespace, m.Volume), "the volume at "+m.Path); err != nil {
			return err
		}
	}
	return nil
}

func (s *Service) mountable(ctx context.Context, namespace, object, name, field string) error {
	v, err := s.Cache.Volume(ctx, types.NamespacedName{Namespace: namespace, Name: object})
	switch {
	case errors.Is(err, errs.ErrNotFound), err == nil && v.DeletionTimestamp != nil:
		return apistatus.Refuse(errs.ErrInvalid, "%s: volume '%.80s' not found", field, name)
	case err != nil:
		return err
	}
	if c := meta.FindStatusCondition(v.Status.Conditions, barchan.ConditionReady); c != nil && c.Status == metav1.ConditionFalse && c.Reason == barchan.ReasonOverCapacity {
		return apistatus.Refuse(errs.ErrInvalid, "%s: volume '%.80s' cannot be mounted: %s", field, name, c.Message)
	}
	return nil
}

// Conflict refuses mounts at a path at which a Pod mounts something already.
func Conflict(pod *corev1.PodSpec, mounts []sandbox.VolumeMount) error {
	if len(pod.Containers) == 0 {
		return nil
	}
	for i, m := range mounts {
		if slices.ContainsFunc(pod.Containers[0].VolumeMounts, func(o corev1.VolumeMount) bool { return path.Clean(o.MountPath) == m.Path }) {
			return apistatus.Refuse(errs.ErrInvalid, "volumeMounts[%d].path: %q is a mount of the template", i, m.Path)
		}
	}
	return nil
}

// AddMounts has the container of a Pod mount volumes.
func AddMounts(pod *corev1.PodSpec, mounts []sandbox.VolumeMount) {
	if len(pod.Containers) == 0 {
		return
	}
	for _, m := range mounts {
		name := fmt.Sprintf("barchan-volume-%d", len(pod.Volumes)) // unique, also beside those of a snapshot's source
		pod.Volumes = append(pod.Volumes, corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: m.Volume},
		}})
		c := &pod.Containers[0]
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: name, MountPath: m.Path})
	}
}
