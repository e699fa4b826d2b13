// Package podsource has the rules for what a Pod takes from Secrets, ConfigMaps and its own fields: variables and
// the files of volumes. Names, texts and precedence are those of kubelet.
//
// It reads objects through [Objects] and writes nothing: package projection of the node writes the files.
package podsource

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// The kinds of a Reference.
const (
	KindSecret    = "Secret"
	KindConfigMap = "ConfigMap"
)

// The reasons of a Missing, as in a Pod's status and events.
const (
	ReasonConfig = "CreateContainerConfigError"
	ReasonMount  = "FailedMount"
)

// Objects reads Secrets and ConfigMaps by name. Both are nil without an error if there is none.
type Objects interface {
	Secret(ctx context.Context, namespace, name string) (*corev1.Secret, error)
	ConfigMap(ctx context.Context, namespace, name string) (*corev1.ConfigMap, error)
}

// Missing is the error for an object, or a key of one, that a Pod needs and that is not there. The Pod can start
// when it appears.
type Missing struct {
	// Reason is one of ReasonConfig and ReasonMount.
	Reason string
	// Message is kubelet's, without values.
	Message string
}

func (m *Missing) Error() string { return m.Message }

// Reference names a Secret or ConfigMap of the Pod's namespace.
type Reference struct{ Kind, Name string }

// References returns the objects that a Pod refers to, each once, optional ones too.
func References(spec *corev1.PodSpec) (all []Reference) {
	add := func(kind, name string) {
		if r := (Reference{kind, name}); name != "" && !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			referencesOf(&list[i], add)
		}
	}
	for i := range spec.Volumes {
		p := Projected(&spec.Volumes[i])
		if p == nil {
			continue
		}
		for _, s := range p.Sources {
			if s.Secret != nil {
				add(KindSecret, s.Secret.Name)
			}
			if s.ConfigMap != nil {
				add(KindConfigMap, s.ConfigMap.Name)
			}
		}
	}
	return all
}

func referencesOf(c *corev1.Container, add func(kind, name string)) {
	for _, from := range c.EnvFrom {
		if from.SecretRef != nil {
			add(KindSecret, from.SecretRef.Name)
		}
		if from.ConfigMapRef != nil {
			add(KindConfigMap, from.ConfigMapRef.Name)
		}
	}
	for _, e := range c.Env {
		if e.ValueFrom == nil {
			continue
		}
		if ref := e.ValueFrom.SecretKeyRef; ref != nil {
			add(KindSecret, ref.Name)
		}
		if ref := e.ValueFrom.ConfigMapKeyRef; ref != nil {
			add(KindConfigMap, ref.Name)
		}
	}
}
