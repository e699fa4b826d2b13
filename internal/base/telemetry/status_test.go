package telemetry

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
)

func TestStatusRecorder(t *testing.T) {
	for name, tt := range map[string]struct {
		serve func(w http.ResponseWriter)
		want  int
	}{
		"nothing": {func(http.ResponseWriter) {}, 0},
		"body":    {func(w http.ResponseWriter) { _, _ = io.WriteString(w, "x") }, http.StatusOK},
		"first": {func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusConflict)
			w.WriteHeader(http.StatusOK)
			_, _ = io.WriteString(w, "x")
		}, http.StatusConflict},
	} {
		t.Run(name, func(t *testing.T) {
			to := httptest.NewRecorder()
			r := &StatusRecorder{ResponseWriter: to}
			tt.serve(r)
			if r.Status != tt.want {
				t.Errorf("status %d, want %d", r.Status, tt.want)
			}
			if err := http.NewResponseController(r).Flush(); err != nil || !to.Flushed {
				t.Errorf("flush: %v", err)
			}
		})
	}
}
