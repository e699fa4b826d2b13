package placement

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// claimName is upstream's, and that of a StatefulSet's claims.
func claimName(s *agents.Sandbox, volume string) string { return volume + "-" + s.Name }

// placeClaims writes the claims that a sandbox lacks. Their templates cannot change, and a claim stays while a Pod on a node uses
// it, so only a sandbox without such a Pod may lack one.
func (p *Placer) placeClaims(ctx context.Context, s *agents.Sandbox, owned []*corev1.Pod) error {
	if slices.ContainsFunc(owned, func(pod *corev1.Pod) bool { return pod.Spec.NodeName != "" }) {
		return nil
	}
	for _, t := range s.Spec.VolumeClaimTemplates {
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: p.ownedBy(s, claimName(s, t.Name)), Spec: *t.Spec.DeepCopy()}
		claim.Labels, claim.Annotations = maps.Clone(t.Labels), maps.Clone(t.Annotations)
		label(&claim.ObjectMeta, s)
		if err := p.create(ctx, s, claim); err != nil {
			return err
		}
	}
	return nil
}

func wantsService(s *agents.Sandbox) bool { return s.Spec.Service != nil && *s.Spec.Service }

// placeService makes the Service as spec.service says: unset keeps what there is. Without changes it sends nothing.
func (p *Placer) placeService(ctx context.Context, s *agents.Sandbox) error {
	if s.Spec.Service == nil {
		return nil
	}
	have := &corev1.Service{}
	err := p.cfg.Cache.Get(ctx, client.ObjectKeyFromObject(s), have)
	switch missing := apierrors.IsNotFound(err); {
	case err != nil && !missing:
		return fmt.Errorf("read Service %s/%s: %w", s.Namespace, s.Name, err)
	case !wantsService(s) && (missing || !metav1.IsControlledBy(have, s)):
		return nil
	case !wantsService(s):
		return p.delete(ctx, have)
	case !missing && !metav1.IsControlledBy(have, s):
		return notOwned(have)
	case !missing:
		return nil
	}
	service := &corev1.Service{ObjectMeta: p.ownedBy(s, s.Name), Spec: corev1.ServiceSpec{
		ClusterIP: corev1.ClusterIPNone, Selector: map[string]string{sandbox.LabelID: string(sandbox.IDOf(s.UID))},
		PublishNotReadyAddresses: false,
	}}
	label(&service.ObjectMeta, s)
	return p.create(ctx, s, service)
}

// Service returns the name of the Service that a sandbox has after Place, and its DNS name. Both are empty if it has none.
func (p *Placer) Service(s *agents.Sandbox) (name, fqdn string) {
	switch {
	case wantsService(s):
		return s.Name, fmt.Sprintf("%s.%s.svc.%s", s.Name, s.Namespace, p.cfg.ClusterDomain)
	case s.Spec.Service == nil:
		return s.Status.Service, s.Status.ServiceFQDN
	}
	return "", ""
}
