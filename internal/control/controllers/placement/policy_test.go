package placement

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// TestRestrictLater: the policy of a claimed sandbox is applied at once, and the label against eviction may wait; one that is there stays.
func TestRestrictLater(t *testing.T) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, agents.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "s", Labels: map[string]string{sandbox.LabelClaimed: "false"}}}
	c := fake.NewClientBuilder().WithScheme(scheme).WithObjects(pod).Build()
	p := &Placer{Config{Client: c, Cache: c, Namespace: "roles"}}
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "s", UID: "u"}}
	for _, step := range []struct {
		name         string
		later, waits bool
		claimed      string
	}{
		{"claims arrive", true, true, "false"},
		{"a pause", false, false, "true"},
		{"claims again", true, false, "true"},
	} {
		waits, err := p.Restrict(t.Context(), s, []*corev1.Pod{pod}, step.later)
		if err != nil {
			t.Fatal(err)
		}
		pod = &corev1.Pod{}
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(s), pod); err != nil {
			t.Fatal(err)
		}
		if waits != step.waits || pod.Labels[sandbox.LabelClaimed] != step.claimed || pod.Labels[sandbox.LabelPolicy] == "" {
			t.Errorf("%s: waits %v, labels %v", step.name, waits, pod.Labels)
		}
	}
}
