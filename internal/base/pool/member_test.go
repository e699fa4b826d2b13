package pool_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

func member(t *testing.T) (*agents.Sandbox, *extensions.SandboxTemplate) {
	t.Helper()
	of := rich()
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "pool"}}
	s := pool.NewMember(p, of, revision(t, of))
	s.UID, s.Name = "s", "p-1"
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: "True"}}
	s.Status.PodIPs = []string{"10.0.0.1"}
	return s, of
}

func keyOf(of *extensions.SandboxTemplate) types.NamespacedName {
	return types.NamespacedName{Namespace: of.Namespace, Name: of.Name}
}

func TestAdopt(t *testing.T) {
	s, of := member(t)
	before := s.DeepCopy()
	if !pool.Spare(s) || !pool.Fits(s, keyOf(of), revision(t, of)) {
		t.Fatal("a ready member is not to be had")
	}
	failed := s.DeepCopy()
	failed.Status.Conditions[0].Status, failed.Status.Conditions[0].Reason = "False", agents.ReasonPodFailed
	if pool.Spare(failed) {
		t.Error("a member whose entrypoint failed is to be had")
	}
	got := pool.Adopt(s, &metav1.OwnerReference{Kind: "SandboxClaim", Name: "c", UID: "claim"})
	if diff := cmp.Diff(before, s); diff != "" {
		t.Errorf("the member was changed: %s", diff)
	}
	if pool.Spare(got) || pool.MemberOf(got) != "" || pool.OriginOf(got) != "pool" || !pool.Fits(got, keyOf(of), revision(t, of)) {
		t.Errorf("adopted: labels %v", got.Labels)
	}
	if len(got.OwnerReferences) != 1 || got.OwnerReferences[0].UID != "claim" || got.Labels[agents.LabelClaimUID] != "claim" {
		t.Errorf("adopted: owners %v, labels %v", got.OwnerReferences, got.Labels)
	}
	if got.Annotations[pool.AnnotationClaimedAt] == "" || len(pool.Adopt(s, nil).OwnerReferences) != 0 {
		t.Error("the creation time is missing, or the pool still owns it")
	}
}

// TestAdoptedPod: a claimed member has the name of its Pod, also of one with a name of its own.
func TestAdoptedPod(t *testing.T) {
	s, _ := member(t)
	for _, want := range []string{"p-1", "its-pod"} {
		if name := pool.Adopt(s, nil).Annotations[agents.AnnotationPodName]; name != want {
			t.Errorf("the Pod is said to be %q, want %q", name, want)
		}
		s.Annotations[agents.AnnotationPodName] = "its-pod"
	}
}

func TestFits(t *testing.T) {
	now := metav1.Now()
	for name, spoil := range map[string]func(*agents.Sandbox){
		"stale":           func(s *agents.Sandbox) { s.Labels[agents.LabelTemplateHash] = "other" },
		"no revision":     func(s *agents.Sandbox) { delete(s.Labels, agents.LabelTemplateHash) },
		"other template":  func(s *agents.Sandbox) { s.Annotations[agents.AnnotationTemplateRef] = "other" },
		"other namespace": func(s *agents.Sandbox) { s.Annotations[pool.AnnotationTemplateNamespace] = "other" },
		"terminating":     func(s *agents.Sandbox) { s.DeletionTimestamp = &now },
		"finished": func(s *agents.Sandbox) {
			s.Status.Conditions = append(s.Status.Conditions, metav1.Condition{Type: agents.ConditionFinished, Status: "True"})
		},
	} {
		s, of := member(t)
		spoil(s)
		if pool.Fits(s, keyOf(of), revision(t, of)) {
			t.Errorf("%s: fits", name)
		}
	}
	if s, of := member(t); pool.Fits(s, keyOf(of), "") {
		t.Error("fits no revision at all")
	}
}

