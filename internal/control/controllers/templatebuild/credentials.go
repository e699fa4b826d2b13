package templatebuild

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// dropCredentials removes the Secret that a client's credentials were kept in for a build, which has ended. Secrets that the
// build does not own stay.
func (r *reconciler) dropCredentials(ctx context.Context, b *barchan.TemplateBuild) error {
	ref := corev1.LocalObjectReference{Name: barchan.CredentialsName(b.Name)}
	if !slices.Contains(b.Spec.From.ImagePullSecrets, ref) {
		return nil
	}
	s := &corev1.Secret{}
	err := r.Client.Get(ctx, client.ObjectKey{Namespace: b.Namespace, Name: ref.Name}, s)
	if err == nil && metav1.IsControlledBy(s, b) {
		err = r.Client.Delete(ctx, s, client.Preconditions{UID: &s.UID})
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("remove credentials of build %s: %w", b.Name, err)
	}
	return nil
}
