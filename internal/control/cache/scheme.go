package cache

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// NewScheme returns a scheme of our kinds, and of those that sandboxes have in a cluster.
func NewScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, networkingv1.AddToScheme, policyv1.AddToScheme, agents.AddToScheme, extensions.AddToScheme, barchan.AddToScheme,
	} {
		if err := add(s); err != nil {
			return nil, fmt.Errorf("register kinds: %w", err)
		}
	}
	return s, nil
}

// irregular has the plurals that the mapper would guess wrong.
var irregular = map[string]string{"Sandbox": "sandboxes", "APIKey": "apikeys"}

// fixedMapper maps kinds to resources without discovery: all our kinds are namespaced but core's
// Namespace.
func fixedMapper(s *runtime.Scheme) meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(s.PrioritizedVersionsAllGroups())
	for kind := range s.AllKnownTypes() {
		scope := meta.RESTScopeNamespace
		if kind.Group == "" && (kind.Kind == "Namespace" || kind.Kind == "Node" || kind.Kind == "PersistentVolume") {
			scope = meta.RESTScopeRoot
		}
		if plural, ok := irregular[kind.Kind]; ok {
			m.AddSpecific(kind, kind.GroupVersion().WithResource(plural), kind.GroupVersion().WithResource(strings.ToLower(kind.Kind)), scope)
			continue
		}
		m.Add(kind, scope)
	}
	return m
}
