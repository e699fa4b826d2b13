package v1alpha1

import (
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"path"
	"regexp"
	"strings"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/api/equality"
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

// Storage classes of volumes.
const (
	// StorageLocal is a directory of the node. The default.
	StorageLocal = "local"
	// StorageS3 is a bucket of an S3-compatible object store, or what has a prefix in one.
	StorageS3 = "s3"
	// StorageNFS is an export of an NFS server.
	StorageNFS = "nfs"
)

// ReasonSecret means that the Secret of a volume in a bucket is missing, or lacks a key. The condition Ready of such a volume has the reasons of
// the node too, such as BucketNotFound, AccessDenied and EndpointUnreachable.
const ReasonSecret = "SecretInvalid"

// Keys of the Secret of a volume in a bucket.
const (
	KeyAccessKeyID     = "accessKeyID"
	KeySecretAccessKey = "secretAccessKey"
	// KeySessionToken and KeyCA are optional: a temporary token, and the certificates that sign the endpoint's, in PEM.
	KeySessionToken = "sessionToken"
	KeyCA           = "ca.crt"
)

// VolumeSecretName returns the name of the Secret with the key that a client of the REST API sent for a volume. It is gone with the volume.
func VolumeSecretName(volume string) string { return volume + "-s3" }

// DefaultRegion is the region of a bucket that names none.
const DefaultRegion = "us-east-1"

// S3VolumeSource is where the files of a volume are.
type S3VolumeSource struct {
	// Endpoint is the URL of the object store: https or http, host and port.
	// +kubebuilder:validation:MaxLength=512
	// +kubebuilder:validation:Pattern=`^https?://[^/?#@]+/?$`
	Endpoint string `json:"endpoint"`
	// Region of the bucket. Default us-east-1.
	// +optional
	// +kubebuilder:default=us-east-1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[a-z0-9-]+$`
	Region string `json:"region,omitempty"`
	// Bucket must exist.
	// +kubebuilder:validation:MinLength=3
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9][a-z0-9.-]*[a-z0-9]$`
	Bucket string `json:"bucket"`
	// Prefix is the directory in the bucket that the files are in. Default: all of the bucket.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Prefix string `json:"prefix,omitempty"`
	// SecretName names a Secret of the namespace with accessKeyID, secretAccessKey and, where needed, sessionToken and ca.crt.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	SecretName string `json:"secretName"`
}

// NFSVolumeSource is an export of an NFS server of version 3 that has the files of a volume. It has no credentials: the server decides by its
// list of exports.
type NFSVolumeSource struct {
	// Server is a name or an address.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Server string `json:"server"`
	// Path of the export.
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:Pattern=`^/`
	Path string `json:"path"`
	// MountOptions are nfsvers=3, vers=3, proto=tcp, tcp, soft, nolock, port=N and mountport=N. Others are refused.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	MountOptions []string `json:"mountOptions,omitempty"`
}

// VolumeFinalizer keeps a Volume object until its node confirmed that its files are gone.
const VolumeFinalizer = "barchan.dev/volume"

// DefaultVolumeCapacity is the capacity of a volume that names none, in bytes.
const DefaultVolumeCapacity = 10 << 30

// minVolumeCapacity is the least capacity, in bytes.
const minVolumeCapacity = 1 << 20

// VolumeSpec describes a volume. Only its capacity can change.
// +kubebuilder:validation:XValidation:rule="has(self.s3) == has(oldSelf.s3) && (!has(self.s3) || self.s3 == oldSelf.s3)",message="is immutable",fieldPath=".s3"
// +kubebuilder:validation:XValidation:rule="has(self.nfs) == has(oldSelf.nfs) && (!has(self.nfs) || self.nfs == oldSelf.nfs)",message="is immutable",fieldPath=".nfs"
// +kubebuilder:validation:XValidation:rule="has(self.nfs) == (has(self.storageClassName) && self.storageClassName == 'nfs')",message="goes with storageClassName nfs, and with no other",fieldPath=".nfs"
// +kubebuilder:validation:XValidation:rule="(has(self.readOnly) && self.readOnly) == (has(oldSelf.readOnly) && oldSelf.readOnly)",message="is immutable",fieldPath=".readOnly"
// +kubebuilder:validation:XValidation:rule="has(self.s3) == (has(self.storageClassName) && self.storageClassName == 's3')",message="goes with storageClassName s3, and with no other",fieldPath=".s3"
// +kubebuilder:validation:XValidation:rule="has(self.displayName) == has(oldSelf.displayName) && (!has(self.displayName) || self.displayName == oldSelf.displayName)",message="is immutable",fieldPath=".displayName"
// +kubebuilder:validation:XValidation:rule="(has(self.storageClassName) ? self.storageClassName : 'local') == (has(oldSelf.storageClassName) ? oldSelf.storageClassName : 'local')",message="is immutable",fieldPath=".storageClassName"
type VolumeSpec struct {
	// DisplayName is the name in the E2B API, where that is not the object's own: letters, digits, dashes and underscores.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	// +kubebuilder:validation:Pattern=`^[A-Za-z0-9_-]*$`
	DisplayName string `json:"displayName,omitempty"`
	// Capacity bounds its files, in bytes; of storage class s3 what the node keeps of them, to be fast. It has no effect on storage class nfs. Default 10Gi.
	// +optional
	Capacity *resource.Quantity `json:"capacity,omitempty"`
	// StorageClassName is what keeps the files: local, which is a directory of the node, s3, a bucket, or nfs, an export of an NFS server.
	// +optional
	// +kubebuilder:default=local
	// +kubebuilder:validation:Enum=local;s3;nfs
	StorageClassName string `json:"storageClassName,omitempty"`
	// S3 is the bucket of storage class s3.
	// +optional
	S3 *S3VolumeSource `json:"s3,omitempty"`
	// NFS is the export of storage class nfs.
	// +optional
	NFS *NFSVolumeSource `json:"nfs,omitempty"`
	// ReadOnly keeps sandboxes and the API from changing files. For storage classes s3 and nfs.
	// +optional
	ReadOnly bool `json:"readOnly,omitempty"`
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

// Source says where the files are: the URL of the bucket, or the export. Of a directory of the node it is empty.
func (v *Volume) Source() string {
	if nfs := v.Spec.NFS; nfs != nil {
		return nfs.Server + ":" + nfs.Path
	}
	if s3 := v.Spec.S3; s3 != nil {
		return strings.TrimSuffix(s3.Endpoint, "/") + "/" + path.Join(s3.Bucket, s3.Prefix)
	}
	return ""
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
	if v.Spec.S3 != nil && v.Spec.S3.Region == "" {
		v.Spec.S3.Region = DefaultRegion
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
	if c := v.Spec.StorageClassName; c != StorageLocal && c != StorageS3 && c != StorageNFS {
		errs = append(errs, field.NotSupported(spec.Child("storageClassName"), c, []string{StorageLocal, StorageS3, StorageNFS}))
	}
	if v.Spec.ReadOnly && v.Spec.S3 == nil && v.Spec.NFS == nil {
		errs = append(errs, field.Forbidden(spec.Child("readOnly"), "goes with storageClassName s3 and nfs alone; have sandboxes mount the volume read-only"))
	}
	errs = append(errs, validateS3(v, spec)...)
	errs = append(errs, validateNFS(v, spec)...)
	if old == nil {
		return errs
	}
	for name, same := range map[string]bool{
		"s3": equality.Semantic.DeepEqual(v.Spec.S3, old.Spec.S3), "nfs": equality.Semantic.DeepEqual(v.Spec.NFS, old.Spec.NFS), "readOnly": v.Spec.ReadOnly == old.Spec.ReadOnly,
		"storageClassName": v.Spec.StorageClassName == old.Spec.StorageClassName, "displayName": v.Spec.DisplayName == old.Spec.DisplayName,
	} {
		if !same {
			errs = append(errs, field.Forbidden(spec.Child(name), "is immutable"))
		}
	}
	return errs
}

var (
	validBucket = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$`)
	validRegion = regexp.MustCompile(`^[a-z0-9-]{1,64}$`)
)

