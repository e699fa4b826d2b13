package apiserver

import (
	"slices"
	"strconv"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// NamespaceFinalizer keeps a namespace until nothing is left in it.
const NamespaceFinalizer = "barchan.dev/contents"

// maxDataBytes is how much a secret or config map may hold, as in Kubernetes.
const maxDataBytes = 1 << 20

// coreKinds are the few of Kubernetes' own kinds that go with ours; events are in events.go.
func coreKinds() []*resource {
	return []*resource{namespaceKind(), secretKind(), configMapKind(), leaseKind()}
}

func namespaceKind() *resource {
	r := &resource{
		gv: corev1.SchemeGroupVersion, plural: "namespaces", kind: "Namespace", shortNames: []string{"ns"},
		status: true, ownerless: true,
		checkName: apivalidation.NameIsDNSLabel,
		fields: selectable(func(n *corev1.Namespace) fields.Set {
			return fields.Set{"status.phase": string(namespacePhase(n))}
		}),
		prepare: func(obj, old runtime.Object) {
			n := obj.(*corev1.Namespace)
			had := old == nil || slices.Contains(old.(*corev1.Namespace).Finalizers, NamespaceFinalizer)
			if had && !slices.Contains(n.Finalizers, NamespaceFinalizer) {
				n.Finalizers = append(n.Finalizers, NamespaceFinalizer)
			}
			if n.Labels == nil {
				n.Labels = map[string]string{}
			}
			if n.Name != "" {
				n.Labels[corev1.LabelMetadataName] = n.Name
			}
		},
		// The phase is not stored: it follows from the rest whenever a namespace is decoded.
		defaults: on(func(n *corev1.Namespace) { n.Status.Phase = namespacePhase(n) }),
		columns:  []column{text("Status", func(n *corev1.Namespace) string { return string(namespacePhase(n)) }), ageColumn()},
	}
	r.newObject, r.newList = object[corev1.Namespace, corev1.NamespaceList]()
	return r
}

func namespacePhase(n *corev1.Namespace) corev1.NamespacePhase {
	if n.DeletionTimestamp != nil {
		return corev1.NamespaceTerminating
	}
	return corev1.NamespaceActive
}

func secretKind() *resource {
	r := &resource{
		gv: corev1.SchemeGroupVersion, plural: "secrets", kind: "Secret", namespaced: true,
		defaults: on(func(s *corev1.Secret) {
			if s.Type == "" {
				s.Type = corev1.SecretTypeOpaque
			}
		}),
		prepare:  func(obj, _ runtime.Object) { foldStringData(obj.(*corev1.Secret)) },
		validate: checkedChange(validateSecret),
		fields:   selectable(func(s *corev1.Secret) fields.Set { return fields.Set{"type": string(s.Type)} }),
		columns: []column{
			text("Type", func(s *corev1.Secret) string { return string(s.Type) }),
			text("Data", func(s *corev1.Secret) string { return strconv.Itoa(len(s.Data)) }),
			ageColumn(),
		},
	}
	r.newObject, r.newList = object[corev1.Secret, corev1.SecretList]()
	return r
}

// foldStringData moves what was written as text to where it is read as bytes.
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

func configMapKind() *resource {
	r := &resource{
		gv: corev1.SchemeGroupVersion, plural: "configmaps", kind: "ConfigMap", shortNames: []string{"cm"}, namespaced: true,
		validate: checkedChange(validateConfigMap),
		columns: []column{
			text("Data", func(c *corev1.ConfigMap) string { return strconv.Itoa(len(c.Data) + len(c.BinaryData)) }),
			ageColumn(),
		},
	}
	r.newObject, r.newList = object[corev1.ConfigMap, corev1.ConfigMapList]()
	return r
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
	if before == nil || !*before {
		return nil
	}
	if now == nil || !*now {
		errs = append(errs, field.Forbidden(field.NewPath("immutable"), "cannot be unset"))
	}
	if !sameData {
		errs = append(errs, field.Forbidden(field.NewPath("data"), "is immutable"))
	}
	return errs
}

func leaseKind() *resource {
	r := &resource{
		gv: coordinationv1.SchemeGroupVersion, plural: "leases", kind: "Lease", namespaced: true,
		validate: checked(validateLease),
		columns: []column{
			text("Holder", func(l *coordinationv1.Lease) string {
				if l.Spec.HolderIdentity == nil {
					return ""
				}
				return *l.Spec.HolderIdentity
			}),
			ageColumn(),
		},
	}
	r.newObject, r.newList = object[coordinationv1.Lease, coordinationv1.LeaseList]()
	return r
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
