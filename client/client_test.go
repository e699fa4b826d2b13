package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const key = "e2b_0123"

// fake is a server of the API with n sandboxes, which pages as the real one.
type fake struct {
	n      int
	filter map[string]string
	states string
	calls  []string
	bodies []map[string]any
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.calls = append(f.calls, r.Method+" "+r.URL.Path)
	if r.Header.Get("X-API-Key") != key {
		refuse(w, http.StatusUnauthorized, "Invalid API key")
		return
	}
	var body map[string]any
	_ = json.NewDecoder(r.Body).Decode(&body)
	f.bodies = append(f.bodies, body)
	switch r.Method + " " + r.URL.Path {
	case "GET /v2/sandboxes":
		f.list(w, r)
	case "POST /v2/sandboxes":
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, `{"sandboxID":"i1","templateID":"base","clientID":"c","envdVersion":"0.6.13","envdAccessToken":"t","trafficAccessToken":null,"domain":null}`)
	case "GET /sandboxes/i1":
		fmt.Fprint(w, `{"sandboxID":"i1","state":"paused","domain":null,"startedAt":"2026-01-02T03:04:05Z","lifecycle":{"autoResume":false,"onTimeout":"kill"}}`)
	case "POST /sandboxes/i1/pause", "DELETE /sandboxes/i1":
		w.WriteHeader(http.StatusNoContent)
	case "GET /v2/sandboxes/i1/logs":
		fmt.Fprintf(w, `{"logs":[{"timestamp":"2026-01-02T03:04:06Z","message":"b"},{"timestamp":"2026-01-02T03:04:05Z","message":"a%s"}]}`, r.URL.Query().Get("cursor"))
	case "DELETE /sandboxes/i9":
		http.Error(w, "<html>", http.StatusBadGateway)
	default:
		refuse(w, http.StatusNotFound, "no such sandbox")
	}
}

func (f *fake) list(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	f.states = q.Get("state")
	f.filter = map[string]string{}
	pairs, _ := url.ParseQuery(q.Get("metadata"))
	for k, v := range pairs { // the second decoding
		k, _ = url.QueryUnescape(k)
		f.filter[k], _ = url.QueryUnescape(v[0])
	}
	from, _ := strconv.Atoi(q.Get("nextToken"))
	limit, _ := strconv.Atoi(q.Get("limit"))
	to := min(f.n, from+limit)
	page := []SandboxInfo{}
	for i := from; i < to; i++ {
		page = append(page, SandboxInfo{SandboxID: strconv.Itoa(i)})
	}
	if to < f.n {
		w.Header().Set("X-Next-Token", strconv.Itoa(to))
	}
	_ = json.NewEncoder(w).Encode(page)
}

