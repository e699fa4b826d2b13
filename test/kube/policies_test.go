package kube

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const (
	denyAll     = "barchan-sandboxes"
	safeToEvict = "cluster-autoscaler.kubernetes.io/safe-to-evict"
)

// These tests verify what objects contain. There is no network plugin that enforces NetworkPolicies.

// policyNamed waits for the NetworkPolicy of the test's namespace.
func (p *podTest) policyNamed(name string) *networkingv1.NetworkPolicy {
	p.Helper()
	policy := &networkingv1.NetworkPolicy{}
	eventually.NoError(p, "NetworkPolicy "+name, func() error {
		return p.Get(p.Context(), client.ObjectKey{Namespace: p.namespace, Name: name}, policy)
	})
	return policy
}

// sharedBy returns the NetworkPolicy that a Pod shares, by its label.
func (p *podTest) sharedBy(pod *corev1.Pod) *networkingv1.NetworkPolicy {
	p.Helper()
	return p.policyNamed(denyAll + "-" + pod.Labels[sandbox.LabelPolicy])
}

func (p *podTest) version(o client.Object) int {
	p.Helper()
	n, err := strconv.Atoi(o.GetResourceVersion())
	if err != nil {
		p.Fatal(err)
	}
	return n
}

func specOf(t *testing.T, policy *networkingv1.NetworkPolicy) string {
	t.Helper()
	text, err := json.Marshal(policy.Spec)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestPodPolicies(t *testing.T) {
	p := startPods(t)
	pod := p.pod(p.sandbox("one"))
	shared, closed := p.sharedBy(pod), p.policyNamed(denyAll)
	if v := p.version(pod); p.version(shared) > v || p.version(closed) > v {
		t.Errorf("the Pod was written at %d, its policies at %d and %d", v, p.version(shared), p.version(closed))
	}
	want := `{"podSelector":{"matchExpressions":[{"key":"barchan.dev/policy","operator":"Exists"}]},` +
		`"ingress":[{"from":[{"podSelector":{"matchLabels":{"app.kubernetes.io/part-of":"barchan"}},"namespaceSelector":{"matchLabels":{"kubernetes.io/metadata.name":"roles"}}}]}],` +
		`"policyTypes":["Ingress","Egress"]}`
	if got := specOf(t, closed); got != want {
		t.Errorf("the policy of all is %s, want %s", got, want)
	}
	if got := specOf(t, shared); !strings.Contains(got, `{"cidr":"0.0.0.0/0","except":["0.0.0.0/8","10.0.0.0/8",`) || !strings.Contains(got, `"k8s-app":"kube-dns"`) ||
		strings.Contains(got, "ingress\":") || shared.Spec.PodSelector.MatchLabels[sandbox.LabelPolicy] != pod.Labels[sandbox.LabelPolicy] {
		t.Errorf("the default is %s", got)
	}
	if got := specOf(t, p.sharedBy(p.pod(p.sandbox("served", withService)))); !strings.Contains(got, `"ingress":[{"from":[{"podSelector":{}}]}]`) {
		t.Errorf("with a Service it is %s", got)
	}
	second := p.pod(p.sandbox("two"))
	if second.Labels[sandbox.LabelPolicy] != pod.Labels[sandbox.LabelPolicy] {
		t.Errorf("labels %v and %v", second.Labels, pod.Labels)
	}
	// What is changed or deleted by hand is written again.
	spec := specOf(t, shared)
	if err := p.Delete(t.Context(), shared); err != nil {
		t.Fatal(err)
	}
	if got := specOf(t, p.sharedBy(pod)); got != spec {
		t.Errorf("again: %s", got)
	}
	closed.Spec.Ingress = []networkingv1.NetworkPolicyIngressRule{{}}
	if err := p.Update(t.Context(), closed); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the policy of all as before", func() bool { return specOf(t, p.policyNamed(denyAll)) == want })
	label := pod.Labels[sandbox.LabelPolicy]
	delete(pod.Labels, sandbox.LabelPolicy)
	if err := p.Update(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the Pod's label", func() bool {
		return p.Get(t.Context(), client.ObjectKeyFromObject(pod), pod) == nil && pod.Labels[sandbox.LabelPolicy] == label
	})
}

