package tenancy

import (
	"context"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
)

// TestTenantShares has one tenant fill its share: it is refused one more, and others are not.
func TestTenantShares(t *testing.T) {
	ctx, end := context.WithCancel(t.Context())
	var begun, ended sync.WaitGroup
	h := WithShares(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Stay") != "" {
			begun.Done()
			<-ctx.Done()
		}
	}), func(r *http.Request, _ *request.RequestInfo) bool { return r.URL.Path == "/stream" })
	do := func(namespace, path string, stay string) int {
		of := request.WithRequestInfo(t.Context(), &request.RequestInfo{})
		if namespace != "" {
			of = request.WithUser(of, Tenant{Namespace: namespace, Key: "k"}.User())
		}
		r, w := httptest.NewRequestWithContext(of, http.MethodGet, path, nil), httptest.NewRecorder()
		r.Header.Set("Stay", stay)
		h.ServeHTTP(w, r)
		return w.Code
	}
	for path, n := range map[string]int{"/request": inFlight, "/stream": streams} {
		begun.Add(n)
		for range n {
			ended.Go(func() { do("team-a", path, "yes") })
		}
	}
	begun.Wait()
	for _, path := range []string{"/request", "/stream"} {
		for namespace, want := range map[string]int{"team-a": http.StatusTooManyRequests, "team-b": http.StatusOK, "": http.StatusOK} {
			if got := do(namespace, path, ""); got != want {
				t.Errorf("%s of %q: %d, want %d", path, namespace, got, want)
			}
		}
	}
	end()
	ended.Wait()
	if got := do("team-a", "/request", ""); got != http.StatusOK {
		t.Errorf("after the others ended: %d", got)
	}
}
