package v1alpha1

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// VolumePhase is a volume's stage.
type VolumePhase string

// Phases of volumes.
const (
	VolumePending     VolumePhase = "Pending"     // it has no files yet
	VolumeReady       VolumePhase = "Ready"       // sandboxes can mount it
	VolumeTerminating VolumePhase = "Terminating" // it was deleted, and its files are still there
)

// Reasons of a volume's condition Ready, besides [ReasonInUse].
const (
	// ReasonAvailable: sandboxes can mount it.
	ReasonAvailable = "Available"
	// ReasonQuota: a quota of the namespace refuses it, or its new capacity.
	ReasonQuota = "QuotaExceeded"
	// ReasonOverCapacity: its files take more than its capacity. No sandbox that starts may mount it, and the API writes nothing to it.
	ReasonOverCapacity = "OverCapacity"
)

// StorageLocal is the storage class of volumes that are directories of the node. The default, and the only one.
const StorageLocal = "local"

// VolumeFinalizer keeps a Volume object until its node confirmed that its files are gone.
const VolumeFinalizer = "barchan.dev/volume"

// DefaultVolumeCapacity is the capacity of a volume that names none, in bytes.
const DefaultVolumeCapacity = 10 << 30

// minVolumeCapacity is the least capacity, in bytes.
const minVolumeCapacity = 1 << 20

// VolumeSpec describes a volume. Only its capacity can change.
// +kubebuilder:validation:XValidation:rule="has(self.displayName) == has(oldSelf.displayName) && (!has(self.displayName) || self.displayName == oldSelf.displayName)",message="is immutable",fieldPath=".displayName"
// +kubebuilder:validation:XValidation:rule="(has(self.storageClassName) ? self.storageClassName : 'local') == (has(oldSelf.storageClassName) ? oldSelf.storageClassName : 'local')",message="is immutable",fieldPath=".storageClassName"
type VolumeSpec struct {
	// DisplayName is the name in the E2B API, where that is not the object's own: letters, digits, dashes and underscores.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9_-]*$`
	DisplayName string `json:"displayName,omitempty"`
	// Capacity bounds its files, in bytes. Default 10Gi.
	// +optional
	Capacity *resource.Quantity `json:"capacity,omitempty"`
	// StorageClassName is what keeps the files: local, which is a directory of the node.
	// +optional
	// +kubebuilder:default=local
	// +kubebuilder:validation:Enum=local
	StorageClassName string `json:"storageClassName,omitempty"`
}

// VolumeStatus is what the volume's controller last saw.
type VolumeStatus struct {
	// Phase is a summary: Pending, Ready or Terminating.
	// +optional
	Phase VolumePhase `json:"phase,omitempty"`
	// VolumeID is the volume's ID in the E2B API and on the command line.
	// +optional
	VolumeID string `json:"volumeID,omitempty"`
	// Conditions has one, Ready. Its message names what refuses a volume, or the sandboxes that keep one that was deleted.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Capacity is the one in force.
	// +optional
	Capacity *resource.Quantity `json:"capacity,omitempty"`
	// Used is the disk space of its files, when it was last measured.
	// +optional
	Used *resource.Quantity `json:"used,omitempty"`
	// Files is the number of its files and directories, likewise.
	// +optional
	Files int64 `json:"files,omitempty"`
	// Sandboxes is the number of those that mount it, paused ones too.
	// +optional
	Sandboxes int32 `json:"sandboxes,omitempty"`
}

// Volume has files that outlive sandboxes. A Sandbox mounts it as a Pod mounts a claim, by persistentVolumeClaim.claimName.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=bvol
// +kubebuilder:printcolumn:name="ID",type=string,JSONPath=`.status.volumeID`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Capacity",type=string,JSONPath=`.status.capacity`
// +kubebuilder:printcolumn:name="Used",type=string,JSONPath=`.status.used`
// +kubebuilder:printcolumn:name="Sandboxes",type=integer,JSONPath=`.status.sandboxes`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,priority=1
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type Volume struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`
	// +optional
	Spec VolumeSpec `json:"spec,omitempty"`
	// +optional
	Status VolumeStatus `json:"status,omitempty"`
}

// VolumeList is a list of volumes.
// +kubebuilder:object:root=true
type VolumeList struct {
	metav1.TypeMeta `json:",inline"`
	// +optional
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Volume `json:"items"`
}

// DisplayName is the volume's name in the E2B API.
func (v *Volume) DisplayName() string {
	if v.Spec.DisplayName != "" {
		return v.Spec.DisplayName
	}
	return v.Name
}

// VolumeObjectName returns the name of the object of a volume with a name of the E2B API: the same if that is a DNS label, else
// one that begins alike and ends with a hash.
func VolumeObjectName(display string) string {
	if len(validation.IsDNS1123Label(display)) == 0 {
		return display
	}
	const begin, digits = 40, 12
	sum := sha256.Sum256([]byte(display))
	like := strings.Trim(strings.ReplaceAll(strings.ToLower(display[:min(len(display), begin)]), "_", "-"), "-")
	if like == "" || len(validation.IsDNS1123Label(like)) > 0 {
		like = "volume"
	}
	return like + "-" + hex.EncodeToString(sum[:])[:digits]
}

// SetVolumeDefaults fills what the user left out.
func SetVolumeDefaults(v *Volume) {
	if v.Spec.Capacity == nil {
		v.Spec.Capacity = resource.NewQuantity(DefaultVolumeCapacity, resource.BinarySI)
	}
	if v.Spec.StorageClassName == "" {
		v.Spec.StorageClassName = StorageLocal
	}
}

// ValidateVolume checks a volume after defaulting. old is nil on create.
func ValidateVolume(v, old *Volume) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	for _, problem := range validation.IsDNS1123Label(v.Name) {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "name"), v.Name, problem))
	}
	if name := v.Spec.DisplayName; name != "" && VolumeObjectName(name) != v.Name {
		errs = append(errs, field.Invalid(spec.Child("displayName"), name, "belongs to an object of the name "+VolumeObjectName(name)))
	}
	if q := v.Spec.Capacity; q != nil && q.CmpInt64(minVolumeCapacity) < 0 {
		errs = append(errs, field.Invalid(spec.Child("capacity"), q.String(), "must be at least 1Mi"))
	}
	if v.Spec.StorageClassName != StorageLocal {
		errs = append(errs, field.NotSupported(spec.Child("storageClassName"), v.Spec.StorageClassName, []string{StorageLocal}))
	}
	if old != nil && v.Spec.DisplayName != old.Spec.DisplayName {
		errs = append(errs, field.Forbidden(spec.Child("displayName"), "is immutable"))
	}
	return errs
}
