package dashboard

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// fakeParts stand for the server; test/e2e has the real ones, in a browser.
type fakeParts struct {
	client.Reader
	mu    sync.Mutex
	valid map[string]string // namespace by key; +checklocks:mu
	boxes []*agents.Sandbox
	asked []*http.Request // what the REST API got
}

func (f *fakeParts) Authenticate(_ context.Context, secret string) (apikeys.Identity, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if ns, ok := f.valid[secret]; ok {
		return apikeys.Identity{Namespace: ns, Key: "key-of-" + ns}, nil
	}
	return apikeys.Identity{}, errs.Public(errs.ErrUnauthenticated, "the API key is unknown")
}

func (f *fakeParts) revoke(key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.valid, key)
}

func (f *fakeParts) SandboxByID(_ context.Context, id sandbox.ID) (*agents.Sandbox, error) {
	for _, o := range f.boxes {
		if sandbox.IDOf(o.UID) == id {
			return o, nil
		}
	}
	return nil, errs.ErrNotFound
}

func (f *fakeParts) Sandboxes(_ context.Context, namespace string) (found []*agents.Sandbox, _ error) {
	for _, o := range f.boxes {
		if o.Namespace == namespace {
			found = append(found, o)
		}
	}
	return found, nil
}

func (f *fakeParts) Limits(context.Context, string) (quota.Limits, error) { return quota.Limits{}, nil }

func (f *fakeParts) Used(string) (running, paused quota.Use) { return running, paused }

func (f *fakeParts) Stored(string) int64 { return 0 }

func (f *fakeParts) Objects(string, quota.Kind) int64 { return 0 }

func (f *fakeParts) Agent(*agents.Sandbox) (*envd.Client, error) { return nil, errs.ErrUnavailable }

func (f *fakeParts) List(context.Context, client.ObjectList, ...client.ListOption) error { return nil }

func (f *fakeParts) Template(context.Context, string, string) (templates.Template, error) {
	return templates.Template{}, errs.ErrNotFound
}

func (f *fakeParts) Visit(context.Context, sandbox.ID) (*gateway.Visit, error) {
	return nil, errs.ErrUnavailable
}

func (f *fakeParts) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.asked = append(f.asked, r)
	w.Header().Set("Access-Control-Allow-Origin", "*")
	_, _ = io.WriteString(w, "{}")
}

// trafficToken is an annotation with the token of a private sandbox, which a real server derives.
const trafficToken = "token"

