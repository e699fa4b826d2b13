package admission

import (
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// TestTenantsKeepToSizes refuses an object of a tenant that is too large, and one that grows, but not one that was as large before.
func TestTenantsKeepToSizes(t *testing.T) {
	for name, c := range map[string]struct {
		of        client.Object
		size, was int
		refused   bool
	}{
		"a sandbox":                 {&agents.Sandbox{}, maxObject / 2, 0, false},
		"a large one":               {&agents.Sandbox{}, maxObject, 0, true},
		"one that grows":            {&agents.Sandbox{}, maxObject + 1, maxObject, true},
		"one that was as large":     {&agents.Sandbox{}, maxObject, maxObject, false},
		"a claim":                   {&extensions.SandboxClaim{}, maxObject, 0, true},
		"a template":                {&extensions.SandboxTemplate{}, maxObject, 0, false},
		"a template that is larger": {&extensions.SandboxTemplate{}, maxTemplate, 0, true},
	} {
		with := func(size int) client.Object {
			o := c.of.DeepCopyObject().(client.Object)
			o.SetManagedFields([]metav1.ManagedFieldsEntry{{Manager: strings.Repeat("a", size)}}) // any field counts
			return o
		}
		var got int
		if c.was > 0 {
			got = len(checkSize(with(c.size), with(c.was)))
		} else {
			got = len(checkSize(with(c.size), nil))
		}
		if (got > 0) != c.refused {
			t.Errorf("%s of %d bytes: %d faults", name, c.size, got)
		}
	}
}
