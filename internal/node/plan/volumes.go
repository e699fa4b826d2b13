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
	// Claim or Scratch names a directory of the sandbox, Projected one of the plan's projections; none means memory.
	Claim     string `json:"claim,omitempty"`
	Scratch   string `json:"scratch,omitempty"`
	Projected string `json:"projected,omitempty"`
	SubPath   string `json:"subPath,omitempty"`
	Target    string `json:"target"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
	SizeLimit int64  `json:"sizeLimit,omitempty"`
}

func volumes(s *agents.Sandbox, c *corev1.Container, at *field.Path) (result []Volume, err error) {
	for i, m := range c.VolumeMounts {
		v := Volume{SubPath: m.SubPath, Target: path.Clean(m.MountPath), ReadOnly: m.ReadOnly}
		isClaim := func(t agents.PersistentVolumeClaimTemplate) bool { return t.Name == m.Name }
		isVolume := func(t corev1.Volume) bool { return t.Name == m.Name }
		if j := slices.IndexFunc(s.Spec.PodTemplate.Spec.Volumes, isVolume); j >= 0 {
			volume := &s.Spec.PodTemplate.Spec.Volumes[j]
			source := volume.EmptyDir
			if podsource.Projected(volume) != nil {
				v.Projected, v.ReadOnly = m.Name, true
			} else if source.Medium != corev1.StorageMediumMemory {
				v.Scratch = m.Name
			} else if source.SizeLimit != nil {
				v.SizeLimit = source.SizeLimit.Value()
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

// DataPaths are the unique paths of the volumes with data, in order.
func (p *Plan) DataPaths() (paths []string) {
	for _, v := range p.Volumes {
		if rel := v.DataPath(); rel != "" && !slices.Contains(paths, rel) {
			paths = append(paths, rel)
		}
	}
	slices.SortFunc(paths, strings.Compare)
	return paths
}