func newTestServer(t testing.TB) (*Server, *fakeParts) {
	t.Helper()
	f := &fakeParts{valid: map[string]string{"good": "team", "other": "rival"}}
	s, err := New(Config{
		Keys: f, Cache: f, Objects: f, Live: f, REST: f, Visit: f.Visit, Agent: f.Agent, Quotas: f, Log: slog.New(slog.DiscardHandler),
		Template: f.Template,
		View: func(o *agents.Sandbox) sandboxes.Sandbox {
			return sandboxes.Sandbox{ID: sandbox.IDOf(o.UID), Phase: sandbox.PhaseOf(o), EndAt: sandboxes.Never, TrafficToken: o.Annotations[trafficToken]}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s, f
}

// call makes a request of the page, changed by edit.
func call(s http.Handler, method, path, body string, edit ...func(*http.Request)) *httptest.ResponseRecorder {
	r := httptest.NewRequestWithContext(context.Background(), method, "http://barchan.test"+path, strings.NewReader(body))
	r.Header.Set(headerPage, "1")
	r.Header.Set("Sec-Fetch-Site", "same-origin")
	for _, e := range edit {
		e(r)
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w
}

func with(name, value string) func(*http.Request) {
	return func(r *http.Request) { r.Header.Set(name, value) }
}

func without(name string) func(*http.Request) { return func(r *http.Request) { r.Header.Del(name) } }

// signedIn returns a cookie of a session.
func signedIn(t *testing.T, s http.Handler, key string, edit ...func(*http.Request)) *http.Cookie {
	t.Helper()
	w := call(s, http.MethodPost, "/ui/api/session", `{"key":"`+key+`"}`, edit...)
	cookies := w.Result().Cookies()
	if w.Code != http.StatusOK || len(cookies) != 1 {
		t.Fatalf("sign-in = %d %s, cookies %v", w.Code, w.Body, cookies)
	}
	return cookies[0]
}

func cookie(c *http.Cookie) func(*http.Request) { return func(r *http.Request) { r.AddCookie(c) } }

func TestCookie(t *testing.T) {
	s, _ := newTestServer(t)
	c := signedIn(t, s, "good")
	if c.Name != headers.CookieUI || !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Path != "/ui" || c.Secure || c.Domain != "" {
		t.Errorf("cookie %+v", c)
	}
	if c := signedIn(t, s, "good", with("X-Forwarded-Proto", "https")); !c.Secure {
		t.Errorf("cookie over TLS %+v", c)
	}
	// A session that an attacker knew before is not what the browser has afterwards, and has ended.
	again := signedIn(t, s, "good", cookie(c))
	if again.Value == c.Value {
		t.Error("the session was kept at the sign-in")
	}
	if w := call(s, http.MethodGet, "/ui/api/session", "", cookie(c)); w.Code != http.StatusUnauthorized {
		t.Errorf("the session before = %d", w.Code)
	}
	if w := call(s, http.MethodGet, "/ui/api/session", "", cookie(again), cookie(signedIn(t, s, "other"))); w.Code != http.StatusUnauthorized {
		t.Errorf("two cookies = %d %s", w.Code, w.Body)
	}
}

func TestOnlyThePageUsesASession(t *testing.T) {
	s, _ := newTestServer(t)
	c := cookie(signedIn(t, s, "good"))
	tests := map[string]struct {
		edit []func(*http.Request)
		want int
	}{
		"the page":                     {nil, 200},
		"another site":                 {[]func(*http.Request){with("Sec-Fetch-Site", "cross-site")}, 403},
		"a sandbox's host":             {[]func(*http.Request){with("Sec-Fetch-Site", "same-site")}, 403},
		"typed address":                {[]func(*http.Request){with("Sec-Fetch-Site", "none")}, 403},
		"without the header":           {[]func(*http.Request){without(headerPage)}, 403},
		"old browser":                  {[]func(*http.Request){without("Sec-Fetch-Site")}, 200},
		"old browser, own origin":      {[]func(*http.Request){without("Sec-Fetch-Site"), with("Origin", "http://barchan.test")}, 200},
		"old browser, sandbox":         {[]func(*http.Request){without("Sec-Fetch-Site"), with("Origin", "http://8080-x.barchan.test")}, 403},
		"old browser, sandboxed frame": {[]func(*http.Request){without("Sec-Fetch-Site"), with("Origin", "null")}, 403},
	}
	for name, tt := range tests {
		if w := call(s, http.MethodGet, "/ui/api/session", "", append(tt.edit, c)...); w.Code != tt.want {
			t.Errorf("%s = %d %s, want %d", name, w.Code, w.Body, tt.want)
		}
	}
	for _, path := range []string{"/ui/api/sandboxes/iq0d6tq1vh9c2r7k3xw5/terminal", "/ui/api/sandboxes/iq0d6tq1vh9c2r7k3xw5/download?path=/x"} {
		if w := call(s, http.MethodGet, path, "", c, with("Sec-Fetch-Site", "same-site"), without(headerPage)); w.Code != http.StatusForbidden {
			t.Errorf("%s of another origin = %d", path, w.Code)
		}
	}
	for _, path := range []string{"/ui/api/session", "/ui/api/rest/sandboxes", "/ui/"} { // a preflight
		w := call(s, http.MethodOptions, path, "", with("Sec-Fetch-Site", "same-site"), with("Origin", "http://8080-x.barchan.test"))
		if w.Code < 400 || w.Header().Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("OPTIONS %s = %d %v", path, w.Code, w.Header())
		}
	}
	if w := call(s, http.MethodPost, "/ui/api/session", `{"key":"other"}`, with("Sec-Fetch-Site", "same-site")); w.Code != http.StatusForbidden {
		t.Errorf("a sign-in by another origin = %d", w.Code)
	}
}

func TestRevokedKeyEndsItsSessions(t *testing.T) {
	s, f := newTestServer(t)
	c := signedIn(t, s, "good")
	f.revoke("good")
	if w := call(s, http.MethodGet, "/ui/api/session", "", cookie(c)); w.Code != http.StatusUnauthorized {
		t.Errorf("= %d %s", w.Code, w.Body)
	}
	if s.sessions.Find(c.Value, true) != nil {
		t.Error("the session is still there")
	}
}

func TestLink(t *testing.T) {
	s, _ := newTestServer(t)
	if w := call(s, http.MethodPost, "/ui/api/tickets", "", with("X-API-Key", "bad")); w.Code != http.StatusUnauthorized {
		t.Errorf("a wrong key = %d", w.Code)
	}
	if w := call(s, http.MethodPost, "/ui/api/tickets", "", cookie(signedIn(t, s, "good"))); w.Code != http.StatusUnauthorized {
		t.Errorf("a session in the place of a key = %d", w.Code)
	}
	var made struct{ Ticket string }
	w := call(s, http.MethodPost, "/ui/api/tickets", "", with("X-API-Key", "good"), without(headerPage), without("Sec-Fetch-Site"))
	if err := json.NewDecoder(w.Body).Decode(&made); err != nil || made.Ticket == "" {
		t.Fatalf("ticket = %d %v", w.Code, err)
	}
	body := `{"ticket":"` + made.Ticket + `"}`
	for i, want := range []int{http.StatusOK, http.StatusUnauthorized} {
		if w := call(s, http.MethodPost, "/ui/api/session", body); w.Code != want {
			t.Errorf("use %d = %d %s, want %d", i+1, w.Code, w.Body, want)
		}
	}
	for name, body := range map[string]string{"neither": `{}`, "both": `{"key":"good","ticket":"x"}`, "no JSON": `key`, "large": `{"key":"` + strings.Repeat("x", maxJSON) + `"}`} {
		if w := call(s, http.MethodPost, "/ui/api/session", body); w.Code != http.StatusBadRequest {
			t.Errorf("%s = %d %s", name, w.Code, w.Body)
		}
	}
}

// TestREST: the API gets the session's key and nothing else that identifies, and its answer is for the page alone.
func TestREST(t *testing.T) {
	s, f := newTestServer(t)
	c := signedIn(t, s, "good")
	w := call(s, http.MethodPost, "/ui/api/rest/sandboxes?x=a%2Fb", `{}`, cookie(c), with("Authorization", "Bearer other"), with("X-API-Key", "other"))
	if w.Code != http.StatusOK || w.Header().Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("= %d %v", w.Code, w.Header())
	}
	r := f.asked[0]
	if r.URL.Path != "/sandboxes" || r.URL.RawQuery != "x=a%2Fb" || r.Header.Get("X-API-Key") != "good" || r.Header.Get("Authorization") != "" || r.Header.Get("Cookie") != "" {
		t.Errorf("the API got %s %v", r.URL, r.Header)
	}
	if w := call(s, http.MethodGet, "/ui/api/rest/sandboxes", ""); w.Code != http.StatusUnauthorized || len(f.asked) != 1 {
		t.Errorf("without a session = %d", w.Code)
	}
}

// TestOpenPort: the URL of a private sandbox's port is signed for that port, and only for the page of its namespace; the audit log has it.
func TestOpenPort(t *testing.T) {
	s, f := newTestServer(t)
	recorded := withAudit(t, s)
	public, private := box("team", "public", true), box("team", "private", true)
	private.Annotations = map[string]string{trafficToken: "secret"}
	f.boxes = append(f.boxes, public, private, box("rival", "foreign", true))
	own := cookie(signedIn(t, s, "good"))
	open := func(name, port string, edit ...func(*http.Request)) *httptest.ResponseRecorder {
		return call(s, http.MethodGet, "/ui/api/sandboxes/"+string(sandbox.IDOf(types.UID(name)))+"/ports/"+port, "", append(edit, without(headerPage))...)
	}
	if w := open("public", "8080", own); w.Code != http.StatusSeeOther || !strings.HasSuffix(w.Header().Get("Location"), "/8080/") {
		t.Errorf("public = %d %s", w.Code, w.Header().Get("Location"))
	}
	w := open("private", "8080", own)
	to, err := url.Parse(w.Header().Get("Location"))
	if w.Code != http.StatusSeeOther || err != nil || !strings.HasSuffix(to.Path, "/8080/") {
		t.Fatalf("private = %d %s, %v", w.Code, w.Header().Get("Location"), err)
	}
	q := to.Query()
	if until, ok := signedurl.Verify("secret", 8080, q.Get(signedurl.QueryExpires), q.Get(signedurl.QuerySignature)); !ok || until.After(time.Now().Add(openFor)) {
		t.Errorf("the signature of %s is valid: %t, until %s", to, ok, until)
	}
	for name, tt := range map[string]struct {
		w    *httptest.ResponseRecorder
		want int
	}{
		"another namespace's": {open("foreign", "8080", own), 404},
		"without a session":   {open("private", "8080"), 401},
		"a sandbox's page":    {open("private", "8080", own, with("Sec-Fetch-Site", "same-site")), 403},
		"no number":           {open("private", "x", own), 400},
		"zero":                {open("private", "0", own), 400},
		"the agent's":         {open("private", strconv.Itoa(envd.Port), own), 400},
	} {
		if tt.w.Code != tt.want || tt.w.Header().Get("Location") != "" {
			t.Errorf("%s = %d %s, want %d", name, tt.w.Code, tt.w.Body, tt.want)
		}
	}
	want := []auditlog.Entry{{
		By: auditlog.ByKey, Name: "key-of-team", Namespace: "team", Action: "open port", Request: "GET /ui/api/sandboxes/{id}/ports/{port}",
		Object: "8080", Sandbox: string(sandbox.IDOf("private")), Address: "192.0.2.1", Status: http.StatusSeeOther, Result: "ok",
	}}
	if got := recorded(); !reflect.DeepEqual(got, want) {
		t.Errorf("the audit log has\n%+v, want\n%+v", got, want)
	}
}

// withAudit gives a server an audit log. The function that it returns ends the log, and returns what it has besides sign-ins, without the time.
func withAudit(t *testing.T, s *Server) func() []auditlog.Entry {
	t.Helper()
	path := filepath.Join(t.TempDir(), "audit.log")
	log, err := auditlog.Open(auditlog.Config{Path: path, Log: s.Log})
	if err != nil {
		t.Fatal(err)
	}
	s.cfg.Audit = log
	return func() (all []auditlog.Entry) {
		ended, end := context.WithCancel(t.Context())
		end()
		if err := log.Run(ended); err != nil { // writes what waits
			t.Fatal(err)
		}
		err := auditlog.Read(t.Context(), path, auditlog.Filter{}, false, func(e auditlog.Entry) error {
			if e.Action != actionSignIn {
				e.Time = time.Time{}
				all = append(all, e)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
}

func TestPageHeaders(t *testing.T) {
	s, _ := newTestServer(t)
	first, second := call(s, http.MethodGet, "/ui/", ""), call(s, http.MethodGet, "/ui/sandboxes/x/terminal", "")
	policy := first.Header().Get("Content-Security-Policy")
	if policy == second.Header().Get("Content-Security-Policy") {
		t.Error("the nonce is the same for two pages")
	}
	for _, want := range []string{"default-src 'self'", "script-src 'self';", "frame-ancestors 'none'", "base-uri 'none'"} {
		if !strings.Contains(policy, want) {
			t.Errorf("the policy %q lacks %q", policy, want)
		}
	}
	if strings.Contains(policy, "unsafe") || strings.Contains(first.Body.String(), "NONCE") || first.Header().Get("X-Frame-Options") != "DENY" {
		t.Errorf("%q, %v", policy, first.Header())
	}
	if w := call(s, http.MethodGet, "/ui/api/nothing", "", cookie(signedIn(t, s, "good"))); w.Code != http.StatusNotFound {
		t.Errorf("an unknown route = %d", w.Code)
	}
}

// TestAssets keeps the page within its budget, and free of scripts in its markup.
func TestAssets(t *testing.T) {
	s, _ := newTestServer(t)
	total := 0
	for name, a := range s.assets {
		w := call(s, http.MethodGet, "/ui/assets/"+name, "", with("Accept-Encoding", "gzip"))
		body := io.Reader(w.Body)
		if !strings.HasSuffix(name, ".txt") {
			total += w.Body.Len()
		}
		if w.Header().Get("Content-Encoding") == "gzip" {
			packed, err := gzip.NewReader(body)
			if err != nil {
				t.Fatal(err)
			}
			body = packed
		}
		if text, err := io.ReadAll(body); err != nil || string(text) != string(a.Text()) || a.Kind() == "" {
			t.Errorf("%s: %d bytes of %d, %v, of type %q", name, len(text), len(a.Text()), err, a.Kind())
		}
		if w := call(s, http.MethodGet, "/ui/assets/"+name, "", with("If-None-Match", w.Header().Get("ETag"))); w.Code != http.StatusNotModified {
			t.Errorf("%s again = %d", name, w.Code)
		}
	}
	t.Logf("%d files, %d bytes with gzip", len(s.assets), total)
	if total > 300_000 {
		t.Errorf("the page has %d bytes, want at most 300,000", total)
	}
	if w := call(s, http.MethodGet, "/ui/assets/../dashboard.go", ""); w.Code == http.StatusOK {
		t.Error("a file beside the page's was sent")
	}
}

// TestFollowLogOfPods: where agents lack the output of programs, the log is not theirs.
func TestFollowLogOfPods(t *testing.T) {
	s, f := newTestServer(t)
	o := box("team", "s", true)
	f.boxes = append(f.boxes, o)
	s.cfg.FollowLog = func(_ context.Context, o *agents.Sandbox, container, source string, each func(envd.LogLine) error) error {
		return each(envd.LogLine{Line: string(o.UID) + " " + container + " " + source})
	}
	for query, want := range map[string]string{"": "s  entrypoint", "?source=all": "s  ", "?source=agent&container=web": "s web agent"} {
		w := call(s, http.MethodGet, "/ui/api/sandboxes/"+string(sandbox.IDOf(o.UID))+"/log"+query, "", cookie(signedIn(t, s, "good")))
		if !strings.Contains(w.Body.String(), `"line":"`+want+`"`) {
			t.Errorf("%q: %d %s", query, w.Code, w.Body)
		}
	}
}