// template creates a template with a NetworkPolicy.
func (p *podTest) template(name string, management extensions.NetworkPolicyManagement) *extensions.SandboxTemplate {
	p.Helper()
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: name}}
	t.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "image:1"}}
	t.Spec.NetworkPolicyManagement = management
	db := networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}}}
	t.Spec.NetworkPolicy = &extensions.TemplateNetworkPolicy{
		Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{db}, Ports: []networkingv1.NetworkPolicyPort{{}}}},
		Egress: []networkingv1.NetworkPolicyEgressRule{
			{To: []networkingv1.NetworkPolicyPeer{db, {IPBlock: &networkingv1.IPBlock{CIDR: "8.0.0.0/8"}}}, Ports: []networkingv1.NetworkPolicyPort{{}}},
		},
	}
	if err := p.Create(p.Context(), t); err != nil {
		p.Fatal(err)
	}
	return t
}

// of creates a sandbox of a template.
func (p *podTest) of(t *extensions.SandboxTemplate, name string, changes ...func(*agents.Sandbox)) *agents.Sandbox {
	p.Helper()
	return p.sandbox(name, append([]func(*agents.Sandbox){func(s *agents.Sandbox) {
		*s = *pool.NewSandbox(t, "revision", p.namespace)
		s.Name, s.Finalizers = name, nil
	}}, changes...)...)
}

func TestPodPolicyOfATemplate(t *testing.T) {
	p := startPods(t)
	template := p.template("restricted", extensions.NetworkManaged)
	one, two := p.pod(p.of(template, "one")), p.pod(p.of(template, "two"))
	policy := p.sharedBy(one)
	if two.Labels[sandbox.LabelPolicy] != one.Labels[sandbox.LabelPolicy] || !metav1.IsControlledBy(policy, template) {
		t.Errorf("labels %v and %v, policy of %v", one.Labels, two.Labels, policy.OwnerReferences)
	}
	want := `"ingress":[{"ports":[{"protocol":"TCP"}],"from":[{"podSelector":{"matchLabels":{"app":"db"}}}]}],` +
		`"egress":[{"ports":[{"protocol":"TCP"}],"to":[{"podSelector":{"matchLabels":{"app":"db"}}},{"ipBlock":{"cidr":"8.0.0.0/8"}}]}]`
	if got := specOf(t, policy); !strings.Contains(got, want) {
		t.Errorf("%s, want %s", got, want)
	}
	// A template's older revision keeps its policy.
	before := template.DeepCopy()
	template.Spec.NetworkPolicy.Egress = nil
	if err := p.Update(t.Context(), template); err != nil {
		t.Fatal(err)
	}
	other := p.pod(p.of(template, "newer"))
	if other.Labels[sandbox.LabelPolicy] == one.Labels[sandbox.LabelPolicy] || len(p.sharedBy(other).Spec.Egress) > 0 || p.sharedBy(one).UID != policy.UID {
		t.Errorf("labels %v and %v", other.Labels, one.Labels)
	}
	if older := p.pod(p.of(before, "older")); older.Labels[sandbox.LabelPolicy] != one.Labels[sandbox.LabelPolicy] {
		t.Errorf("labels %v and %v", older.Labels, one.Labels)
	}
	unmanaged := p.template("unmanaged", extensions.NetworkUnmanaged)
	if pod := p.pod(p.of(unmanaged, "unmanaged")); pod.Labels[sandbox.LabelPolicy] != "" {
		t.Errorf("labels %v", pod.Labels)
	}
}

