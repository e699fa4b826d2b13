package apiserver_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

// warnings holds the warnings that a client received.
type warnings struct {
	mu  sync.Mutex
	all []string // +checklocks:mu
}

func (h *warnings) HandleWarningHeaderWithContext(_ context.Context, _ int, _, text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, text)
}

func (h *warnings) take() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer func() { h.all = nil }()
	return strings.Join(h.all, "\n")
}

// TestTemplateWarnings: the writer of a template is warned about the parts of its networkPolicy that have no effect.
func TestTemplateWarnings(t *testing.T) {
	h := &warnings{}
	cfg := start(t).RESTConfig(apiserver.UserAdmin)
	cfg.WarningHandlerWithContext = h
	c, err := client.New(cfg, client.Options{Scheme: testScheme(t)})
	if err != nil {
		t.Fatal(err)
	}
	tp := template("a")
	create(t, c, tp)
	if got := h.take(); got != "" {
		t.Errorf("without a policy: %q", got)
	}
	tp.Spec.NetworkPolicy = &extensions.TemplateNetworkPolicy{Egress: []networkingv1.NetworkPolicyEgressRule{
		{To: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: "8.0.0.0/8"}}, {PodSelector: &metav1.LabelSelector{}}}},
	}}
	if err := c.Update(t.Context(), tp); err != nil {
		t.Fatal(err)
	}
	got := h.take()
	for _, want := range []string{"spec.networkPolicy.ingress: has no effect", "spec.networkPolicy.egress[0].to[1]: allows nothing"} {
		if !strings.Contains(got, want) {
			t.Errorf("warnings %q lack %q", got, want)
		}
	}
	if strings.Contains(got, "to[0]") {
		t.Errorf("warned of what has effect: %q", got)
	}
	tp.Spec.NetworkPolicyManagement = extensions.NetworkUnmanaged
	if err := c.Update(t.Context(), tp); err != nil {
		t.Fatal(err)
	}
	if got := h.take(); got != "" {
		t.Errorf("with a policy that is ignored on purpose: %q", got)
	}
}
