package credentials

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/barchan-dev/barchan/internal/edge/gateway/ratelimit"
)

// TestFailuresAreBounded counts attempts from more addresses than limiters are kept.
func TestFailuresAreBounded(t *testing.T) {
	var f Failures
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
	for i := range 3 * ratelimit.MaxLimiters {
		r.RemoteAddr = fmt.Sprintf("10.%d.%d.%d:1", byte(i>>16), byte(i>>8), byte(i))
		_ = f.Count(r)
	}
	if n := f.limiters.Size(); n > 2*ratelimit.MaxLimiters {
		t.Errorf("%d limiters, want at most %d", n, 2*ratelimit.MaxLimiters)
	}
}

func TestClientPrefix(t *testing.T) {
	for remote, want := range map[string]string{
		"192.0.2.1:1000": "192.0.2.1/32", "[::ffff:192.0.2.1]:1000": "192.0.2.1/32",
		"[2001:db8::1:2:3:4]:1": "2001:db8::/64", "[fe80::1%eth0]:1": "fe80::/64", "@": "invalid Prefix",
	} {
		if got := ClientPrefix(remote).String(); got != want {
			t.Errorf("%s: got %s, want %s", remote, got, want)
		}
	}
}
