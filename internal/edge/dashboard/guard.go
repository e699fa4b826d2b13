package dashboard

import (
	"net/http"
	"net/url"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/edge/dashboard/sessions"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
)

// The cookie and the header of the page's requests.
const (
	cookiePath = "/ui"
	// headerPage is sent by the page's scripts: "1" for what a person did, "0" for what the page does by itself. A page
	// of another origin cannot send it without a preflight, which is not answered.
	headerPage = "X-Barchan-UI"
)

var (
	errSignIn = errs.Public(errs.ErrUnauthenticated, "sign in; the session has ended")
	errOrigin = errs.Public(errs.ErrForbidden, "the request is not one of the dashboard's own page")
)

// guard checks that a request is the page's own. Sandboxes have pages of the same site, whose requests carry
// the cookie although it is SameSite=Strict: what tells them apart is Sec-Fetch-Site, which scripts cannot set, and where a
// browser does not send that (plain HTTP beyond this machine), Origin and the header. bare is for requests that a
// browser makes without a script: downloads and WebSockets.
func guard(r *http.Request, bare bool) error {
	if site := r.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" {
		return errOrigin
	}
	if origin := r.Header.Get("Origin"); origin != "" && !sameHost(origin, r) {
		return errOrigin
	}
	if !bare && r.Header.Get(headerPage) == "" {
		return errOrigin
	}
	return nil
}

func sameHost(origin string, r *http.Request) bool {
	u, err := url.Parse(origin)
	if err != nil || u.Host == "" {
		return false
	}
	_, host, _ := strings.Cut(request.Origin(r), "://")
	return strings.EqualFold(u.Host, r.Host) || strings.EqualFold(u.Host, host)
}

// caller is a request's session, and who its key says it is.
type caller struct {
	apikeys.Identity
	session *sessions.Session
}

// authenticate finds the session of a request. Two cookies are none: a page of the same site can set one with its own
// session, which a person would then use unawares.
func (s *Server) authenticate(r *http.Request) (caller, error) {
	cookies := r.CookiesNamed(headers.CookieUI)
	if len(cookies) != 1 {
		return caller{}, errSignIn
	}
	x := s.sessions.Find(cookies[0].Value, r.Header.Get(headerPage) != "0")
	if x == nil {
		return caller{}, errSignIn
	}
	return s.identify(r, x)
}

// identify asks whether a session's key is still valid, and ends the session if not.
func (s *Server) identify(r *http.Request, x *sessions.Session) (caller, error) {
	id, err := s.cfg.Keys.Authenticate(r.Context(), x.Key)
	if errs.Kind(err) == errs.ErrUnauthenticated { //nolint:errorlint // a kind is compared
		s.sessions.End(x)
	}
	return caller{Identity: id, session: x}, err
}

// setCookie gives a browser its session, or with an empty secret takes it.
func setCookie(w http.ResponseWriter, r *http.Request, secret string) {
	c := &http.Cookie{
		Name: headers.CookieUI, Value: secret, Path: cookiePath, HttpOnly: true, SameSite: http.SameSiteStrictMode,
		Secure: strings.HasPrefix(request.Origin(r), "https:"), MaxAge: int(sessions.Life.Seconds()),
	}
	if secret == "" {
		c.MaxAge = -1
	}
	http.SetCookie(w, c)
}
