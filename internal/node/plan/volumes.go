package plan

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/podsource"
)

// DataPath is the path of a volume's data, relative to the volumes' directory; empty for one in memory.
func (v Volume) DataPath() string {
	switch {
	case v.Claim != "":
		return filepath.Join("claims", v.Claim)
	case v.Scratch != "":
		return filepath.Join("scratch", v.Scratch)
	default:
		return ""
	}
}

// Mounts reports whether the sandbox mounts a volume of its namespace.
func (p *Plan) Mounts(volume string) bool {
	mounts := func(v Volume) bool { return v.Volume == volume }
	found := slices.ContainsFunc(p.Volumes, mounts)
	p.each(func(c *Container) { found = found || slices.ContainsFunc(c.Volumes, mounts) })
	return found
}

// own leaves out the volumes that are not the sandbox's own, of which a checkpoint has no data.
func own(all []Volume) []Volume {
	return slices.DeleteFunc(slices.Clone(all), func(v Volume) bool { return v.Volume != "" })
}

func volumesFit(is, must []Volume, field string) error {
	for i := range max(len(is), len(must)) {
		at := fmt.Sprintf("%s[%d]", field, i)
		switch {
		case i >= len(must):
			return fmt.Errorf("%s: %s is not among the checkpoint's volumes: %w", at, is[i].Target, errs.ErrInvalid)
		case i >= len(is):
			return fmt.Errorf("%s: the checkpoint has a volume at %s: %w", at, must[i].Target, errs.ErrInvalid)
		case is[i] != must[i]:
			return fmt.Errorf("%s: %s differs from the checkpoint's, %s: %w", at, is[i], must[i], errs.ErrInvalid)
		}
	}
	return nil
}

// String describes a volume for users.
func (v Volume) String() string {
	what := "memory"
	switch {
	case v.Volume != "":
		what = "volume " + v.Volume
	case v.Claim != "":
		what = "claim " + v.Claim
	case v.Scratch != "":
		what = "directory " + v.Scratch
	case v.Projected != "":
		what = "projected volume " + v.Projected
	}
	if v.SubPath != "" {
		what += "/" + v.SubPath
	}
	if v.ReadOnly {
		what += ", read-only,"
	}
	if v.SizeLimit != 0 {
		what += fmt.Sprintf(" of %d bytes", v.SizeLimit)
	}
	return what + " at " + v.Target
}

// Volume is one mount of a template.
type Volume struct {
	// Volume names one of the namespace, which is not the sandbox's own. Claim or Scratch names a directory of the sandbox,
	// Projected one of the plan's projections. None of them means memory.
	Volume    string `json:"volume,omitempty"`
	Claim     string `json:"claim,omitempty"`
	Scratch   string `json:"scratch,omitempty"`
	Projected string `json:"projected,omitempty"`
	// Memory names memory that several containers share.
	Memory    string `json:"memory,omitempty"`
	SubPath   string `json:"subPath,omitempty"`
	Target    string `json:"target"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
	SizeLimit int64  `json:"sizeLimit,omitempty"`
	// Transient: a checkpoint without memory leaves it out.
	Transient bool `json:"transient,omitempty"`
}

func lasting(all []Volume) []Volume {
	return slices.DeleteFunc(slices.Clone(all), func(v Volume) bool { return v.Transient })
}

func volumes(s *agents.Sandbox, c *corev1.Container, at *field.Path) (result []Volume, err error) {
	transient := strings.Split(s.Spec.PodTemplate.ObjectMeta.Annotations[agents.AnnotationTransientVolumes], ",")
	for i, m := range c.VolumeMounts {
		v := Volume{SubPath: m.SubPath, Target: path.Clean(m.MountPath), ReadOnly: m.ReadOnly}
		isClaim := func(t agents.PersistentVolumeClaimTemplate) bool { return t.Name == m.Name }
		isVolume := func(t corev1.Volume) bool { return t.Name == m.Name }
		if j := slices.IndexFunc(s.Spec.PodTemplate.Spec.Volumes, isVolume); j >= 0 {
			v.Transient = slices.Contains(transient, m.Name)
			volume := &s.Spec.PodTemplate.Spec.Volumes[j]
			switch source := volume.VolumeSource; {
			case podsource.Projected(volume) != nil:
				v.Projected, v.ReadOnly = m.Name, true
			case source.PersistentVolumeClaim != nil:
				v.Volume = source.PersistentVolumeClaim.ClaimName
				v.ReadOnly = v.ReadOnly || source.PersistentVolumeClaim.ReadOnly
			case source.EmptyDir.Medium != corev1.StorageMediumMemory:
				v.Scratch = m.Name
			default:
				if limit := source.EmptyDir.SizeLimit; limit != nil {
					v.SizeLimit = limit.Value()
				}
				if len(s.Spec.PodTemplate.Spec.Containers) > 1 {
					v.Memory = m.Name
				}
			}
		} else if slices.ContainsFunc(s.Spec.VolumeClaimTemplates, isClaim) {
			v.Claim = m.Name
		} else {
			where := at.Child("volumeMounts").Index(i).Child("name")
			return nil, fmt.Errorf("%w: %w", field.NotFound(where, m.Name), errs.ErrInvalid)
		}
		result = append(result, v)
	}
	return result, nil
}

// DataVolumes are the volumes with data of the containers that run at the same time, one for each path of data.
func (p *Plan) DataVolumes() (all []Volume) {
	made := map[string]bool{"": true}
	for _, c := range p.Containers() {
		for _, v := range c.Volumes {
			if rel := v.DataPath(); !made[rel] {
				made[rel] = true
				all = append(all, v)
			}
		}
	}
	return all
}

// DataPaths are the paths of the DataVolumes, in order.
func (p *Plan) DataPaths() (paths []string) {
	for _, v := range p.DataVolumes() {
		paths = append(paths, v.DataPath())
	}
	slices.Sort(paths)
	return paths
}