const (
	maxEndpoint = 512
	maxS3Prefix = 512
)

// validateS3 checks where the files are.
func validateS3(v *Volume, spec *field.Path) (errs field.ErrorList) {
	s3, at := v.Spec.S3, spec.Child("s3")
	switch {
	case s3 == nil && v.Spec.StorageClassName == StorageS3:
		return field.ErrorList{field.Required(at, "storageClassName is s3")}
	case s3 == nil:
		return nil
	case v.Spec.StorageClassName != StorageS3:
		return field.ErrorList{field.Forbidden(at, "goes with storageClassName s3 alone")}
	}
	if !validEndpoint(s3.Endpoint) {
		errs = append(errs, field.Invalid(at.Child("endpoint"), s3.Endpoint, "must be https:// or http:// with a host and, if need be, a port"))
	}
	if !validBucket.MatchString(s3.Bucket) {
		errs = append(errs, field.Invalid(at.Child("bucket"), s3.Bucket, "must have from 3 to 63 lower-case letters, digits, dots and dashes"))
	}
	if !validRegion.MatchString(s3.Region) {
		errs = append(errs, field.Invalid(at.Child("region"), s3.Region, "must have from 1 to 64 lower-case letters, digits and dashes"))
	}
	if !validPrefix(s3.Prefix) {
		errs = append(errs, field.Invalid(at.Child("prefix"), s3.Prefix, "must be a path without a slash before it, of at most 512 bytes"))
	}
	for _, problem := range validation.IsDNS1123Subdomain(s3.SecretName) {
		errs = append(errs, field.Invalid(at.Child("secretName"), s3.SecretName, problem))
	}
	return errs
}

func validEndpoint(text string) bool {
	u, err := url.Parse(text)
	if err != nil || len(text) > maxEndpoint || (u.Scheme != "https" && u.Scheme != "http") || u.Hostname() == "" {
		return false
	}
	return u.User == nil && strings.Trim(u.Path, "/") == "" && u.RawQuery == "" && u.Fragment == ""
}

func validPrefix(text string) bool {
	p := strings.TrimSuffix(text, "/")
	return p == "" || (len(p) <= maxS3Prefix && path.Clean("/"+p) == "/"+p && utf8.ValidString(p) && !strings.ContainsRune(p, 0))
}