// Refresh carries over what is no part of the revision, and nothing that runs.
func TestRefresh(t *testing.T) {
	s, of := member(t)
	s.Spec.Barchan = &agents.BarchanSpec{Metadata: map[string]string{"old": "yes"}}
	of.Spec.PodTemplate.ObjectMeta.Labels = map[string]string{"team": "a"}
	of.Spec.Barchan.Sandbox.Metadata = map[string]string{"new": "yes"}
	of.Spec.Barchan.Sandbox.Wake = &agents.WakePolicy{OnTraffic: true}
	if revision(t, of) != pool.RevisionOf(s) {
		t.Fatal("the policies changed the revision")
	}
	want := s.DeepCopy()
	want.Spec.PodTemplate.ObjectMeta.Labels = map[string]string{"team": "a"}
	want.Spec.Barchan = of.Spec.Barchan.Sandbox.DeepCopy()
	agents.SetDefaults(want)
	pool.Refresh(s, of)
	if diff := cmp.Diff(want, s); diff != "" {
		t.Error(diff)
	}
	s.Spec.Barchan.Metadata["mine"] = "yes"
	s.Spec.PodTemplate.ObjectMeta.Labels["mine"] = "yes"
	if len(of.Spec.Barchan.Sandbox.Metadata)+len(of.Spec.PodTemplate.ObjectMeta.Labels) != 2 {
		t.Error("the template shares its maps")
	}
}

// What of a template's networkPolicy is to be kept comes along with every sandbox of it, and stays
// when it is claimed.
func TestNetworkPolicyComesAlong(t *testing.T) {
	rules := []networkingv1.NetworkPolicyEgressRule{{To: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "8.0.0.0/8"}}}}}
	from := []networkingv1.NetworkPolicyIngressRule{{}}
	own := &extensions.TemplateNetworkPolicy{Egress: rules, Ingress: from}
	for name, tt := range map[string]struct {
		policy     *extensions.TemplateNetworkPolicy
		management extensions.NetworkPolicyManagement
		want       *agents.NetworkPolicy
	}{
		"none":         {nil, "", nil},
		"closes all":   {&extensions.TemplateNetworkPolicy{}, extensions.NetworkManaged, &agents.NetworkPolicy{}},
		"rules":        {own, extensions.NetworkManaged, &agents.NetworkPolicy{Egress: rules, Ingress: from}},
		"is unmanaged": {own, extensions.NetworkUnmanaged, nil},
	} {
		for _, of := range []*extensions.SandboxTemplate{rich(), {}} {
			of.Spec.NetworkPolicy, of.Spec.NetworkPolicyManagement = tt.policy, tt.management
			s := pool.NewMember(&extensions.SandboxWarmPool{}, of, revision(t, of))
			claimed := pool.Adopt(s, nil)
			refreshed := pool.Adopt(s, nil)
			pool.Refresh(refreshed, of)
			for when, s := range map[string]*agents.Sandbox{"new": s, "claimed": claimed, "refreshed": refreshed} {
				var got *agents.NetworkPolicy
				if s.Spec.Barchan != nil {
					got = s.Spec.Barchan.NetworkPolicy
				}
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("%s, %s: %s", name, when, diff)
				}
			}
		}
	}
}

// TestBuiltTemplateID: only a template with the annotation of its own name has the ID of that name.
func TestBuiltTemplateID(t *testing.T) {
	id := pool.BuiltTemplateID("team", "mine")
	if len(id) != 20 || id[0] != 't' || id == pool.BuiltTemplateID("team", "other") || id == pool.BuiltTemplateID("team-b", "mine") {
		t.Errorf("the ID is %q", id)
	}
	of := func(name, annotation string) string {
		return pool.TemplateID(&extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: name, UID: "uid", Annotations: map[string]string{pool.AnnotationTemplateID: annotation},
		}})
	}
	byUID := of("mine", "")
	if got := of("mine", id); got != id {
		t.Errorf("of the build's template: %q, want %q", got, id)
	}
	for name, annotation := range map[string]string{"other": id, "mine": pool.BuiltTemplateID("team", "other")} {
		if got := of(name, annotation); got != byUID {
			t.Errorf("of %s with the ID of another: %q, want %q", name, got, byUID)
		}
	}
}
