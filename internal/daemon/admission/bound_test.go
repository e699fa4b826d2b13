package admission

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// TestTenantsAreBound refuses metadata that grows without an end, a full namespace, and a sandbox that would not count.
func TestTenantsAreBound(t *testing.T) {
	used := int64(0)
	q, err := quota.New(quota.Config{
		Reader: noNamespaces{}, Log: slog.New(slog.DiscardHandler), Defaults: quota.Limits{Contents: quota.AtMost(1 << 20)},
		Contents: func(context.Context, string) (int64, error) { return used, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	tenants, tenant := Tenants{Quotas: func() *quota.Quotas { return q }}, tenancy.Tenant{Namespace: "a"}
	claim := func(labels int) *extensions.SandboxClaim {
		c := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "c", Labels: map[string]string{}}}
		for i := range labels {
			c.Labels[fmt.Sprintf("label-%d", i)] = strings.Repeat("a", 63)
		}
		return c
	}
	member := func(of string) *agents.Sandbox {
		s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s"}}
		if of != "" {
			s.Labels = map[string]string{agents.LabelWarmPoolSandbox: of}
		}
		return s
	}
	for name, c := range map[string]struct {
		obj, old runtime.Object
		used     int64
		refused  string
	}{
		"a claim":                         {claim(1), nil, 0, ""},
		"labels without an end":           {claim(1000), claim(1), 0, "may have 65536"},
		"as many as before":               {claim(1000), claim(1000), 1 << 21, ""},
		"fewer than before":               {claim(10), claim(1000), 1 << 21, ""},
		"one more in a full namespace":    {claim(1), nil, 1 << 20, "quota of the namespace: at most 1Mi of objects (barchan.dev/quota-contents); they have 1Mi"},
		"a larger one in a full one":      {claim(2), claim(1), 1 << 20, "at most 1Mi"},
		"a sandbox of a pool":             {member("p"), nil, 0, "only the server"},
		"one that becomes a pool's":       {member("p"), member(""), 0, "only the server"},
		"one that is taken from its pool": {member(""), member("p"), 0, "only the server"},
		"one that stays in its pool":      {member("p"), member("p"), 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			used = c.used
			if got := fmt.Sprint(tenants.checkBound(t.Context(), tenant, c.obj, c.old)); got != "[]" && c.refused == "" || !strings.Contains(got, c.refused) {
				t.Errorf("tenant: %s, want %q", got, c.refused)
			}
			if got := tenants.Bound(t.Context(), c.obj, c.old); len(got) > 0 {
				t.Errorf("the server's own parts: %v", got)
			}
		})
	}
}
