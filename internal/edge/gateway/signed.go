package gateway

import (
	"net/http"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// cookieAccess holds the signature for later requests: <expires>.<signature>. It is not forwarded.
const cookieAccess = headers.CookieAccess

// pass is a request's credentials other than the traffic token.
type pass struct {
	expires, signature string // of the query; empty without one
	cookies            []string
	// grant is a cookie to set with the response, if not empty.
	grant string
}

// takePass removes a signed URL's query and cookie from the forwarded request.
func (x *exchange) takePass() {
	if x.Port == envd.Port {
		return
	}
	if strings.Contains(x.url.RawQuery, signedurl.QuerySignature) {
		kept := ""
		for part := range strings.SplitSeq(x.url.RawQuery, "&") {
			name, value, _ := strings.Cut(part, "=")
			switch name {
			case signedurl.QuerySignature:
				x.pass.signature = value
			case signedurl.QueryExpires:
				x.pass.expires = value
			default:
				if kept != "" {
					kept += "&"
				}
				kept += part
			}
		}
		x.url.RawQuery = kept
	}
	x.takeCookies()
}

// takeCookies does the same with cookies. The request's own header is not changed.
func (x *exchange) takeCookies() {
	lines := x.r.Header["Cookie"]
	found := false
	for _, line := range lines {
		found = found || strings.Contains(line, cookieAccess+"=")
	}
	if !found {
		return
	}
	x.cookies = []string{}
	for _, line := range lines {
		var kept []string
		for part := range strings.SplitSeq(line, ";") {
			part = strings.TrimSpace(part)
			if value, ours := strings.CutPrefix(part, cookieAccess+"="); ours {
				x.pass.cookies = append(x.pass.cookies, value)
			} else {
				kept = append(kept, part)
			}
		}
		if len(kept) > 0 {
			x.cookies = append(x.cookies, strings.Join(kept, "; "))
		}
	}
}

// signedPass checks the result of takePass, and prepares the cookie for a browser's next requests,
// which lack the query.
func (x *exchange) signedPass() bool {
	if x.pass.signature == "" && len(x.pass.cookies) == 0 {
		return false
	}
	token := x.g.cfg.Tokens.Traffic(x.ID)
	if x.pass.signature != "" {
		until, ok := signedurl.Verify(token, x.Port, x.pass.expires, x.pass.signature)
		if ok {
			x.pass.grant = x.accessCookie(until)
		}
		return ok
	}
	for _, value := range x.pass.cookies {
		expires, signature, _ := strings.Cut(value, ".")
		if _, ok := signedurl.Verify(token, x.Port, expires, signature); ok {
			return true
		}
	}
	return false
}

// accessCookie is for this sandbox and port alone, if the host or path names them. With headers, a
// cookie would also go to other sandboxes, so there is none.
func (x *exchange) accessCookie(until time.Time) string {
	if x.ByHeader {
		return ""
	}
	c := http.Cookie{
		Name: cookieAccess, Value: x.pass.expires + "." + x.pass.signature, Path: x.Prefix + "/", Expires: until,
		HttpOnly: true, Secure: x.r.TLS != nil, SameSite: http.SameSiteLaxMode,
	}
	return c.String()
}

// mayPass checks the traffic token, or a signature made with it. The agent's port has its own token,
// which the agent checks.
func (x *exchange) mayPass(public bool) bool {
	if x.Port == envd.Port || public {
		return true
	}
	if got := x.r.Header.Get(envd.HeaderTrafficToken); got != "" {
		return sandbox.EqualToken(got, x.g.cfg.Tokens.Traffic(x.ID))
	}
	return x.signedPass()
}
