package confine

import (
	"net/http"
	"slices"
	"testing"
)

func TestCookies(t *testing.T) {
	const prefix = "/sandbox/a/80"
	for cookie, want := range map[string]string{
		"a=b":                             "a=b; Path=/sandbox/a/80/",
		"a=b; Path=/":                     "a=b; Path=/sandbox/a/80/",
		"a=b; path=/app":                  "a=b; Path=/sandbox/a/80/app",
		"a=b; Path=/sandbox/a/80/app":     "a=b; Path=/sandbox/a/80/app",
		"a=b; Path=/sandbox/a/80":         "a=b; Path=/sandbox/a/80",
		"a=b; Path=/sandbox/a/800":        "a=b; Path=/sandbox/a/80/sandbox/a/800",
		"a=b; Path=/sandbox/b/80":         "a=b; Path=/sandbox/a/80/sandbox/b/80",
		"a=b; Path=/sandbox/a/80; Path=/": "a=b; Path=/sandbox/a/80/",
		"a=b; Path=x; HttpOnly":           "a=b; HttpOnly; Path=/sandbox/a/80/",
		"a=b; Domain=example.com; Secure": "a=b; Secure; Path=/sandbox/a/80/",
		"a=b; DOMAIN =.example.com":       "a=b; Path=/sandbox/a/80/",
		"Domain=x; Max-Age=1":             "Domain=x; Max-Age=1; Path=/sandbox/a/80/",
		"a=b;Path = / ; SameSite=None":    "a=b; SameSite=None; Path=/sandbox/a/80/",
	} {
		h := http.Header{"Set-Cookie": {cookie}}
		if limit(h, prefix); h.Get("Set-Cookie") != want {
			t.Errorf("%q becomes %q, want %q", cookie, h.Get("Set-Cookie"), want)
		}
	}
	h := http.Header{"Set-Cookie": {"a=b"}}
	if limit(h, ""); h.Get("Set-Cookie") != "" {
		t.Errorf("without a path: %q", h.Get("Set-Cookie"))
	}
}

func TestHeaders(t *testing.T) {
	own := "sandbox allow-same-origin allow-scripts"
	h := http.Header{
		"Content-Security-Policy": {own}, "Clear-Site-Data": {`"*"`}, "Service-Worker-Allowed": {"/"},
		"Strict-Transport-Security": {"max-age=1"}, "X-Own": {"x"},
	}
	limit(h, "/sandbox/a/80")
	if len(h) != 2 || h.Get("X-Own") != "x" || !slices.Equal(h["Content-Security-Policy"], []string{own, Policy}) {
		t.Errorf("got %v", h)
	}
}
