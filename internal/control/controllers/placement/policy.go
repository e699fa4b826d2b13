package placement

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// denyAll is the NetworkPolicy of all sandboxes of a namespace. It allows ingress from Barchan's roles only, so that a Pod
	// whose own policy is missing is closed.
	denyAll = "barchan-sandboxes"
	// claimedBudget is the PodDisruptionBudget of the claimed sandboxes of a namespace.
	claimedBudget = "barchan-claimed"
	// safeToEvict is the annotation by which the cluster autoscaler decides whether it may remove a Pod's node.
	safeToEvict = "cluster-autoscaler.kubernetes.io/safe-to-evict"
)

// netPolicy is what a sandbox's NetworkPolicy allows. All sandboxes of a namespace and content share one, unless only the
// sandbox itself could own it.
type netPolicy struct {
	Ingress []networkingv1.NetworkPolicyIngressRule
	Egress  []networkingv1.NetworkPolicyEgressRule
}

// policyOf returns what a sandbox's policy allows. A sandbox with a Service is there for the Pods of its namespace.
func (p *Placer) policyOf(s *agents.Sandbox) (n netPolicy, err error) {
	b := s.Spec.Barchan
	n.Egress, err = p.egressOf(b)
	if s.Spec.Service != nil && *s.Spec.Service {
		n.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &metav1.LabelSelector{}}}}}
	}
	if b != nil && b.NetworkPolicy != nil {
		for _, rule := range b.NetworkPolicy.Ingress {
			n.Ingress = append(n.Ingress, networkingv1.NetworkPolicyIngressRule{From: rule.From, Ports: withProtocol(rule.Ports)})
		}
	}
	return n, err
}

// hash is equal for equal policies.
func (n netPolicy) hash() (string, error) {
	text, err := json.Marshal(n)
	if err != nil {
		return "", fmt.Errorf("hash of a NetworkPolicy: %w", err)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16]), nil
}

// object returns the NetworkPolicy of the Pods that have the value as label.
func (n netPolicy) object(meta metav1.ObjectMeta, value string) *networkingv1.NetworkPolicy {
	meta.Labels = map[string]string{sandbox.LabelPolicy: value}
	return &networkingv1.NetworkPolicy{ObjectMeta: meta, Spec: networkingv1.NetworkPolicySpec{
		PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{sandbox.LabelPolicy: value}},
		PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
		Ingress:     n.Ingress, Egress: n.Egress,
	}}
}

// Restrict applies the network policy of a sandbox to its Pod, and marks that of a claimed sandbox, which may not be
// evicted. With later set the mark may wait, and waits reports that it does: call Restrict again. Unless there is exactly one Pod it
// only checks the policy: Place applies it before it writes the Pod, and of several none is touched. Kinds of error are those of Place.
func (p *Placer) Restrict(ctx context.Context, s *agents.Sandbox, owned []*corev1.Pod, later bool) (waits bool, err error) {
	if len(owned) != 1 {
		_, err := p.policyOf(s)
		return false, err
	}
	marks, err := p.placePolicies(ctx, s)
	if err != nil {
		return false, err
	}
	pod, now := owned[0], owned[0].DeepCopy()
	if waits = later && marks.claimed && pod.Labels[sandbox.LabelClaimed] != "true"; waits {
		marks.claimed = false
	}
	marks.set(&now.ObjectMeta, s)
	if pod.DeletionTimestamp != nil || maps.Equal(pod.Labels, now.Labels) {
		return waits, nil
	}
	if err := p.cfg.Client.Patch(ctx, now, client.MergeFrom(pod)); client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("label Pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return waits, nil
}

// podMarks is what selects a Pod for policies.
type podMarks struct {
	policy  string // value of LabelPolicy; empty: none
	claimed bool
}

func (m podMarks) set(pod *metav1.ObjectMeta, s *agents.Sandbox) {
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	pod.Labels[sandbox.LabelPolicy], pod.Labels[sandbox.LabelClaimed] = m.policy, strconv.FormatBool(m.claimed)
	if m.policy == "" {
		delete(pod.Labels, sandbox.LabelPolicy)
	}
	if _, own := s.Spec.PodTemplate.ObjectMeta.Annotations[safeToEvict]; !own {
		if pod.Annotations == nil {
			pod.Annotations = map[string]string{}
		}
		pod.Annotations[safeToEvict] = strconv.FormatBool(!m.claimed)
	}
}

// placePolicies writes the NetworkPolicy and the PodDisruptionBudget that a sandbox lacks.
func (p *Placer) placePolicies(ctx context.Context, s *agents.Sandbox) (m podMarks, err error) {
	if m.claimed = pool.MemberOf(s) == ""; m.claimed {
		if err := p.applyBudget(ctx, s); err != nil {
			return m, err
		}
	}
	policy, err := p.networkPolicy(ctx, s)
	if policy == nil || err != nil {
		return m, err
	}
	m.policy = policy.Labels[sandbox.LabelPolicy]
	return m, errors.Join(p.applyPolicy(ctx, s, p.closed(s.Namespace)), p.applyPolicy(ctx, s, policy))
}

// budget returns the PodDisruptionBudget of a namespace. Its minimum is a number that no namespace reaches: the disruption
// controller does not count Pods, for maxUnavailable, that a kind without scale controls.
func budget(namespace string) *policyv1.PodDisruptionBudget {
	return &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: claimedBudget, Labels: map[string]string{sandbox.LabelPolicy: claimedBudget}},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: new(intstr.FromInt32(math.MaxInt32)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{sandbox.LabelClaimed: "true"}},
		},
	}
}

