package admission

import (
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// TestTenantsKeepToSizes refuses an object of a tenant that is too large, and one that grows, but not one that was as large before.
func TestTenantsKeepToSizes(t *testing.T) {
	for name, c := range map[string]struct {
		of        client.Object
		size, was int64
		refused   bool
	}{
		"a sandbox":                 {&agents.Sandbox{}, maxObject / 2, 0, false},
		"a large one":               {&agents.Sandbox{}, maxObject + 1, 0, true},
		"one that grows":            {&agents.Sandbox{}, maxObject + 2, maxObject + 1, true},
		"one that was as large":     {&agents.Sandbox{}, maxObject + 1, maxObject + 1, false},
		"a claim":                   {&extensions.SandboxClaim{}, maxObject + 1, 0, true},
		"a template":                {&extensions.SandboxTemplate{}, maxTemplate, 0, false},
		"a template that is larger": {&extensions.SandboxTemplate{}, maxTemplate + 1, 0, true},
	} {
		if got := len(checkSize(c.of, c.size, c.was)); (got > 0) != c.refused {
			t.Errorf("%s of %d bytes: %d faults", name, c.size, got)
		}
	}
}
