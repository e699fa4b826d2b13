package podsource

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// MaxVolumeBytes limits the files of a sandbox's projected volumes together, because they are in memory that the
// sandbox's limit does not count.
const MaxVolumeBytes = 8 << 20

// File is a file of a projected volume.
type File struct {
	Data []byte
	Mode int32
}

// Fields reads a Pod's own fields.
type Fields interface {
	Field(path string) string
	Resource(ref *corev1.ResourceFieldSelector) string
}

// Projected returns a volume of kind configMap, secret, downwardAPI or projected as the last; nil for any other.
func Projected(v *corev1.Volume) *corev1.ProjectedVolumeSource {
	one := func(mode *int32, s corev1.VolumeProjection) *corev1.ProjectedVolumeSource {
		return &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{s}, DefaultMode: mode}
	}
	switch {
	case v.Projected != nil:
		return v.Projected
	case v.Secret != nil:
		return one(v.Secret.DefaultMode, corev1.VolumeProjection{Secret: &corev1.SecretProjection{
			LocalObjectReference: corev1.LocalObjectReference{Name: v.Secret.SecretName}, Items: v.Secret.Items, Optional: v.Secret.Optional,
		}})
	case v.ConfigMap != nil:
		return one(v.ConfigMap.DefaultMode, corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{
			LocalObjectReference: v.ConfigMap.LocalObjectReference, Items: v.ConfigMap.Items, Optional: v.ConfigMap.Optional,
		}})
	case v.DownwardAPI != nil:
		return one(v.DownwardAPI.DefaultMode, corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: v.DownwardAPI.Items}})
	}
	return nil
}

// Files reads the files of a projected volume, by path. A later source wins. A *Missing is the first object or key
// that is not there and not optional.
func Files(ctx context.Context, objects Objects, namespace, volume string, p *corev1.ProjectedVolumeSource, own Fields) (map[string]File, error) {
	r := reader{Objects: objects, namespace: namespace, reason: ReasonMount}
	files := map[string]File{}
	for _, s := range p.Sources {
		var err error
		switch {
		case s.Secret != nil:
			optional := ptr.Deref(s.Secret.Optional, false)
			var data map[string][]byte
			if data, err = r.secret(ctx, s.Secret.Name, optional); err == nil && data != nil {
				err = r.pick(files, data, s.Secret.Items, p.DefaultMode, "secret", optional)
			}
		case s.ConfigMap != nil:
			optional := ptr.Deref(s.ConfigMap.Optional, false)
			var c *corev1.ConfigMap
			if c, err = r.configMap(ctx, s.ConfigMap.Name, optional); err == nil && c != nil {
				err = r.pick(files, dataOf(c), s.ConfigMap.Items, p.DefaultMode, "config", optional)
			}
		case s.DownwardAPI != nil:
			for _, item := range s.DownwardAPI.Items {
				files[path.Clean(item.Path)] = File{[]byte(valueOf(own, item)), mode(item.Mode, p.DefaultMode)}
			}
		}
		if m, ok := err.(*Missing); ok { //nolint:errorlint // of reader, unwrapped
			m.Message = fmt.Sprintf("MountVolume.SetUp failed for volume %q : %s", volume, m.Message)
		}
		if err != nil {
			return nil, err
		}
	}
	return files, nil
}

func valueOf(own Fields, item corev1.DownwardAPIVolumeFile) string {
	if item.ResourceFieldRef != nil {
		return own.Resource(item.ResourceFieldRef)
	}
	return own.Field(item.FieldRef.FieldPath)
}

// pick adds the files of one source: all keys, or the items.
func (r reader) pick(files map[string]File, data map[string][]byte, items []corev1.KeyToPath, defaultMode *int32, kind string, optional bool) error {
	if len(items) == 0 {
		for key, b := range data {
			files[key] = File{b, mode(nil, defaultMode)}
		}
		return nil
	}
	for _, item := range items {
		b, found := data[item.Key]
		switch {
		case found:
			files[path.Clean(item.Path)] = File{b, mode(item.Mode, defaultMode)}
		case !optional:
			return r.missing("references non-existent %s key: %s", kind, item.Key)
		}
	}
	return nil
}

func dataOf(c *corev1.ConfigMap) map[string][]byte {
	data := maps.Clone(c.BinaryData)
	if data == nil {
		data = map[string][]byte{}
	}
	for key, text := range c.Data {
		data[key] = []byte(text)
	}
	return data
}

func mode(own, byDefault *int32) int32 {
	return ptr.Deref(own, ptr.Deref(byDefault, corev1.ConfigMapVolumeSourceDefaultMode))
}

// Map formats labels or annotations for a file, sorted by key.
func Map(m map[string]string) string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(&b, "%s=%q\n", key, m[key])
	}
	return strings.TrimSuffix(b.String(), "\n")
}
