package credentials

import (
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
)

// cookieAccess holds the signature for later requests: <expires>.<signature>. It is not forwarded.
const cookieAccess = headers.CookieAccess

// Signature is what a request shows of a signed URL of a port: the query, or the cookie of an earlier
// request.
type Signature struct {
	expires, signature string // of the query; empty without one
	cookies            []string
}

// TakeSignature removes a signed URL's query from u, the URL that is forwarded. cookies are the lines of
// the request's cookies that are forwarded; nil: all of them. The request is not changed.
func TakeSignature(r *http.Request, u *url.URL) (s Signature, cookies []string) {
	if strings.Contains(u.RawQuery, signedurl.QuerySignature) {
		kept := ""
		for part := range strings.SplitSeq(u.RawQuery, "&") {
			name, value, _ := strings.Cut(part, "=")
			switch name {
			case signedurl.QuerySignature:
				s.signature = value
			case signedurl.QueryExpires:
				s.expires = value
			default:
				if kept != "" {
					kept += "&"
				}
				kept += part
			}
		}
		u.RawQuery = kept
	}
	return s, s.takeCookies(r.Header["Cookie"])
}

// ForwardedCookies returns the lines of cookies without ours; nil: all of them.
func ForwardedCookies(lines []string) []string { return new(Signature).takeCookies(lines) }

func (s *Signature) takeCookies(lines []string) (others []string) {
	found := false
	for _, line := range lines {
		found = found || strings.Contains(line, cookieAccess+"=") || strings.Contains(line, headers.CookieUI+"=")
	}
	if !found {
		return nil
	}
	others = []string{}
	for _, line := range lines {
		var kept []string
		for part := range strings.SplitSeq(line, ";") {
			part = strings.TrimSpace(part)
			if value, ours := strings.CutPrefix(part, cookieAccess+"="); ours {
				s.cookies = append(s.cookies, value)
			} else if !strings.HasPrefix(part, headers.CookieUI+"=") {
				kept = append(kept, part)
			}
		}
		if len(kept) > 0 {
			others = append(others, strings.Join(kept, "; "))
		}
	}
	return others
}

// Verify reports whether the signature was made with a sandbox's token for a port. until is the end of
// the query's validity; zero if a cookie was valid.
func (s *Signature) Verify(token func() string, port uint16) (until time.Time, ok bool) {
	if s.signature == "" && len(s.cookies) == 0 {
		return time.Time{}, false
	}
	key := token()
	if s.signature != "" {
		return signedurl.Verify(key, port, s.expires, s.signature)
	}
	for _, value := range s.cookies {
		expires, signature, _ := strings.Cut(value, ".")
		if _, ok := signedurl.Verify(key, port, expires, signature); ok {
			return time.Time{}, true
		}
	}
	return time.Time{}, false
}

// Cookie returns the Set-Cookie header for a browser's next requests, which lack the query. path is where
// it is valid. Below a path the pages have an origin of their own, so that a cookie for one site would not be sent.
func (s *Signature) Cookie(path string, until time.Time, secure bool) string {
	c := http.Cookie{
		Name: cookieAccess, Value: s.expires + "." + s.signature, Path: path, Expires: until,
		HttpOnly: true, Secure: secure, SameSite: http.SameSiteLaxMode,
	}
	if secure && path != "/" {
		c.SameSite = http.SameSiteNoneMode
	}
	return c.String()
}
