package claim_test

import (
	"testing"

	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/controllers/claim"
	"github.com/barchan-dev/barchan/internal/testkit/claimsuite"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
)

// TestSuite runs the suite on the embedded API server.
func TestSuite(t *testing.T) {
	api := embedded.APIServer(t)
	claimsuite.Run(t, claimsuite.Config{
		REST: api.RESTConfig(apiserver.UserAdmin),
		New: func(p claimsuite.Parts) (claimsuite.Starter, error) {
			cfg := claim.Config{Client: p.Client, Watched: p.Cache.Informers(), Cache: p.Cache, Picker: p.Picker, Quota: p.Quota, Assumed: p.Assumed, Events: p.Events, UpstreamMetrics: p.Upstream, Annotate: p.Annotate, Patience: p.Patience}
			if p.Binder != nil {
				cfg.Binder = p.Binder
			}
			return claim.New(cfg)
		},
	})
}
