package tenancy

import (
	"fmt"
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/barchan-dev/barchan/internal/base/inflight"
)

// Shares of one tenant in what all tenants together may have in progress: requests, and watches, commands and the like.
const (
	inFlight = 100
	streams  = 1000
)

// share is what one tenant has in progress of one kind.
type share struct {
	namespace string
	streams   bool
}

// WithShares refuses a tenant's requests beyond its shares, so that bodies that do not come, or watches, leave the others
// theirs. It comes after the authentication.
func WithShares(h http.Handler, long request.LongRunningRequestCheck) http.Handler {
	var inProgress inflight.Counter[share]
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tenant, ok := Of(r.Context())
		info, _ := request.RequestInfoFrom(r.Context())
		if !ok || info == nil {
			h.ServeHTTP(w, r)
			return
		}
		mine, most := share{tenant.Namespace, long(r, info)}, inFlight
		if mine.streams {
			most = streams
		}
		if _, ok := inProgress.Take(mine, most); !ok {
			w.Header().Set("Retry-After", "1")
			http.Error(w, fmt.Sprintf("namespace %s has %d requests in progress; try again later", tenant.Namespace, most), http.StatusTooManyRequests)
			return
		}
		defer inProgress.Release(mine)
		h.ServeHTTP(w, r)
	})
}
