package tenancy

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"k8s.io/apiserver/pkg/endpoints/request"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// checkKeyEvery is how long a stream may outlive its API key.
const checkKeyEvery = 10 * time.Second

// WithStreamsEnded ends watches, commands and the like of API keys that expire or are revoked meanwhile. It comes before the
// authentication, which removes the key from the request.
func WithStreamsEnded(h http.Handler, keys KeyFunc, long request.LongRunningRequestCheck) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, secret, _ := strings.Cut(strings.TrimSpace(r.Header.Get("Authorization")), " ")
		info, _ := request.RequestInfoFrom(r.Context())
		if keys == nil || !strings.HasPrefix(secret, barchan.KeyPrefix) || info == nil || !long(r, info) {
			h.ServeHTTP(w, r)
			return
		}
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		go func() {
			defer cancel()
			for {
				select {
				case <-time.After(checkKeyEvery):
				case <-ctx.Done():
					return
				}
				if _, err := keys(ctx, secret); errors.Is(err, errs.ErrUnauthenticated) {
					return
				}
			}
		}()
		h.ServeHTTP(w, r.WithContext(ctx))
	})
}
