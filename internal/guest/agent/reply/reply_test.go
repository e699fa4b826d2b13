package reply

import (
	"net/http"
	"testing"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

func FuzzKeepaliveAndTimeout(f *testing.F) {
	f.Add("50", "60000")
	f.Add("-1", "9999999999")
	f.Fuzz(func(t *testing.T, keepalive, timeout string) {
		if d := Keepalive(http.Header{envd.HeaderKeepalive: {keepalive}}); d <= 0 {
			t.Errorf("keepalive %q: %v", keepalive, d)
		}
		if d, err := Timeout(http.Header{envd.HeaderConnectMillis: {timeout}}); err == nil && d < 0 {
			t.Errorf("timeout %q: %v", timeout, d)
		}
	})
}