func refuse(w http.ResponseWriter, code int, message string) {
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"code":%d,"message":%q}`, code, message)
}

func testClient(t *testing.T, f http.Handler, apiKey string) *Client {
	t.Helper()
	srv := httptest.NewServer(f)
	t.Cleanup(srv.Close)
	c, err := New(Config{URL: srv.URL + "/", Key: apiKey, HTTP: srv.Client()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestListReadsAllPages(t *testing.T) {
	f := &fake{n: 250}
	c := testClient(t, f, key)
	for limit, want := range map[int]int{0: 250, 1: 1, 120: 120, 100: 100, 300: 250} {
		got, err := c.List(t.Context(), ListOptions{Limit: limit})
		if err != nil || len(got) != want {
			t.Errorf("limit %d: %d sandboxes, %v; want %d", limit, len(got), err, want)
		}
	}
	want := map[string]string{"a b": "c&d=e", "ü": "100%"}
	if _, err := c.List(t.Context(), ListOptions{Metadata: want, States: []string{StateRunning, StatePaused}}); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(f.filter) != fmt.Sprint(want) || f.states != "running,paused" {
		t.Errorf("filter %v, states %s", f.filter, f.states)
	}
}

func TestEndlessPages(t *testing.T) {
	c := testClient(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Next-Token", "same")
		fmt.Fprint(w, `[]`)
	}), key)
	if _, err := c.List(t.Context(), ListOptions{}); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("got %v", err)
	}
}

// TestLists: a page that is no list, or a broken one, is the server's fault; null is a list without items.
func TestLists(t *testing.T) {
	for body, want := range map[string]int{`null`: 0, ` [ ] `: 0, `[{"sandboxID":"1"},{"sandboxID":"2"}]`: 2, `{"sandboxID":"1"}`: -1, `[{"sandboxID":"1"}`: -1, `[{"sandboxID":1}]`: -1, `[{},]`: -1, ``: -1} {
		c := testClient(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) }), key)
		got, err := c.List(t.Context(), ListOptions{})
		if want < 0 && !errors.Is(err, errs.ErrUnavailable) || want >= 0 && (err != nil || len(got) != want || got == nil) {
			t.Errorf("%q: %+v, %v", body, got, err)
		}
	}
}

func TestCalls(t *testing.T) {
	f := &fake{}
	c := testClient(t, f, key)
	s, err := c.Create(t.Context(), CreateOptions{TemplateID: "base", Timeout: time.Minute, EnvVars: map[string]string{"A": "b"}})
	if err != nil || s.SandboxID != "i1" || s.AgentToken != "t" || s.Domain != "" {
		t.Errorf("create %+v, %v", s, err)
	}
	if f.bodies[0]["timeout"] != 60.0 || f.bodies[0]["templateID"] != "base" {
		t.Errorf("body %v", f.bodies[0])
	}
	if err := errors.Join(c.Pause(t.Context(), "i1", PauseOptions{}), c.Kill(t.Context(), "i1")); err != nil {
		t.Error(err)
	}
	want := []string{"POST /v2/sandboxes", "POST /sandboxes/i1/pause", "DELETE /sandboxes/i1"}
	if !slices.Equal(f.calls, want) {
		t.Errorf("calls %v", f.calls)
	}
}

func TestAnswers(t *testing.T) {
	c := testClient(t, &fake{}, key)
	d, err := c.Get(t.Context(), "i1")
	if err != nil || d.State != StatePaused || d.StartedAt.IsZero() || d.Lifecycle.OnTimeout != "kill" {
		t.Errorf("get %+v, %v", d, err)
	}
	logs, err := c.Logs(t.Context(), "i1", LogOptions{Since: time.UnixMilli(42)})
	if err != nil || len(logs) != 2 || logs[0].Message != "a42" {
		t.Errorf("logs %+v, %v; want them sorted", logs, err)
	}
}

func TestErrors(t *testing.T) {
	c := testClient(t, &fake{}, key)
	for name, want := range map[string]struct {
		err  error
		kind error
		text string
	}{
		"unknown":   {c.Kill(t.Context(), "i2"), errs.ErrNotFound, "no such sandbox"},
		"no JSON":   {c.Kill(t.Context(), "i9"), errs.ErrUnavailable, "the API responded 502 Bad Gateway"},
		"wrong key": {testClient(t, &fake{}, "x").Kill(t.Context(), "i1"), errs.ErrUnauthenticated, "Invalid API key"},
	} {
		if !errors.Is(want.err, want.kind) || want.err.Error() != want.text {
			t.Errorf("%s: %v, want %s", name, want.err, want.text)
		}
	}
	dead := testClient(t, &fake{}, key)
	dead.api.URL = "http://127.0.0.1:1"
	if err := dead.Kill(t.Context(), "i1"); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("no listener: %v", err)
	}
	for _, bad := range []string{"127.0.0.1:80", "ftp://a"} {
		if _, err := New(Config{URL: bad, HTTP: http.DefaultClient}); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("URL %q: %v", bad, err)
		}
	}
}

// TestForkEach reads a line for each fork, the whole answer of a server that has no lines, and what is known
// of an answer that is cut short.
func TestForkEach(t *testing.T) {
	const one, two = `{"index":1,"sandbox":{"sandboxID":"i2"}}`, `{"index":0,"error":{"code":429,"message":"no room"}}`
	for name, tt := range map[string]struct {
		media, body string
		want        string
		kind        error
	}{
		"lines":     {"application/x-ndjson", one + "\n" + two + "\n", "1:i2 0:no room ", nil},
		"with more": {"application/x-ndjson; charset=utf-8", one + "\n" + two + "\n", "1:i2 0:no room ", nil},
		"at once":   {"application/json", `[{"error":{"code":429,"message":"no room"}},{"sandbox":{"sandboxID":"i2"}}]`, "0:no room 1:i2 ", nil},
		"cut short": {"application/x-ndjson", one + "\n", "1:i2 ", errs.ErrUnavailable},
		"half":      {"application/x-ndjson", one + "\n" + two[:9], "1:i2 ", errs.ErrUnavailable},
		"nothing":   {"application/x-ndjson", "", "", errs.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			c := testClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method != http.MethodPost || r.URL.String() != "/sandboxes/i1/fork?stream=true" {
					t.Errorf("%s %s", r.Method, r.URL)
				}
				w.Header().Set("Content-Type", tt.media)
				w.WriteHeader(http.StatusCreated)
				fmt.Fprint(w, tt.body)
			}), key)
			got := ""
			err := c.ForkEach(t.Context(), "i1", ForkOptions{Count: 2}, func(place int, f Forked) {
				what := "nothing"
				if f.Sandbox != nil {
					what = f.Sandbox.SandboxID
				} else if f.Error != nil {
					what = f.Error.Message
				}
				got += fmt.Sprintf("%d:%s ", place, what)
			})
			if got != tt.want || (err == nil) != (tt.kind == nil) || !errors.Is(err, tt.kind) {
				t.Errorf("told %q, %v; want %q, %v", got, err, tt.want, tt.kind)
			}
		})
	}
}

func TestSandboxAddress(t *testing.T) {
	const id = "iaaa0000000000000001"
	for url, want := range map[string]string{
		"http://127.0.0.1:7700":     "http://127.0.0.1:7700",
		"http://[::1]:7700":         "http://[::1]:7700",
		"http://localhost:7700":     "http://localhost:7700",
		"https://api.sbx.test":      "https://80-" + id + ".sbx.test",
		"https://api.sbx.test:8443": "https://80-" + id + ".sbx.test:8443",
	} {
		c, err := New(Config{URL: url, Key: key})
		if err != nil {
			t.Fatal(err)
		}
		base, h := c.SandboxAddress(id, 80)
		if base != want || h.Get("E2b-Sandbox-Id") != id || h.Get("E2b-Sandbox-Port") != "80" {
			t.Errorf("%s: %s %v, want %s", url, base, h, want)
		}
	}
	c, err := New(Config{URL: "http://a", Key: key, SandboxURL: "https://b"})
	if err != nil {
		t.Fatal(err)
	}
	if base, _ := c.SandboxAddress(id, 80); base != "https://b" {
		t.Errorf("set: %s", base)
	}
}

// TestEnvironment never sends the key of one server to another.
func TestEnvironment(t *testing.T) {
	for name, tt := range map[string]struct {
		give Config
		env  map[string]string
		want Config
	}{
		"nothing":       {},
		"barchan":       {env: map[string]string{EnvAPIURL: "http://a", EnvAPIKey: "k", EnvE2BAPIURL: "http://b", EnvE2BAPIKey: "e"}, want: Config{URL: "http://a", Key: "k"}},
		"no key for it": {env: map[string]string{EnvAPIURL: "http://a", EnvE2BAPIKey: "e"}, want: Config{URL: "http://a"}},
		"e2b":           {env: map[string]string{EnvE2BAPIURL: "http://b", EnvE2BAPIKey: "e", EnvE2BSandboxURL: "http://s"}, want: Config{URL: "http://b", Key: "e", SandboxURL: "http://s"}},
		"domain":        {env: map[string]string{EnvE2BDomain: "d:1", EnvE2BAPIKey: "e"}, want: Config{URL: "https://api.d:1", Domain: "d:1", Key: "e"}},
		"given":         {give: Config{URL: "http://g"}, env: map[string]string{EnvE2BAPIURL: "http://b", EnvE2BAPIKey: "e", EnvSandboxURL: "http://s"}, want: Config{URL: "http://g"}},
	} {
		if tt.give.fill(func(name string) string { return tt.env[name] }); tt.give != tt.want {
			t.Errorf("%s: %+v, want %+v", name, tt.give, tt.want)
		}
	}
}

// TestRetries sends a request again if the server says when, and only then.
func TestRetries(t *testing.T) {
	for name, tt := range map[string]struct {
		after string
		fail  int
		calls int
		kind  error
	}{
		"soon":    {"0", 2, 3, nil},
		"never":   {"", 9, 1, errs.ErrExhausted},
		"a date":  {"Tue, 24 Nov 2026 20:00:00 GMT", 9, 1, errs.ErrExhausted},
		"too far": {"86400", 9, 1, errs.ErrExhausted},
		"always":  {"0", 9, 4, errs.ErrExhausted},
	} {
		calls := 0
		c := testClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if b, _ := io.ReadAll(r.Body); string(b) != `{"timeout":60}` {
				t.Errorf("body %s", b)
			}
			if calls++; calls <= tt.fail {
				w.Header().Set("Retry-After", tt.after)
				refuse(w, http.StatusTooManyRequests, "slowly")
			}
		}), key)
		if err := c.SetTimeout(t.Context(), "i1", time.Minute); !errors.Is(err, tt.kind) || calls != tt.calls {
			t.Errorf("%s: %d calls, %v", name, calls, err)
		}
	}
}

// TestPagesAhead: the next page is requested while the one before is read, so that server and client work at once.
func TestPagesAhead(t *testing.T) {
	second := make(chan struct{})
	c := testClient(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("nextToken") != "" {
			close(second)
			fmt.Fprint(w, `[{"sandboxID":"2"}]`)
			return
		}
		w.Header().Set("X-Next-Token", "two")
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush() //nolint:forcetypeassert // as the server makes it
		select {
		case <-second:
			fmt.Fprint(w, `[{"sandboxID":"1"}]`)
		case <-time.After(eventually.Patience):
		}
	}), key)
	got, err := c.List(t.Context(), ListOptions{})
	if err != nil || len(got) != 2 || got[0].SandboxID != "1" || got[1].SandboxID != "2" {
		t.Errorf("got %+v, %v; want 1 and 2", got, err)
	}
}
