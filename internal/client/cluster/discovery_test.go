package cluster

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// TestDefinitionDiscoveredLate: an API server tells clients of a kind later than it says that it serves it.
func TestDefinitionDiscoveredLate(t *testing.T) {
	const definition = `{"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": "boxes.example.com"},
		"spec": {"group": "example.com", "names": {"kind": "Box"}, "versions": [{"name": "v1"}]}, "status": {"conditions": [{"type": "Established", "status": "True"}]}}`
	crds := `{"name": "customresourcedefinitions", "kind": "CustomResourceDefinition"}`
	responses := map[string]string{
		"/apis/apiextensions.k8s.io/v1": `{"kind": "APIResourceList", "groupVersion": "apiextensions.k8s.io/v1", "resources": [` + crds + `]}`,
		"/apis/example.com/v1":          `{"kind": "APIResourceList", "groupVersion": "example.com/v1", "resources": [{"name": "boxes", "kind": "Box", "namespaced": true}]}`,
		"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/boxes.example.com": definition,
	}
	group := func(name string) string {
		version := `{"groupVersion": "` + name + `/v1", "version": "v1"}`
		return `{"name": "` + name + `", "versions": [` + version + `], "preferredVersion": ` + version + `}`
	}
	lists := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, ok := responses[r.URL.Path]
		if r.URL.Path == "/apis" {
			lists++
			groups := group("apiextensions.k8s.io")
			if lists > 3 {
				groups += "," + group("example.com")
			}
			body, ok = `{"kind": "APIGroupList", "groups": [`+groups+`]}`, true
		}
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(body))
	}))
	defer server.Close()
	cfg := &rest.Config{Host: server.URL}
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(Config{REST: cfg, Dynamic: client, Namespace: "x", Version: "v1", Progress: func(adminclient.Event) {}})
	if err != nil {
		t.Fatal(err)
	}
	u := &unstructured.Unstructured{}
	if err := u.UnmarshalJSON([]byte(definition)); err != nil {
		t.Fatal(err)
	}
	if err := c.awaitDefinitions(t.Context(), []*unstructured.Unstructured{u}); err != nil {
		t.Fatal(err)
	}
	box := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Box"}}
	if _, err := c.objects.Resource(box); err != nil {
		t.Error(err)
	}
}