// TestPodClaimed: what a claim adds to a member's policy holds for the running Pod.
func TestPodClaimed(t *testing.T) {
	p := startPods(t)
	template := p.template("restricted", extensions.NetworkManaged)
	s := p.of(template, "member", func(s *agents.Sandbox) { s.Labels[agents.LabelWarmPoolSandbox] = "a-pool" })
	pod := p.pod(s)
	budget := client.ObjectKey{Namespace: p.namespace, Name: "barchan-claimed"}
	if pod.Labels[sandbox.LabelClaimed] != "false" || pod.Annotations[safeToEvict] != "true" {
		t.Errorf("the member has %v, %v", pod.Labels, pod.Annotations)
	}
	if err := p.Get(t.Context(), budget, &policyv1.PodDisruptionBudget{}); !apierrors.IsNotFound(err) {
		t.Errorf("budget without a claimed sandbox: %v", err)
	}
	p.run(pod, "127.0.0.9")
	p.ready(s, "Pod is Ready")
	p.update(s, func(s *agents.Sandbox) {
		delete(s.Labels, agents.LabelWarmPoolSandbox)
		s.Spec.Barchan.Network = &agents.EgressPolicy{Internet: new(false), AllowOut: []string{"8.8.8.8"}}
	})
	eventually.True(t, "the claimed Pod", func() bool {
		return p.Get(t.Context(), client.ObjectKeyFromObject(s), pod) == nil && pod.Labels[sandbox.LabelClaimed] == "true"
	})
	if pod.Annotations[safeToEvict] != "false" || pod.Labels[sandbox.LabelPolicy] != string(sandbox.IDOf(s.UID)) {
		t.Errorf("the claimed Pod has %v, %v", pod.Labels, pod.Annotations)
	}
	pdb := &policyv1.PodDisruptionBudget{}
	if err := p.Get(t.Context(), budget, pdb); err != nil || pdb.Spec.MinAvailable.IntValue() != 1<<31-1 || pdb.Spec.Selector.MatchLabels[sandbox.LabelClaimed] != "true" {
		t.Errorf("budget %+v, %v", pdb.Spec, err)
	}
	if err := p.Delete(t.Context(), pdb); err != nil {
		t.Fatal(err)
	}
	eventually.NoError(t, "the budget again", func() error { return p.Get(t.Context(), budget, pdb) })
	own := p.policyNamed("member")
	if got := specOf(t, own); !metav1.IsControlledBy(own, s) || !strings.Contains(got, `"to":[{"ipBlock":{"cidr":"8.8.8.8/32"}}]`) || strings.Contains(got, "kube-dns") {
		t.Errorf("its own policy is %s of %v", got, own.OwnerReferences)
	}
	p.update(s, func(s *agents.Sandbox) { s.Spec.Barchan.Network.AllowOut = []string{"8.8.4.4"} })
	eventually.True(t, "the changed policy", func() bool { return strings.Contains(specOf(t, p.policyNamed("member")), "8.8.4.4/32") })
}

func TestPodWithOwnEvictionAnnotation(t *testing.T) {
	p := startPods(t)
	kept := p.pod(p.sandbox("kept", func(s *agents.Sandbox) {
		s.Spec.PodTemplate.ObjectMeta.Annotations = map[string]string{safeToEvict: "true"}
	}))
	if kept.Annotations[safeToEvict] != "true" || kept.Labels[sandbox.LabelClaimed] != "true" {
		t.Errorf("%v, %v", kept.Labels, kept.Annotations)
	}
}

func TestPodPolicyNotOwned(t *testing.T) {
	p := startPods(t)
	foreign := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: p.namespace, Name: "box"}}
	foreign.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	if err := p.Create(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	s := p.sandbox("box", func(s *agents.Sandbox) {
		s.Spec.Barchan = &agents.BarchanSpec{Network: &agents.EgressPolicy{Internet: new(false)}}
	})
	p.await(s, agents.ConditionReady, metav1.ConditionFalse, agents.ReasonReconcilerError, "NetworkPolicy box exists and is not owned by this sandbox; delete or rename it")
	if err := p.Get(t.Context(), client.ObjectKeyFromObject(s), &corev1.Pod{}); !apierrors.IsNotFound(err) {
		t.Errorf("its Pod: %v", err)
	}
	if now := p.policyNamed("box"); now.ResourceVersion != foreign.ResourceVersion {
		t.Errorf("the foreign policy is now %+v", now)
	}
	if err := p.Delete(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	p.pod(s)
	if !metav1.IsControlledBy(p.policyNamed("box"), s) {
		t.Error("the policy is not the sandbox's")
	}
}
