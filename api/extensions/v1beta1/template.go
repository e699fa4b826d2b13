package v1beta1

import (
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// NetworkPolicyManagement decides whether Barchan enforces the network policy of a template's sandboxes.
// +kubebuilder:validation:Enum=Managed;Unmanaged
type NetworkPolicyManagement string

// Network policy managements.
const (
	// NetworkManaged enforces the template's policy, or the secure
	// default alone. The default.
	NetworkManaged NetworkPolicyManagement = "Managed"
	// NetworkUnmanaged ignores the template's policy. What is closed to every sandbox stays
	// closed on one machine; in a cluster sandboxes get no NetworkPolicy.
	NetworkUnmanaged NetworkPolicyManagement = "Unmanaged"
)

// InjectionPolicy decides whether a claim may add to what the template sets.
// +kubebuilder:validation:Enum=Disallowed;Allowed;Overrides
type InjectionPolicy string

// Injection policies.
const (
	// InjectionDisallowed refuses. The default.
	InjectionDisallowed InjectionPolicy = "Disallowed"
	// InjectionAllowed lets a claim add names that the template does not set.
	InjectionAllowed InjectionPolicy = "Allowed"
	// InjectionOverrides lets a claim also replace what the template sets.
	InjectionOverrides InjectionPolicy = "Overrides"
)

// TemplateNetworkPolicy is the ingress and egress of a template's sandboxes.
type TemplateNetworkPolicy struct {
	// Ingress lists what may reach the sandboxes in a cluster, besides Barchan's gateways and controllers. On one machine
	// it has no effect: only the gateway reaches a sandbox, and spec.barchan.sandbox.access restricts access.
	// +optional
	// +listType=atomic
	Ingress []networkingv1.NetworkPolicyIngressRule `json:"ingress,omitempty"`
	// Egress lists what the sandboxes may reach; an empty list denies. See the field of the same
	// name of a Sandbox's spec.barchan.networkPolicy.
	// +optional
	// +listType=atomic
	Egress []networkingv1.NetworkPolicyEgressRule `json:"egress,omitempty"`
}

// SandboxTemplateSpec is a blueprint and what claims may change of it.
type SandboxTemplateSpec struct {
	agents.SandboxBlueprint `json:",inline"`
	// NetworkPolicy: unset means the built-in secure default.
	// +optional
	NetworkPolicy *TemplateNetworkPolicy `json:"networkPolicy,omitempty"`
	// +optional
	// +kubebuilder:default=Managed
	NetworkPolicyManagement NetworkPolicyManagement `json:"networkPolicyManagement,omitempty"`
	// EnvVarsInjectionPolicy decides whether a claim may set environment variables.
	// +optional
	// +kubebuilder:default=Disallowed
	EnvVarsInjectionPolicy InjectionPolicy `json:"envVarsInjectionPolicy,omitempty"`
	// VolumeClaimTemplatesPolicy decides whether a claim may add volumes.
	// +optional
	// +kubebuilder:default=Disallowed
	VolumeClaimTemplatesPolicy InjectionPolicy `json:"volumeClaimTemplatesPolicy,omitempty"`
	// Barchan holds what Barchan adds to the upstream kind.
	// +optional
	Barchan *TemplateBarchanSpec `json:"barchan,omitempty"`
}

// ManagedPolicy is the policy that a template's sandboxes are kept to besides the secure default;
// nil if there is none.
func ManagedPolicy(t *SandboxTemplate) *TemplateNetworkPolicy {
	if t.Spec.NetworkPolicyManagement == NetworkUnmanaged {
		return nil
	}
	return t.Spec.NetworkPolicy
}

// TemplateBarchanSpec is what Barchan adds to a SandboxTemplate.
// +kubebuilder:validation:XValidation:rule="!has(self.sandbox) || !has(self.sandbox.networkPolicy)",message="a template's stands in spec.networkPolicy",fieldPath=".sandbox.networkPolicy"
// +kubebuilder:validation:XValidation:rule="!has(self.sandbox) || !has(self.sandbox.warmUp) || !has(self.sandbox.restore) || (has(self.sandbox.restore.filesOnly) && self.sandbox.restore.filesOnly)",message="is not run where memory is restored: leave it out, or set restore.filesOnly",fieldPath=".sandbox.warmUp"
type TemplateBarchanSpec struct {
	// Aliases are further names of the template in the API.
	// +optional
	// +listType=set
	Aliases []string `json:"aliases,omitempty"`
	// Public lets every namespace use the template. Default false.
	// +optional
	Public bool `json:"public,omitempty"`
	// TagOf makes the object a tag of a template, which users name <templateName>:<tag>. It is immutable, and decides the
	// object's name: <templateName>.<tag>, where that is valid.
	// +optional
	TagOf *TagOf `json:"tagOf,omitempty"`
	// Sandbox is taken over into each sandbox of the template.
	// +optional
	Sandbox *agents.BarchanSpec `json:"sandbox,omitempty"`
}

// SandboxTemplate is the blueprint of sandboxes. It has no status.
// +kubebuilder:object:root=true
// +kubebuilder:resource:shortName=sandboxtemplate
// +kubebuilder:validation:XValidation:rule="!has(self.spec.barchan) || !has(self.spec.barchan.tagOf) || self.metadata.name.startsWith(self.spec.barchan.tagOf.templateName + '.')",message="must be the name of the object of the tag in spec.barchan.tagOf"
// +kubebuilder:validation:XValidation:rule="(has(self.spec.barchan) && has(self.spec.barchan.tagOf)) == (has(oldSelf.spec.barchan) && has(oldSelf.spec.barchan.tagOf)) && (!has(self.spec.barchan) || !has(self.spec.barchan.tagOf) || self.spec.barchan.tagOf == oldSelf.spec.barchan.tagOf)",message="is immutable",fieldPath=".spec.barchan.tagOf"
// +kubebuilder:printcolumn:name="Template",type=string,JSONPath=`.spec.barchan.tagOf.templateName`
// +kubebuilder:printcolumn:name="Tag",type=string,JSONPath=`.spec.barchan.tagOf.tag`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type SandboxTemplate struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Spec              SandboxTemplateSpec `json:"spec"`
}

// SandboxTemplateList is a list of templates.
// +kubebuilder:object:root=true
type SandboxTemplateList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxTemplate `json:"items"`
}
