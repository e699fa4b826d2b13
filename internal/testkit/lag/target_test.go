package lag

import "testing"

func TestTarget(t *testing.T) {
	for path, want := range map[string][2]string{
		"/api/v1/pods":                              {"pods", ""},
		"/api/v1/namespaces":                        {"namespaces", ""},
		"/api/v1/namespaces/a":                      {"namespaces", "a"},
		"/api/v1/namespaces/a/pods":                 {"pods", ""},
		"/api/v1/namespaces/a/pods/b":               {"pods", "b"},
		"/apis/g/v1/sandboxes":                      {"sandboxes", ""},
		"/apis/g/v1/namespaces/a/sandboxes/b/scale": {"sandboxes", "b"},
		"/version":                                  {"", ""},
		"/apis/g/v1":                                {"", ""},
		"/":                                         {"", ""},
	} {
		if resource, name := target(path); [2]string{resource, name} != want {
			t.Errorf("%s = %q, %q, want %q", path, resource, name, want)
		}
	}
}
