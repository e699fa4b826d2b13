package apiserver

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// OpenAPI documents are memory only where a client requests them.
func TestOpenAPIOnRequest(t *testing.T) {
	s, err := New(Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	s.mu.Lock()
	server := s.engine.server
	s.mu.Unlock()
	if server.StaticOpenAPISpec != nil || server.OpenAPIV3VersionedService != nil {
		t.Error("the documents are there before the first request")
	}
	for path, want := range map[string]string{
		"/openapi/v2": "io.x-k8s.agents.v1beta1.Sandbox", "/openapi/v3": "apis/agents.x-k8s.io/v1beta1",
		"/openapi/v3/apis/agents.x-k8s.io/v1beta1": "io.x-k8s.agents.v1beta1.Sandbox", "/": "/openapi/v3",
	} {
		w := httptest.NewRecorder()
		server.Handler.NonGoRestfulMux.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), want) {
			t.Errorf("GET %s = %d, %d bytes without %q", path, w.Code, w.Body.Len(), want)
		}
	}
}
