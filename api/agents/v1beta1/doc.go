// Package v1beta1 holds the types of the group agents.x-k8s.io: the Sandbox, with its
// defaults and its validation. It does no I/O and does not depend on how a sandbox runs.
//
// Fields, defaults and rules are those of kubernetes-sigs/agent-sandbox at v1beta1, so that
// its manifests apply unchanged. What Barchan adds stands in one optional struct, [BarchanSpec]
// (and [BarchanStatus]), under the JSON key "barchan".
//
// +k8s:openapi-gen=true
// +k8s:openapi-model-package=io.x-k8s.agents.v1beta1
// +kubebuilder:object:generate=true
// +groupName=agents.x-k8s.io
package v1beta1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of this package's kinds.
var GroupVersion = schema.GroupVersion{Group: "agents.x-k8s.io", Version: "v1beta1"}

// AddToScheme registers this package's kinds.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &Sandbox{}, &SandboxList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
