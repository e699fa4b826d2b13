package admission

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// A template as it is written for upstream's controller goes in as it is; rules that cannot be
// kept are refused by their field, unless the policy is unmanaged.
func TestAdmitNetworkPolicy(t *testing.T) {
	const upstream = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: analysis, namespace: default}
spec:
  podTemplate: {spec: {containers: [{name: main, image: busybox, ports: [{containerPort: 8888}]}]}}
  networkPolicyManagement: Managed
  networkPolicy:
    ingress:
    - from:
      - namespaceSelector: {matchLabels: {mesh: enabled}}
        podSelector: {matchLabels: {app: gateway}}
      ports: [{port: http}]
    egress:
    - ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
    - to:
      - podSelector: {matchLabels: {app: proxy}}
      - ipBlock: {cidr: 0.0.0.0/0, except: [10.0.0.0/8, 169.254.0.0/16]}
      ports: [{port: 443}, {port: 8000, endPort: 8999}]
`
	read := func() (*extensions.SandboxTemplate, *agents.Sandbox) {
		of, s := &extensions.SandboxTemplate{}, &agents.Sandbox{}
		if err := yaml.UnmarshalStrict([]byte(upstream), of); err != nil {
			t.Fatal(err)
		}
		s.Spec.SandboxBlueprint = of.Spec.SandboxBlueprint
		s.Spec.Barchan = &agents.BarchanSpec{NetworkPolicy: &agents.NetworkPolicy{Egress: of.Spec.NetworkPolicy.Egress}}
		return of, s
	}
	host, err := NewHost()
	if err != nil {
		t.Fatal(err)
	}
	of, s := read()
	if bad := append(host.Admit(t.Context(), of, nil), host.Admit(t.Context(), s, nil)...); len(bad) > 0 {
		t.Errorf("refused: %v", bad)
	}
	of.Spec.NetworkPolicy.Egress[1].To[1].IPBlock.CIDR = "everything"
	if bad := host.Admit(t.Context(), of, nil); len(bad) != 1 || bad[0].Field != "spec.networkPolicy.egress[1].to[1].ipBlock.cidr" {
		t.Errorf("a template with rules that cannot be: %v", bad)
	}
	if bad := host.Admit(t.Context(), s, nil); len(bad) != 1 || bad[0].Field != "spec.barchan.networkPolicy.egress[1].to[1].ipBlock.cidr" {
		t.Errorf("a sandbox with rules that cannot be: %v", bad)
	}
	of.Spec.NetworkPolicyManagement = extensions.NetworkUnmanaged
	if bad := host.Admit(t.Context(), of, nil); len(bad) > 0 {
		t.Errorf("refused although it is unmanaged: %v", bad)
	}
}

// What a machine does not have is refused by its field, and so is a change that would not be applied.
func TestAdmitRefusesTheImpossible(t *testing.T) {
	host, err := NewHost()
	if err != nil {
		t.Fatal(err)
	}
	s, of := &agents.Sandbox{}, &extensions.SandboxTemplate{}
	s.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "x"}}
	of.Spec.PodTemplate = s.Spec.PodTemplate
	if bad := append(host.Admit(t.Context(), s, nil), host.Admit(t.Context(), of, nil)...); len(bad) > 0 {
		t.Errorf("refused: %v", bad)
	}
	was := s.DeepCopy()
	was.Status.PodIPs = []string{"10.9.0.2"}
	s.Spec.PodTemplate.Spec.Containers[0].Image = "y"
	if bad := host.Admit(t.Context(), s, was); len(bad) != 1 || bad[0].Field != "spec.podTemplate.spec.containers[0].image" {
		t.Errorf("another image: %v", bad)
	}
	for name, amount := range map[corev1.ResourceName]string{corev1.ResourceCPU: "100000", corev1.ResourceMemory: "1Pi"} {
		s.Spec.PodTemplate.Spec.Containers[0].Resources.Limits = corev1.ResourceList{name: resource.MustParse(amount)}
		of.Spec.PodTemplate = s.Spec.PodTemplate
		want := fmt.Sprintf("spec.podTemplate.spec.containers[0].resources.limits[%s]", name)
		for _, bad := range []field.ErrorList{host.Admit(t.Context(), s, nil), host.Admit(t.Context(), of, nil)} {
			if len(bad) != 1 || bad[0].Field != want {
				t.Errorf("%s of %s: %v", name, amount, bad)
			}
		}
	}
}
