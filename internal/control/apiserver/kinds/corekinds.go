package kinds

import (
	"slices"
	"strconv"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// NamespaceFinalizer keeps a namespace until it is empty.
const NamespaceFinalizer = "barchan.dev/contents"

// maxDataBytes limits the data of a secret or config map, as in Kubernetes.
const maxDataBytes = 1 << 20

func namespaceKind() *Resource {
	return &Resource{
		GV: corev1.SchemeGroupVersion, Plural: "namespaces", Kind: "Namespace", ShortNames: []string{"ns"},
		Object: &corev1.Namespace{}, List: &corev1.NamespaceList{},
		Status:    true,
		CheckName: apivalidation.NameIsDNSLabel,
		fields:    selectable(func(n *corev1.Namespace) fields.Set { return fields.Set{"status.phase": string(namespacePhase(n))} }),
		Prepare: func(obj, old runtime.Object) {
			n := obj.(*corev1.Namespace)
			had := old == nil || slices.Contains(old.(*corev1.Namespace).Finalizers, NamespaceFinalizer)
			if had && !slices.Contains(n.Finalizers, NamespaceFinalizer) {
				n.Finalizers = append(n.Finalizers, NamespaceFinalizer)
			}
			if n.Name != "" {
				metav1.SetMetaDataLabel(&n.ObjectMeta, corev1.LabelMetadataName, n.Name)
			}
		},
		// The phase is computed whenever a namespace is decoded, not stored.
		Defaults: on(func(n *corev1.Namespace) { n.Status.Phase = namespacePhase(n) }),
		columns:  []column{text("Status", func(n *corev1.Namespace) string { return string(namespacePhase(n)) }), ageColumn()},
	}
}

func namespacePhase(n *corev1.Namespace) corev1.NamespacePhase {
	if n.DeletionTimestamp != nil {
		return corev1.NamespaceTerminating
	}
	return corev1.NamespaceActive
}

func secretKind() *Resource {
	return &Resource{
		GV: corev1.SchemeGroupVersion, Plural: "secrets", Kind: "Secret", Namespaced: true,
		Object: &corev1.Secret{}, List: &corev1.SecretList{},
		Defaults: on(func(s *corev1.Secret) {
			if s.Type == "" {
				s.Type = corev1.SecretTypeOpaque
			}
		}),
		Prepare:  func(obj, _ runtime.Object) { foldStringData(obj.(*corev1.Secret)) },
		Validate: checkedChange(validateSecret),
		fields:   selectable(func(s *corev1.Secret) fields.Set { return fields.Set{"type": string(s.Type)} }),
		columns: []column{
			text("Type", func(s *corev1.Secret) string { return string(s.Type) }),
			text("Data", func(s *corev1.Secret) string { return strconv.Itoa(len(s.Data)) }),
			ageColumn(),
		},
	}
}

// foldStringData moves StringData into Data, since clients read only Data.
func foldStringData(s *corev1.Secret) {
	for k, v := range s.StringData {
		if s.Data == nil {
			s.Data = map[string][]byte{}
		}
		s.Data[k] = []byte(v)
	}
	s.StringData = nil
}

func validateSecret(s, old *corev1.Secret) (errs field.ErrorList) {
	size := 0
	for k, v := range s.Data {
		errs = append(errs, validateDataKey(field.NewPath("data"), k)...)
		size += len(v)
	}
	errs = append(errs, validateDataSize(size)...)
	if old == nil {
		return errs
	}
	if s.Type != old.Type {
		errs = append(errs, field.Invalid(field.NewPath("type"), s.Type, "is immutable"))
	}
	same := apiequality.Semantic.DeepEqual(s.Data, old.Data)
	return append(errs, validateImmutable(s.Immutable, old.Immutable, same)...)
}

func configMapKind() *Resource {
	return &Resource{
		GV: corev1.SchemeGroupVersion, Plural: "configmaps", Kind: "ConfigMap", ShortNames: []string{"cm"}, Namespaced: true,
		Object: &corev1.ConfigMap{}, List: &corev1.ConfigMapList{},
		Validate: checkedChange(validateConfigMap),
		columns: []column{
			text("Data", func(c *corev1.ConfigMap) string { return strconv.Itoa(len(c.Data) + len(c.BinaryData)) }),
			ageColumn(),
		},
	}
}

func validateConfigMap(c, old *corev1.ConfigMap) (errs field.ErrorList) {
	size := 0
	for k, v := range c.Data {
		errs = append(errs, validateDataKey(field.NewPath("data"), k)...)
		if _, both := c.BinaryData[k]; both {
			errs = append(errs, field.Invalid(field.NewPath("data").Key(k), k, "is in binaryData too"))
		}
		size += len(v)
	}
	for k, v := range c.BinaryData {
		errs = append(errs, validateDataKey(field.NewPath("binaryData"), k)...)
		size += len(v)
	}
	errs = append(errs, validateDataSize(size)...)
	if old == nil {
		return errs
	}
	same := apiequality.Semantic.DeepEqual(c.Data, old.Data) && apiequality.Semantic.DeepEqual(c.BinaryData, old.BinaryData)
	return append(errs, validateImmutable(c.Immutable, old.Immutable, same)...)
}

func validateDataKey(path *field.Path, key string) (errs field.ErrorList) {
	for _, msg := range validation.IsConfigMapKey(key) {
		errs = append(errs, field.Invalid(path.Key(key), key, msg))
	}
	return errs
}

func validateDataSize(size int) field.ErrorList {
	if size <= maxDataBytes {
		return nil
	}
	return field.ErrorList{field.TooLong(field.NewPath("data"), "", maxDataBytes)}
}

func validateImmutable(now, before *bool, sameData bool) (errs field.ErrorList) {
	if !ptr.Deref(before, false) {
		return nil
	}
	if !ptr.Deref(now, false) {
		errs = append(errs, field.Forbidden(field.NewPath("immutable"), "cannot be unset"))
	}
	if !sameData {
		errs = append(errs, field.Forbidden(field.NewPath("data"), "is immutable"))
	}
	return errs
}

func leaseKind() *Resource {
	return &Resource{
		GV: coordinationv1.SchemeGroupVersion, Plural: "leases", Kind: "Lease", Namespaced: true,
		Object: &coordinationv1.Lease{}, List: &coordinationv1.LeaseList{},
		Validate: checked(validateLease),
		columns: []column{
			text("Holder", func(l *coordinationv1.Lease) string { return ptr.Deref(l.Spec.HolderIdentity, "") }),
			ageColumn(),
		},
	}
}

func validateLease(l *coordinationv1.Lease) (errs field.ErrorList) {
	spec := field.NewPath("spec")
	if d := l.Spec.LeaseDurationSeconds; d != nil && *d <= 0 {
		errs = append(errs, field.Invalid(spec.Child("leaseDurationSeconds"), *d, "must be greater than 0"))
	}
	if n := l.Spec.LeaseTransitions; n != nil && *n < 0 {
		errs = append(errs, field.Invalid(spec.Child("leaseTransitions"), *n, "must be 0 or more"))
	}
	return errs
}
