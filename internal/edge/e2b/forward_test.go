package e2b

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/edge/e2b/templates"
	"github.com/barchan-dev/barchan/internal/edge/e2b/volumes"
)

// serverOf has a replica forward to a handler.
type serverOf struct{ http.Handler }

func (s serverOf) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w.Result(), nil
}

// TestForwardedRoutes: a replica forwards what it would answer 501, and nothing else but the routes of the list.
func TestForwardedRoutes(t *testing.T) {
	plain := newFixture(t)
	var got []string
	replica := newFixture(t, func(c *Config) {
		c.Server = serverOf{http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			got = append(got, r.Method+" "+r.URL.EscapedPath())
			allowOrigins(w.Header())
			w.WriteHeader(http.StatusTeapot)
		})}
	})
	request := func(f *fixture, path string) string {
		path = strings.NewReplacer("{sandboxID}", f.create(`{"templateID":"base"}`).SandboxID, "{templateID}", "base", "{teamID}", team).Replace(path)
		path = pathParameter.ReplaceAllString(path, "none")
		switch {
		case strings.HasSuffix(path, "/metrics/max"):
			path += "?metric=concurrent_sandboxes"
		case strings.HasSuffix(path, "/network/trace"):
			path += "?destination=6.6.6.6"
		}
		return path
	}
	const body = `{"name":"x","alias":"x","target":"x","tags":["y"],"url":"http://x.example","signatureSecret":"s","events":[],"steps":[]}`
	for route := range rightsOf {
		method, path, _ := strings.Cut(route, " ")
		alone, text, _ := plain.do(method, request(plain, path), body)
		got = nil
		status, _, h := replica.do(method, request(replica, path), body)
		if forwarded := status == http.StatusTeapot && len(got) == 1; forwarded != rightsOf[route].server {
			t.Errorf("%s: %d, forwarded %v", route, status, got)
		}
		ofVolumes := strings.HasPrefix(path, "/volumes") // a replica has those, without their files
		if alone == http.StatusNotImplemented && !rightsOf[route].server && !ofVolumes {
			t.Errorf("%s is not forwarded, and answered %d %s", route, alone, text)
		}
		if origins := h.Values("Access-Control-Allow-Origin"); len(origins) != 1 {
			t.Errorf("%s: origins %v", route, origins)
		}
	}
	got = nil
	for _, path := range []string{templates.UploadPath + "a/b%2Fc/d", volumes.ContentPath + "v1/file?path=/x"} {
		if status, text, _ := replica.do("PUT", path, "x", "X-API-Key", ""); status != http.StatusTeapot {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
	if want := []string{"PUT /templates/uploads/a/b%2Fc/d", "PUT /volumecontent/v1/file"}; !slices.Equal(got, want) {
		t.Errorf("forwarded %v, want %v", got, want)
	}
	replica.want(http.StatusNoContent, nil, "OPTIONS", "/v3/templates", "")
	replica.want(http.StatusNotFound, nil, "GET", volumes.ContentPath+"v1/nothing", "")
}

// TestForwardedRequest: the server learns by which address the client reaches the replica, and the client what the server answered.
func TestForwardedRequest(t *testing.T) {
	f := newFixture(t, func(c *Config) {
		c.Server = serverOf{http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Got", fmt.Sprintf("%s %v %v %v %v %d", r.Host, r.Header["X-Forwarded-For"], r.Header["X-Forwarded-Proto"], r.Header["X-Forwarded-Host"], r.Header["Authorization"], r.ContentLength))
			http.Error(w, "no", http.StatusConflict)
		})}
	})
	host := strings.TrimPrefix(f.URL, "http://")
	for name, tt := range map[string]struct {
		headers []string
		want    string
	}{
		"direct":        {nil, host + " [127.0.0.1] [http] [" + host + "] [] 2"},
		"behind a name": {[]string{"X-Forwarded-Proto", "https", "X-Forwarded-Host", "api.example", "X-Forwarded-For", "6.6.6.6"}, host + " [127.0.0.1] [https] [api.example] [] 2"},
		"bearer":        {[]string{"Authorization", "Bearer x"}, host + " [127.0.0.1] [http] [" + host + "] [Bearer x] 2"},
	} {
		if status, text, h := f.do("POST", "/v3/templates", "{}", tt.headers...); status != 409 || text != "no\n" || h.Get("X-Got") != tt.want {
			t.Errorf("%s: %d %s, the server got %s, want %s", name, status, text, h.Get("X-Got"), tt.want)
		}
	}
}

type serverAway struct{}

func (serverAway) RoundTrip(*http.Request) (*http.Response, error) {
	return nil, errs.Public(errors.Join(errors.New("refused"), errs.ErrUnavailable), "the server is away")
}

func TestForwardWithoutServer(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Server = serverAway{} })
	h := f.want(http.StatusServiceUnavailable, nil, "GET", "/events/sandboxes", "")
	if _, text, _ := f.do("GET", "/events/sandboxes", ""); !strings.Contains(text, `"message":"the server is away"`) || h.Get("Retry-After") == "" || h.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("%s, %v", text, h)
	}
	f.create(`{"templateID":"base"}`)
}
