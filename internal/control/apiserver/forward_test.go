package apiserver_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

// echo answers what it was asked.
func echo(w http.ResponseWriter, r *http.Request) {
	_, bounded := r.Context().Deadline()
	body, err := io.ReadAll(r.Body)
	w.Header().Set("Content-Type", "text/plain")
	w.WriteHeader(http.StatusTeapot)
	fmt.Fprintf(w, "%s %s %s of %s from %s: %d %q %v; %q %q %q %q; TLS %v, bounded %v", r.Method, r.URL.Path, r.URL.RequestURI(), r.Host, r.RemoteAddr, r.ContentLength, body, err,
		r.Header.Values("Authorization"), r.Header.Get("X-API-Key"), r.Header.Values("Barchan-Forwarded-Authorization"), r.Header.Get("Impersonate-User"), r.TLS != nil, bounded)
}

func forwarder(t *testing.T, s *apiserver.Server, change ...func(*rest.Config)) http.RoundTripper {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", s.AdminKubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range change {
		f(cfg)
	}
	to, err := apiserver.NewForwarder(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return to
}

// forward sends a request, and returns the status and the body of its response.
func forward(t *testing.T, to http.RoundTripper, method, path, body string, headers ...string) (int, string, error) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://replica.example:7700"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	resp, err := to.RoundTrip(r)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text), nil
}

// TestForward: the REST API gets a replica's requests as their clients sent them, with the clients' credentials and none of the replica's.
func TestForward(t *testing.T) {
	s := start(t, func(c *apiserver.Config) { c.Forwarded = http.HandlerFunc(echo) })
	to := forwarder(t, s)
	for name, tt := range map[string]struct {
		method, path, body string
		headers            []string
		want               string
	}{
		"escapes": {
			"GET", "/templates/a%2Fb/tags?x=%20y&timeout=no", "", nil,
			`GET /templates/a/b/tags /templates/a%2Fb/tags?x=%20y&timeout=no of replica.example:7700 from `,
		},
		"key": {
			"POST", "/v3/templates", "{}",
			[]string{"X-API-Key", "e2b_1", "X-Forwarded-For", "192.0.2.7"},
			`from 192.0.2.7:0: 2 "{}" <nil>; [] "e2b_1" [] ""; TLS false, bounded false`,
		},
		"token": {
			"PUT", "/volumecontent/v/file", strings.Repeat("x", 3),
			[]string{"Authorization", "Bearer bvt_1", "Barchan-Forwarded-Authorization", "Bearer mine", "Impersonate-User", "barchan:node"},
			`3 "xxx" <nil>; ["Bearer bvt_1"] "" [] ""; TLS false`,
		},
		"no credentials": {"GET", "/events/sandboxes", "", []string{"Barchan-Forwarded-Authorization", "Bearer mine"}, `; [] "" [] ""; TLS`},
	} {
		status, text, err := forward(t, to, tt.method, tt.path, tt.body, tt.headers...)
		if err != nil || status != http.StatusTeapot || !strings.Contains(text, tt.want) {
			t.Errorf("%s: %d %s, %v; want %s", name, status, text, err, tt.want)
		}
	}
}

// TestForwardRefused: what the API server itself answers is no answer of the REST API, and no client of a replica gets it.
func TestForwardRefused(t *testing.T) {
	serves := func(c *apiserver.Config) { c.Forwarded = http.HandlerFunc(echo) }
	token := func(text string) func(*rest.Config) {
		return func(c *rest.Config) { c.BearerToken = text }
	}
	for name, tt := range map[string]struct {
		server []func(*apiserver.Config)
		client func(*rest.Config)
		want   string
	}{
		"tenant":          {[]func(*apiserver.Config){withKeys, serves}, token("e2b_use"), "status 403"},
		"wrong token":     {[]func(*apiserver.Config){withKeys, serves}, token("nothing"), "status 401"},
		"anonymous":       {[]func(*apiserver.Config){serves}, token(""), "status 403"},
		"another version": {nil, func(*rest.Config) {}, "status 404"},
		"unknown CA":      {[]func(*apiserver.Config){serves}, func(c *rest.Config) { c.CAData = nil }, "does not answer"},
	} {
		s := start(t, tt.server...)
		_, _, err := forward(t, forwarder(t, s, tt.client), "GET", "/events/sandboxes", "", "X-API-Key", "e2b_1")
		if text, _ := errs.PublicMessage(err); !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(text, tt.want) {
			t.Errorf("%s: %v; want an ErrUnavailable with %s", name, err, tt.want)
		}
	}
	s := start(t, serves)
	to := forwarder(t, s)
	s.Stop()
	_, _, err := forward(t, to, "GET", "/events/sandboxes", "")
	if text, _ := errs.PublicMessage(err); !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(text, "does not answer") {
		t.Errorf("without a server: %v", err)
	}
}

// TestForwardPath: a path with dots stays below the REST API, whatever the replica's client sends.
func TestForwardPath(t *testing.T) {
	s := start(t, func(c *apiserver.Config) { c.Forwarded = http.HandlerFunc(echo) })
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://replica", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r.URL = &url.URL{Scheme: "http", Host: "replica", Path: "/templates/uploads/../../../api/v1/namespaces"}
	resp, err := forwarder(t, s).RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if text, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusTeapot || !strings.Contains(string(text), "PUT /templates/uploads/../../../api/v1/namespaces") {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
}
