// Package v1beta1 holds the words of the group extensions.agents.x-k8s.io: SandboxTemplate,
// SandboxWarmPool and SandboxClaim, with their defaults and validation. It does no I/O.
//
// Fields, defaults and rules are those of kubernetes-sigs/agent-sandbox at v1beta1; what
// Barchan adds stands under the JSON key "barchan".
//
// +k8s:openapi-gen=true
// +k8s:openapi-model-package=io.x-k8s.agents.extensions.v1beta1
// +kubebuilder:object:generate=true
// +groupName=extensions.agents.x-k8s.io
package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of this package's kinds.
var GroupVersion = schema.GroupVersion{Group: "extensions.agents.x-k8s.io", Version: "v1beta1"}

// AddToScheme registers this package's kinds.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&SandboxTemplate{}, &SandboxTemplateList{},
		&SandboxWarmPool{}, &SandboxWarmPoolList{},
		&SandboxClaim{}, &SandboxClaimList{},
	)
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
