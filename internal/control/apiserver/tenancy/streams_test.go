package tenancy

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// TestStreamsEndWithTheirKey: a watch or a command of a key that has expired or was revoked ends soon, and no other.
func TestStreamsEndWithTheirKey(t *testing.T) {
	for name, c := range map[string]struct {
		authorization string
		fails         error
		long, ends    bool
	}{
		"a revoked key":              {"Bearer e2b_x", errs.ErrUnauthenticated, true, true},
		"a valid key":                {"Bearer e2b_x", nil, true, false},
		"a lookup that fails":        {"Bearer e2b_x", errs.ErrUnavailable, true, false},
		"a request that is no watch": {"Bearer e2b_x", errs.ErrUnauthenticated, false, false},
		"a user's token":             {"Bearer x", errs.ErrUnauthenticated, true, false},
		"our own parts":              {"", errs.ErrUnauthenticated, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ended := false
				stream := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
					select {
					case <-r.Context().Done():
						ended = true
					case <-time.After(time.Hour):
					}
				})
				keys := func(context.Context, string) (Tenant, error) { return Tenant{}, c.fails }
				h := WithStreamsEnded(stream, keys, func(*http.Request, *request.RequestInfo) bool { return c.long })
				r := httptest.NewRequestWithContext(request.WithRequestInfo(t.Context(), &request.RequestInfo{}), http.MethodGet, "/", nil)
				r.Header.Set("Authorization", c.authorization)
				h.ServeHTTP(httptest.NewRecorder(), r)
				if ended != c.ends {
					t.Errorf("the stream ended: %t", ended)
				}
			})
		})
	}
}
