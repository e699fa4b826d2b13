package app

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
)

// NewKey returns a key of the REST API, and the object with its hash.
func NewKey() (string, *barchan.APIKey) {
	text := barchan.NewKeySecret()
	spec := barchan.NewAPIKeySpec(text, "")
	return text, &barchan.APIKey{
		TypeMeta:   metav1.TypeMeta{APIVersion: barchan.GroupVersion.String(), Kind: "APIKey"},
		ObjectMeta: metav1.ObjectMeta{Name: "key-" + spec.SHA256[:8]},
		Spec:       spec,
	}
}

// CreateKey creates a key, and its namespace if that is new. The namespace is labelled as a tenant's, in which a cluster lets the REST API write.
func CreateKey(ctx context.Context, k *Kube, key *barchan.APIKey) error {
	space := &corev1.Namespace{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{Name: key.Namespace, Labels: map[string]string{barchan.TenantLabel: ""}},
	}
	err := k.Create(ctx, NamespacesResource, space)
	if errors.Is(err, errs.ErrConflict) {
		err = k.labelTenant(ctx, key.Namespace)
	}
	if err != nil {
		return err
	}
	return KeyKind().Taken(k.Create(ctx, KeysResource, key), key.Namespace, key.Name)
}

func (k *Kube) labelTenant(ctx context.Context, namespace string) error {
	have, err := k.Client.Resource(NamespacesResource).Get(ctx, namespace, metav1.GetOptions{})
	if err != nil {
		return kubeobjects.Error(err)
	}
	if _, is := have.GetLabels()[barchan.TenantLabel]; is {
		return nil
	}
	_, err = k.Client.Resource(NamespacesResource).Patch(ctx, namespace, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{"`+barchan.TenantLabel+`":""}}}`), metav1.PatchOptions{FieldManager: kubeobjects.FieldManager})
	return kubeobjects.Error(err)
}
