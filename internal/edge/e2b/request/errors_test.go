package request

import (
	"context"
	"errors"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestClientGone: an unknown error after the client has gone is no fault of the server.
func TestClientGone(t *testing.T) {
	for _, gone := range []bool{true, false} {
		ctx, cancel := context.WithCancel(t.Context())
		if gone {
			cancel()
		}
		var log strings.Builder
		w := httptest.NewRecorder()
		Errors{Log: slog.New(slog.NewTextHandler(&log, nil))}.Fail(w, httptest.NewRequestWithContext(ctx, "GET", "/x", nil), errors.New("context canceled"))
		if want := map[bool]int{true: statusClosed, false: 500}[gone]; w.Code != want || strings.Contains(log.String(), "level=WARN") != gone {
			t.Errorf("client gone %t: %d, logged %q; want %d", gone, w.Code, log.String(), want)
		}
		cancel()
	}
}
