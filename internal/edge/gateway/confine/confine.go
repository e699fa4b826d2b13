// Package confine keeps pages of sandboxes apart where they share the gateway's own origin: in the path form, at signed
// file URLs without a sandbox's host, and in what scripts request by headers. Browsers then see one site. It knows no
// routes, and reads no bodies.
package confine

import (
	"net/http"
	"strings"

	"github.com/barchan-dev/barchan/internal/edge/gateway/target"
)

// Policy has a browser treat a page as one of an origin of its own: without the cookies, storage, workers and windows of
// other sandboxes' pages. It adds to policies of the sandbox's own, and those cannot take it back.
const Policy = "sandbox allow-downloads allow-forms allow-modals allow-orientation-lock allow-pointer-lock allow-popups allow-presentation allow-scripts"

// dropped are response headers whose effect is not limited to a path.
func dropped() []string {
	return []string{
		"Accept-Ch", "Alt-Svc", "Clear-Site-Data", "Critical-Ch", "Expect-Ct", "Nel", "Origin-Agent-Cluster", "Public-Key-Pins", "Report-To",
		"Service-Worker-Allowed", "Set-Login", "Strict-Transport-Security", "Use-As-Dictionary",
	}
}

// Applies reports whether the pages of a target share their origin with other sandboxes. A program that names a sandbox by
// headers has no pages.
func Applies(t *target.Target, request http.Header) bool {
	return t.Prefix != "" || t.Signed || (t.ByHeader && request.Get("Origin") != "")
}

// Refuses reports whether a request is for the script of a service worker, which would see the requests to other sandboxes.
func Refuses(t *target.Target, request http.Header) bool {
	return request.Get("Service-Worker") != "" && Applies(t, request)
}

// Response limits the effects of a response, whose head is h, to the target's path, if Applies.
func Response(t *target.Target, request, h http.Header) {
	if Applies(t, request) {
		limit(h, t.Prefix)
	}
}

// limit removes cookies without a prefix: there is no path of the sandbox's own.
func limit(h http.Header, prefix string) {
	for _, name := range dropped() {
		delete(h, name)
	}
	h.Add("Content-Security-Policy", Policy)
	cookies := h["Set-Cookie"]
	delete(h, "Set-Cookie")
	if prefix == "" {
		return
	}
	for _, c := range cookies {
		h.Add("Set-Cookie", cookieBelow(c, prefix))
	}
}

// cookieBelow returns a Set-Cookie header whose cookie is sent to paths of the prefix only.
func cookieBelow(cookie, prefix string) string {
	var kept []string
	path := ""
	for i, part := range strings.Split(cookie, ";") {
		name, value, _ := strings.Cut(part, "=")
		name = strings.TrimSpace(name)
		switch {
		case i > 0 && strings.EqualFold(name, "Domain"):
		case i > 0 && strings.EqualFold(name, "Path"):
			path = strings.TrimSpace(value)
		default:
			kept = append(kept, part)
		}
	}
	switch {
	case !strings.HasPrefix(path, "/"):
		path = prefix + "/"
	case path != prefix && !strings.HasPrefix(path, prefix+"/"):
		path = prefix + path
	}
	return strings.Join(kept, ";") + "; Path=" + path
}