// closed returns the NetworkPolicy of all sandboxes of a namespace.
func (p *Placer) closed(namespace string) *networkingv1.NetworkPolicy {
	n := netPolicy{Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{
		NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: p.cfg.Namespace}},
		PodSelector:       &metav1.LabelSelector{MatchLabels: map[string]string{"app.kubernetes.io/part-of": "barchan"}},
	}}}}}
	o := n.object(metav1.ObjectMeta{Namespace: namespace, Name: denyAll}, denyAll)
	o.Spec.PodSelector = metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: sandbox.LabelPolicy, Operator: metav1.LabelSelectorOpExists}}}
	return o
}

// networkPolicy returns the NetworkPolicy of a sandbox; nil if its template leaves that to others. The secure default is that of
// the namespace, the policy of a template the template's, both by their content; any other is the sandbox's own.
func (p *Placer) networkPolicy(ctx context.Context, s *agents.Sandbox) (*networkingv1.NetworkPolicy, error) {
	policy, err := p.policyOf(s)
	if err != nil {
		return nil, err
	}
	template, err := p.templateOf(ctx, s)
	if err != nil {
		return nil, err
	}
	isDefault := s.Spec.Barchan == nil || s.Spec.Barchan.Network == nil && s.Spec.Barchan.NetworkPolicy == nil
	if isDefault && template != nil && template.Spec.NetworkPolicyManagement == extensions.NetworkUnmanaged {
		return nil, nil
	}
	hash, err := policy.hash()
	if err != nil {
		return nil, err
	}
	shared := policy.object(metav1.ObjectMeta{Namespace: s.Namespace, Name: denyAll + "-" + hash}, hash)
	if isDefault {
		return shared, nil
	}
	if err := p.cfg.Cache.Get(ctx, client.ObjectKeyFromObject(shared), &networkingv1.NetworkPolicy{}); err == nil {
		return shared, nil // also that of a template's older revision
	} else if !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("read NetworkPolicy %s/%s: %w", s.Namespace, shared.Name, err)
	}
	if template != nil && template.Namespace == s.Namespace && p.hasPolicy(template, hash) {
		shared.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(template, extensions.GroupVersion.WithKind("SandboxTemplate"))}
		return shared, nil
	}
	return policy.object(p.ownedBy(s, s.Name), string(sandbox.IDOf(s.UID))), nil
}

// hasPolicy reports whether a template's sandboxes have the policy of this hash.
func (p *Placer) hasPolicy(t *extensions.SandboxTemplate, hash string) bool {
	s := &agents.Sandbox{}
	s.Spec.SandboxBlueprint = *t.Spec.SandboxBlueprint.DeepCopy()
	pool.Refresh(s, t)
	policy, err := p.policyOf(s)
	if err != nil {
		return false
	}
	of, err := policy.hash()
	return err == nil && of == hash
}

// templateOf returns the template of a sandbox; nil if it has none, or the template is gone.
func (p *Placer) templateOf(ctx context.Context, s *agents.Sandbox) (*extensions.SandboxTemplate, error) {
	key := pool.TemplateKey(s)
	if key.Namespace == "" || key.Name == "" {
		return nil, nil
	}
	t := &extensions.SandboxTemplate{}
	if err := p.cfg.Cache.Get(ctx, key, t); apierrors.IsNotFound(err) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("read template %s: %w", key, err)
	}
	return t, nil
}

func (p *Placer) applyPolicy(ctx context.Context, s *agents.Sandbox, want *networkingv1.NetworkPolicy) error {
	have := &networkingv1.NetworkPolicy{}
	return p.apply(ctx, s, want, have, func() bool { return replace(&have.Spec, want.Spec) })
}

func (p *Placer) applyBudget(ctx context.Context, s *agents.Sandbox) error {
	have, want := &policyv1.PodDisruptionBudget{}, budget(s.Namespace)
	return p.apply(ctx, s, want, have, func() bool { return replace(&have.Spec, want.Spec) })
}

// replace sets a value, and reports whether that changed it.
func replace[T any](old *T, value T) (changed bool) {
	changed = !apiequality.Semantic.DeepEqual(*old, value)
	*old = value
	return changed
}

// apply writes a policy unless it is as it should be. have receives what there is, and is made equal by equalize, which
// reports whether it was not.
func (p *Placer) apply(ctx context.Context, s *agents.Sandbox, want, have client.Object, equalize func() (changed bool)) error {
	err := p.cfg.Cache.Get(ctx, client.ObjectKeyFromObject(want), have)
	if apierrors.IsNotFound(err) {
		created, _ := want.DeepCopyObject().(client.Object)
		err = p.cfg.Client.Create(ctx, created)
		if !apierrors.IsAlreadyExists(err) {
			return createError(err, want)
		}
		err = p.cfg.Client.Get(ctx, client.ObjectKeyFromObject(want), have) // the cache may lag, or it is not ours
	}
	if err != nil {
		return fmt.Errorf("read %s %s/%s: %w", kindOf(want), s.Namespace, want.GetName(), err)
	}
	owner := metav1.GetControllerOf(want)
	own := owner != nil && owner.UID == s.UID
	if have.GetLabels()[sandbox.LabelPolicy] != want.GetLabels()[sandbox.LabelPolicy] || (own && !metav1.IsControlledBy(have, s)) {
		return notOwned(want)
	}
	if !equalize() {
		return nil
	}
	if err := p.cfg.Client.Update(ctx, have); err != nil && !apierrors.IsNotFound(err) {
		if apierrors.IsInvalid(err) {
			return fmt.Errorf("%w: %w", err, errs.ErrInvalid)
		}
		return fmt.Errorf("update %s %s/%s: %w", kindOf(want), s.Namespace, want.GetName(), err)
	}
	return nil
}
