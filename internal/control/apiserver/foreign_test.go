package apiserver_test

import (
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

// TestForeignNamespaces has a tenant's key of every right ask each resource that the server has, by each verb, in another namespace
// and in all: every request is refused. An impersonation changes nothing.
func TestForeignNamespaces(t *testing.T) {
	h := &hostPods{t: t, more: make(chan struct{}), ended: make(chan struct{})}
	s := start(t, withKeys, func(c *apiserver.Config) { c.Pods = h })
	cfg, err := clientcmd.BuildConfigFromFlags("", s.AdminKubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	cfg.BearerToken, cfg.BearerTokenFile = "e2b_endless", ""
	cfg.QPS = -1
	_, groups, err := discovery.NewDiscoveryClientForConfigOrDie(cfg).ServerGroupsAndResources()
	if err != nil {
		t.Fatal(err)
	}
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	asked := foreignRequests(groups)
	if len(asked) < 400 {
		t.Errorf("%d requests are to be sent", len(asked))
	}
	for _, request := range asked {
		for _, user := range []string{"", apiserver.UserAdmin} {
			if status := send(t, client, cfg.Host, request, user); status != http.StatusForbidden {
				t.Errorf("%s as %q: %d", request, user, status)
			}
		}
	}
}

// send sends "METHOD path", as another user if one is given, and returns the status.
func send(t *testing.T, client *http.Client, host, request, user string) int {
	t.Helper()
	method, path, _ := strings.Cut(request, " ")
	req, err := http.NewRequestWithContext(t.Context(), method, host+path, strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if method == http.MethodPatch {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	if user != "" {
		req.Header.Set("Impersonate-User", user)
	}
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	return res.StatusCode
}

// foreignRequests are of all verbs on all resources, in all namespaces and in two that are not the tenant's.
func foreignRequests(groups []*metav1.APIResourceList) []string {
	var asked []string
	for _, group := range groups {
		root := "/apis/" + group.GroupVersion
		if group.GroupVersion == "v1" {
			root = "/api/v1"
		}
		for _, r := range group.APIResources {
			kind, sub, _ := strings.Cut(r.Name, "/")
			one := strings.TrimSuffix("/other/"+sub, "/")
			for _, scope := range []string{"/", "/namespaces/other/", "/namespaces/default/"} {
				if scope != "/" && !r.Namespaced {
					continue
				}
				if sub == "" {
					asked = append(asked, "GET "+root+scope+kind, "GET "+root+scope+kind+"?watch=true&timeoutSeconds=1", "GET "+root+"/watch"+scope+kind,
						"POST "+root+scope+kind, "DELETE "+root+scope+kind)
				}
				for _, method := range []string{"GET", "POST", "PUT", "PATCH", "DELETE"} {
					asked = append(asked, method+" "+root+scope+kind+one)
				}
			}
		}
	}
	return asked
}
