// Package v1alpha1 holds the words of the group barchan.dev: Checkpoint, APIKey,
// TemplateRevision, TemplateBuild and Volume, the kinds that are Barchan's own, with their defaults and validation. It does no I/O.
//
// +k8s:openapi-gen=true
// +k8s:openapi-model-package=dev.barchan.v1alpha1
// +kubebuilder:object:generate=true
// +groupName=barchan.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of this package's kinds.
var GroupVersion = schema.GroupVersion{Group: "barchan.dev", Version: "v1alpha1"}

// AddToScheme registers this package's kinds.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &Checkpoint{}, &CheckpointList{}, &APIKey{}, &APIKeyList{}, &TemplateRevision{}, &TemplateRevisionList{}, &TemplateBuild{}, &TemplateBuildList{}, &Volume{}, &VolumeList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
