package e2b

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

const team, otherTeam = "team-a", "team-b"

type fakeWitness struct{}

func (fakeWitness) Stats(context.Context, *agents.Sandbox) (envd.Metrics, error) {
	return envd.Metrics{Timestamp: time.Now().Unix(), CPUCount: 2, CPUUsedPct: 1.5, MemTotal: 1 << 30, MemUsed: 1 << 20}, nil
}

func (f fakeWitness) StatsHistory(ctx context.Context, s *agents.Sandbox, _ time.Time) ([]envd.Metrics, error) {
	now, err := f.Stats(ctx, s)
	return []envd.Metrics{now}, err
}

func (fakeWitness) Logs(context.Context, *agents.Sandbox, string, time.Time) ([]envd.LogLine, error) {
	at := time.Unix(1700000000, 0)
	return []envd.LogLine{
		{Timestamp: at, Source: envd.SourceEntrypoint, Stream: envd.StreamStdout, Line: "hello"},
		{Timestamp: at.Add(time.Second), Source: envd.SourceEntrypoint, Stream: envd.StreamStderr, Line: "oops"},
		{Timestamp: at.Add(2 * time.Second), Source: envd.SourceAgent, Stream: envd.StreamStderr, Line: "time=x level=INFO msg=y", Level: "INFO"},
		{Timestamp: at.Add(3 * time.Second), Source: envd.SourceAgent, Stream: envd.StreamStderr, Line: "time=x level=WARN msg=z", Level: "WARN"},
	}, nil
}

// silentAgents accept every call.
type silentAgents struct{}

func (silentAgents) Bind(context.Context, *agents.Sandbox, envd.InitRequest) error { return nil }
func (silentAgents) Wake(context.Context, *agents.Sandbox)                         {}

type fixture struct {
	*httptest.Server
	t          *testing.T
	cluster    *fakecluster.Cluster
	routes     *route.Table
	manager    *manager.Manager
	key, other string
}

func newFixture(t *testing.T, change ...func(*Config)) *fixture {
	t.Helper()
	return newFixtureOf(t, func(*manager.Config) {}, change...)
}

func newFixtureOf(t *testing.T, managed func(*manager.Config), change ...func(*Config)) *fixture {
	t.Helper()
	f := &fixture{t: t, routes: route.NewTable(), cluster: fakecluster.New(
		t,
		fakecluster.Template(templates.PublicNamespace, "base", "base", fakecluster.Public()),
		fakecluster.Template(team, "broken", fakecluster.ImageBroken),
	)}
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	metrics := prometheus.NewPedanticRegistry()
	members, err := picker.New(picker.Config{Writer: f.cluster, Metrics: metrics})
	if err != nil {
		t.Fatal(err)
	}
	quotas, err := quota.New(quota.Config{Reader: f.cluster, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	f.cluster.Watch(func(older, newer *agents.Sandbox) {
		members.Observe(older, newer)
		quotas.Observe(older, newer)
	})
	mc := manager.Config{
		Objects: f.cluster, Cache: f.cluster, Routes: f.routes, Agents: fakeWitness{}, Tokens: tokens, Log: telemetry.Discard(), Metrics: metrics,
		Picker: members, Quota: quotas, Binder: silentAgents{}, Assumed: assumecache.New(f.cluster.Sandbox),
	}
	managed(&mc)
	f.manager, err = manager.New(mc)
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Manager: f.manager, Log: telemetry.Discard(), Metrics: metrics, MaxBody: 10_000}
	for _, c := range change {
		c(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	f.Server = httptest.NewServer(s)
	t.Cleanup(f.Close)
	for ns, key := range map[string]*string{team: &f.key, otherTeam: &f.other} {
		if _, *key, err = f.manager.Keys.Create(t.Context(), apikeys.Identity{Namespace: ns}, apikeys.New{Description: "test"}); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// do sends a request with the team's key and returns status, body and headers.
func (f *fixture) do(method, path, body string, header ...string) (int, string, http.Header) {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, f.URL+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("X-API-Key", f.key)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := f.Client().Do(req)
	if err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		f.t.Fatal(err)
	}
	return res.StatusCode, string(b), res.Header
}

// want fails unless the status is as wanted, and decodes the body on request.
func (f *fixture) want(status int, into any, method, path, body string, header ...string) http.Header {
	f.t.Helper()
	got, text, h := f.do(method, path, body, header...)
	if got != status {
		f.t.Fatalf("%s %s = %d %s, want %d", method, path, got, text, status)
	}
	if into != nil {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			f.t.Fatalf("%s %s: %v in %s", method, path, err, text)
		}
	}
	return h
}

func (f *fixture) create(body string) api.Sandbox {
	f.t.Helper()
	var s api.Sandbox
	f.want(http.StatusCreated, &s, "POST", "/v2/sandboxes", body)
	return s
}

func TestSandboxObjectHasTheFieldsThatClientsNeed(t *testing.T) {
	f := newFixture(t)
	got := map[string]any{}
	f.want(201, &got, "POST", "/v2/sandboxes", `{"templateID":"base","network":{"allowPublicTraffic":false},"metadata":{"a":"b"}}`)
	if want := []string{"alias", "clientID", "domain", "envdAccessToken", "envdVersion", "sandboxID", "templateID", "trafficAccessToken"}; !slices.Equal(slices.Sorted(maps.Keys(got)), want) {
		t.Errorf("keys are %v, want %v", slices.Sorted(maps.Keys(got)), want)
	}
	if got["domain"] != nil || got["trafficAccessToken"] == nil || got["envdVersion"] != envd.Version {
		t.Errorf("sandbox is %v", got)
	}
	insecure, before := map[string]any{}, time.Now()
	f.want(201, &insecure, "POST", "/sandboxes", `{"templateID":"base","secure":false}`)
	after := time.Now()
	if _, has := insecure["envdAccessToken"]; has || insecure["trafficAccessToken"] != nil {
		t.Errorf("v1 without security is %v", insecure)
	}
	var v1 api.SandboxDetail
	f.want(200, &v1, "GET", fmt.Sprint("/sandboxes/", insecure["sandboxID"]), "")
	if v1.EndAt.Before(before.Add(15*time.Second)) || v1.EndAt.After(after.Add(16*time.Second)) {
		t.Errorf("v1 was made from %s to %s and ends at %s, want 15 s later", before, after, v1.EndAt)
	}
	detail := map[string]any{}
	f.want(200, &detail, "GET", fmt.Sprint("/sandboxes/", got["sandboxID"]), "")
	want := []string{
		"alias", "clientID", "cpuCount", "createdByKey", "diskSizeMB", "domain", "endAt", "envdAccessToken", "envdVersion", "lifecycle",
		"memoryMB", "metadata", "name", "network", "sandboxID", "startedAt", "state", "templateID",
	}
	if !slices.Equal(slices.Sorted(maps.Keys(detail)), want) {
		t.Errorf("keys are %v, want %v", slices.Sorted(maps.Keys(detail)), want)
	}
}

func TestErrorsHaveOneShape(t *testing.T) {
	f := newFixture(t)
	id := f.create(`{"templateID":"base"}`).SandboxID
	f.want(201, nil, "POST", "/v2/sandboxes", `{"templateID":"base"}`, "Idempotency-Key", "used")
	gone := "i0000000000000000000"
	for name, give := range map[string]struct {
		method, path, body string
		header             []string
		status             int
		text               string
	}{
		"no key":             {"GET", "/v2/sandboxes", "", []string{"X-API-Key", ""}, 401, "an API key is required"},
		"wrong key":          {"GET", "/v2/sandboxes", "", []string{"X-API-Key", "e2b_00"}, 401, "unknown or revoked"},
		"wrong bearer":       {"GET", "/teams", "", []string{"X-API-Key", "", "Authorization", "Bearer e2b_00"}, 401, "unknown"},
		"malformed JSON":     {"POST", "/v2/sandboxes", `{"templateID":`, nil, 400, "the body is not JSON"},
		"trailing bytes":     {"POST", "/v2/sandboxes", `{"templateID":"base"} x`, nil, 400, "the body is not JSON"},
		"no body":            {"POST", "/v2/sandboxes", "", nil, 400, "needs a JSON body"},
		"JSON null":          {"POST", "/v2/sandboxes", "null", nil, 400, "templateID"},
		"a list":             {"POST", "/v2/sandboxes", "[]", nil, 400, "the body: must be an object"},
		"wrong type":         {"POST", "/v2/sandboxes", `{"templateID":"base","timeout":"soon"}`, nil, 400, "timeout: must be an integer, not string"},
		"fraction":           {"POST", "/v2/sandboxes", `{"templateID":"base","timeout":1.5}`, nil, 400, "timeout: must be an integer"},
		"oversized":          {"POST", "/v2/sandboxes", `{"templateID":"` + strings.Repeat("x", 10_000) + `"}`, nil, 413, "larger than 10000 bytes"},
		"unknown template":   {"POST", "/v2/sandboxes", `{"templateID":"nope"}`, nil, 404, "template 'nope' not found"},
		"bad template":       {"POST", "/v2/sandboxes", `{"templateID":"broken"}`, nil, 400, "the image cannot be used"},
		"zero timeout":       {"POST", "/v2/sandboxes", `{"templateID":"base","timeout":0}`, nil, 400, "Timeout must be greater than 0"},
		"huge timeout":       {"POST", "/v2/sandboxes", `{"templateID":"base","timeout":9223372036854775807}`, nil, 400, "Timeout cannot be greater than 24 hours"},
		"zero of v1":         {"POST", "/sandboxes", `{"templateID":"base","timeout":0}`, nil, 400, "Timeout must be greater than 0"},
		"huge to connect":    {"POST", "/sandboxes/" + id + "/connect", `{"timeout":90000}`, nil, 400, "Timeout cannot be greater than 24 hours"},
		"huge new timeout":   {"POST", "/sandboxes/" + id + "/timeout", `{"timeout":90000}`, nil, 400, "Timeout cannot be greater than 24 hours"},
		"empty key":          {"POST", "/v2/sandboxes", `{"templateID":"base"}`, []string{"Idempotency-Key", ""}, 400, "Idempotency-Key"},
		"long key":           {"POST", "/sandboxes", `{"templateID":"base"}`, []string{"Idempotency-Key", strings.Repeat("k", 256)}, 400, "Idempotency-Key: must have from 1 to 255"},
		"odd key":            {"POST", "/v2/sandboxes", `{"templateID":"base"}`, []string{"Idempotency-Key", "\xc3\xa9"}, 400, "Idempotency-Key"},
		"key used before":    {"POST", "/v2/sandboxes", `{"templateID":"base","timeout":7}`, []string{"Idempotency-Key", "used"}, 422, "Idempotency-Key: was used for a different request"},
		"malformed, v1":      {"POST", "/sandboxes", `{]`, nil, 400, "the body is not JSON"},
		"malformed timeout":  {"POST", "/sandboxes/" + id + "/timeout", `{"timeout":`, nil, 400, "the body is not JSON"},
		"oversized, v1":      {"POST", "/sandboxes", `{"metadata":{"a":"` + strings.Repeat("x", 10_000) + `"}}`, nil, 413, "larger than 10000 bytes"},
		"bad variable":       {"POST", "/v2/sandboxes", `{"templateID":"base","envVars":{"A=B":"x"}}`, nil, 400, "envVars"},
		"foreign: get":       {"GET", "/sandboxes/" + id, "", []string{"X-API-Key", f.other}, 404, "doesn't exist or you don't have access to it"},
		"foreign: connect":   {"POST", "/v2/sandboxes/" + id + "/connect", "{}", []string{"X-API-Key", f.other}, 404, "doesn't exist"},
		"foreign: pause":     {"POST", "/sandboxes/" + id + "/pause", "", []string{"X-API-Key", f.other}, 404, "doesn't exist"},
		"foreign: timeout":   {"POST", "/sandboxes/" + id + "/timeout", `{"timeout":9}`, []string{"X-API-Key", f.other}, 404, "doesn't exist"},
		"foreign: logs":      {"GET", "/sandboxes/" + id + "/logs", "", []string{"X-API-Key", f.other}, 404, "doesn't exist"},
		"negative timeout":   {"POST", "/v2/sandboxes", `{"templateID":"base","timeout":-9223372036854775807}`, nil, 400, "Timeout must be greater than 0"},
		"volumes":            {"POST", "/v2/sandboxes", `{"templateID":"base","volumeMounts":[{"name":"a","path":"/a"}]}`, nil, 400, "volumeMounts"},
		"rules":              {"PUT", "/sandboxes/" + id + "/network", `{"rules":{"a.com":[{}]}}`, nil, 400, "rules"},
		"proxy":              {"PUT", "/sandboxes/" + id + "/network", `{"egressProxy":{"address":"a:1"}}`, nil, 400, "egressProxy"},
		"bad network":        {"PUT", "/sandboxes/" + id + "/network", `{"denyOut":["nonsense!"]}`, nil, 400, "network.denyOut[0]"},
		"dead sandbox":       {"GET", "/sandboxes/" + gone, "", nil, 404, `Sandbox "` + gone + `" doesn't exist or you don't have access to it`},
		"no ID at all":       {"GET", "/sandboxes/..%2f..%2fetc", "", nil, 404, "doesn't exist"},
		"foreign sandbox":    {"DELETE", "/sandboxes/" + id, "", []string{"X-API-Key", f.other}, 404, "doesn't exist or you don't have access to it"},
		"v1 connect bare":    {"POST", "/sandboxes/" + id + "/connect", `{}`, nil, 400, "timeout: is required"},
		"limit":              {"GET", "/v2/sandboxes?limit=0", "", nil, 400, "limit"},
		"limit as a word":    {"GET", "/v2/sandboxes?limit=many", "", nil, 400, "limit"},
		"state":              {"GET", "/v2/sandboxes?state=running,asleep", "", nil, 400, "state"},
		"order":              {"GET", "/v2/sandboxes?order=up", "", nil, 400, "order"},
		"startedAfter":       {"GET", "/v2/sandboxes?startedAfter=yesterday", "", nil, 400, "startedAfter"},
		"cursor":             {"GET", "/v2/sandboxes?nextToken=abc", "", nil, 400, "nextToken"},
		"metadata":           {"GET", "/v2/sandboxes?metadata=a%3D%25zz", "", nil, 400, "metadata"},
		"metrics of none":    {"GET", "/sandboxes/metrics", "", nil, 400, "sandbox_ids: is required"},
		"direction":          {"GET", "/v2/sandboxes/" + id + "/logs?direction=up", "", nil, 400, "direction"},
		"already running":    {"POST", "/sandboxes/" + id + "/resume", "{}", nil, 409, "already running"},
		"unknown route":      {"GET", "/nowhere", "", nil, 404, "no such route: GET /nowhere"},
		"root":               {"GET", "/", "", nil, 404, "no such route"},
		"method":             {"PATCH", "/v2/sandboxes", "{}", nil, 405, "PATCH is not allowed here; allowed: GET, HEAD, POST"},
		"snapshot's name":    {"POST", "/sandboxes/" + id + "/snapshots", `{"name":"A B"}`, nil, 400, `name: "A B"`},
		"snapshot's ttl":     {"POST", "/sandboxes/" + id + "/snapshots", `{"ttl":0}`, nil, 400, "ttl: must be 1 or more"},
		"snapshot's form":    {"POST", "/sandboxes/" + id + "/snapshots", `{"memory":"no"}`, nil, 400, "memory: must be true or false"},
		"snapshot of none":   {"POST", "/sandboxes/i0000000000000000000/snapshots", "", nil, 404, "doesn't exist"},
		"snapshots' limit":   {"GET", "/snapshots?limit=0", "", nil, 400, "limit"},
		"snapshots' source":  {"GET", "/snapshots?sandboxID=x", "", nil, 400, "sandboxID"},
		"no forks":           {"POST", "/sandboxes/" + id + "/fork", `{"count":0}`, nil, 400, "count: must be from 1 to 100"},
		"many forks":         {"POST", "/sandboxes/" + id + "/fork", `{"count":101}`, nil, 400, "count: must be from 1 to 100"},
		"fork of none":       {"POST", "/sandboxes/i0000000000000000000/fork", "", nil, 404, "doesn't exist"},
		"builds":             {"POST", "/v3/templates", "{}", nil, 501, "template builds: not available"},
		"deleting templates": {"DELETE", "/templates/base", "", nil, 403, "its operator changes and deletes it"},
		"deleting no other":  {"DELETE", "/templates/nope", "", nil, 404, "template 'nope' not found"},
		"publishing":         {"PATCH", "/v2/templates/base", `{"public":false}`, nil, 403, "public: the operator decides"},
		"deleting nothing":   {"DELETE", "/templates/a%2Fb%3Adefault", "", nil, 404, "snapshot 'a/b:default' not found"},
		"volume":             {"GET", "/volumes/x", "", nil, 501, "volumes: not available"},
		"alias":              {"GET", "/templates/aliases/nope", "", nil, 404, "template 'nope' not found"},
		"unknown key":        {"DELETE", "/api-keys/nope", "", nil, 404, "nope"},
		"nameless key":       {"POST", "/api-keys", `{"name":""}`, nil, 400, "name"},
	} {
		t.Run(name, func(t *testing.T) {
			status, text, h := f.do(give.method, give.path, give.body, give.header...)
			var body api.Error
			if err := json.Unmarshal([]byte(text), &body); err != nil || status != give.status || int(body.Code) != status || !strings.Contains(body.Message, give.text) {
				t.Errorf("%s %s = %d %s (%v), want %d and %q", give.method, give.path, status, text, err, give.status, give.text)
			}
			if h.Get("Content-Type") != "application/json" {
				t.Errorf("content type %q", h.Get("Content-Type"))
			}
			if strings.Contains(text, f.key) || strings.Contains(text, "wait for") {
				t.Errorf("the response has too much: %s", text)
			}
		})
	}
}

func TestIdempotencyOverTheWire(t *testing.T) {
	f := newFixture(t)
	var first, again api.Sandbox
	f.want(201, &first, "POST", "/v2/sandboxes", `{"templateID":"base","metadata":{"a":"1","b":"2"}}`, "Idempotency-Key", "a key, 1")
	f.want(201, &again, "POST", "/v2/sandboxes", `{"metadata":{"b":"2","a":"1"}, "templateID":"base"}`, "Idempotency-Key", "a key, 1")
	if first.SandboxID != again.SandboxID || *first.EnvdAccessToken != *again.EnvdAccessToken {
		t.Errorf("%+v, and again %+v", first, again)
	}
	f.want(422, nil, "POST", "/sandboxes", `{"templateID":"base","metadata":{"a":"1","b":"2"}}`, "Idempotency-Key", "a key, 1")
	f.want(201, &again, "POST", "/v2/sandboxes", `{"templateID":"base","metadata":{"a":"1","b":"2"}}`, "Idempotency-Key", "a key, 1", "X-API-Key", f.other)
	if first.SandboxID == again.SandboxID {
		t.Error("another team got the sandbox")
	}
	req, err := http.NewRequestWithContext(t.Context(), "POST", f.URL+"/v2/sandboxes", strings.NewReader(`{"templateID":"base"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header = http.Header{"X-Api-Key": {f.key}, "Idempotency-Key": {"a", "b"}}
	res, err := f.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != 400 {
		t.Errorf("two keys: %d", res.StatusCode)
	}
	var page []api.ListedSandbox
	if f.want(200, &page, "GET", "/v2/sandboxes", ""); len(page) != 1 {
		t.Errorf("%d sandboxes, want 1", len(page))
	}
}

func TestQuotaOverTheWire(t *testing.T) {
	f := newFixture(t)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: team, Annotations: map[string]string{quota.AnnotationSandboxes: "1"}}}
	if err := f.cluster.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	s := f.create(`{"templateID":"base"}`)
	status, text, _ := f.do("POST", "/v2/sandboxes", `{"templateID":"base"}`)
	if status != 429 || !strings.Contains(text, "quota of the namespace: at most 1 sandboxes; 1 are running") {
		t.Errorf("beyond the quota: %d %s", status, text)
	}
	f.want(204, nil, "DELETE", "/sandboxes/"+s.SandboxID, "")
	f.create(`{"templateID":"base"}`)
}

func TestUnclaimedMembersOverTheWire(t *testing.T) {
	f := newFixture(t)
	if err := f.cluster.Create(t.Context(), fakecluster.Pool(team, "base", templates.PublicNamespace, "base")); err != nil {
		t.Fatal(err)
	}
	member := f.cluster.Fill(t, team, "base", 1)[0]
	id := string(sandbox.IDOf(member.UID))
	for _, ask := range [][2]string{
		{"GET", ""},
		{"DELETE", ""},
		{"GET", "/metrics"},
		{"GET", "/logs"},
		{"POST", "/pause"},
		{"POST", "/resume"},
		{"POST", "/connect"},
		{"POST", "/timeout"},
		{"POST", "/refreshes"},
		{"PUT", "/network"},
		{"POST", "/snapshots"},
		{"POST", "/fork"},
	} {
		body := ""
		if ask[0] != "GET" {
			body = `{"timeout":9}`
		}
		status, text, _ := f.do(ask[0], "/sandboxes/"+id+ask[1], body)
		unknown, same, _ := f.do(ask[0], "/sandboxes/i0000000000000000000"+ask[1], body)
		if status != 404 || unknown != 404 || strings.ReplaceAll(text, id, "i0000000000000000000") != same {
			t.Errorf("%s %s of a member = %d %s; of nothing = %d %s", ask[0], ask[1], status, text, unknown, same)
		}
	}
	if s := f.create(`{"templateID":"base"}`); s.SandboxID != id {
		t.Errorf("the claim got %s, want the member %s", s.SandboxID, id)
	}
	f.want(200, nil, "GET", "/sandboxes/"+id, "")
}

func TestLifecycleOverTheWire(t *testing.T) {
	f := newFixture(t)
	s := f.create(`{"templateID":"base","autoPause":true,"autoResume":{"enabled":true},"allow_internet_access":false}`)
	at := "/sandboxes/" + s.SandboxID
	var d api.SandboxDetail
	f.want(200, &d, "GET", at+"-client", "")
	if d.State != api.StateRunning || d.Lifecycle.OnTimeout != api.OnTimeoutPause || !d.Lifecycle.AutoResume || d.AllowInternetAccess == nil || *d.AllowInternetAccess {
		t.Errorf("detail is %+v", d)
	}
	f.want(204, nil, "POST", at+"/timeout", `{"timeout":600}`)
	f.want(204, nil, "POST", at+"/refreshes", "")
	f.want(204, nil, "PUT", at+"/network", `{"allowOut":["1.1.1.1"],"denyOut":["0.0.0.0/0"],"egressProxy":null}`)
	var again api.Sandbox
	f.want(200, &again, "POST", at+"/connect", `{"timeout":60}`)
	f.want(200, &again, "POST", "/v2"+at+"/connect", "", "Content-Type", "text/plain")
	if again.EnvdAccessToken == nil || *again.EnvdAccessToken != *s.EnvdAccessToken {
		t.Error("the token is another one after connecting")
	}
	f.want(204, nil, "POST", at+"/pause", "")
	f.want(409, nil, "POST", at+"/pause", "{}")
	f.want(200, &d, "GET", at, "")
	if d.State != api.StatePaused || !slices.Equal(d.Network.AllowOut, []string{"1.1.1.1"}) {
		t.Errorf("detail is %+v", d)
	}
	f.want(201, &again, "POST", "/v2"+at+"/connect", `{"timeout":60}`)
	f.want(204, nil, "POST", at+"/pause", "")
	f.want(201, &again, "POST", at+"/resume", "")

	f.want(204, nil, "DELETE", at, "")
	f.want(404, nil, "DELETE", at, "")
}

func TestMetricsAndLogsOverTheWire(t *testing.T) {
	f := newFixture(t)
	s := f.create(`{"templateID":"base"}`)
	at := "/sandboxes/" + s.SandboxID
	var samples []api.SandboxMetric
	f.want(200, &samples, "GET", at+"/metrics?start=1&end="+fmt.Sprint(time.Now().Unix()+5), "")
	if len(samples) != 1 || samples[0].MemTotal != 1<<30 {
		t.Errorf("metrics are %+v", samples)
	}
	var many api.SandboxesWithMetrics
	f.want(200, &many, "GET", "/sandboxes/metrics?sandbox_ids="+s.SandboxID+",nope", "")
	if len(many.Sandboxes) != 1 {
		t.Errorf("metrics are %+v", many)
	}
}

func TestLogsOverTheWire(t *testing.T) {
	f := newFixture(t)
	at := "/sandboxes/" + f.create(`{"templateID":"base"}`).SandboxID
	var logs api.SandboxLogs
	f.want(200, &logs, "GET", at+"/logs?start=1700000000500&limit=10", "")
	levels := []api.LogLevel{api.LevelError, api.LevelInfo, api.LevelWarn}
	if len(logs.Logs) != len(levels) || len(logs.LogEntries) != len(levels) {
		t.Fatalf("logs are %+v", logs)
	}
	for i, l := range logs.Logs { // as E2B's CLI reads them
		var line struct{ Level, Logger, Message string }
		if err := json.Unmarshal([]byte(l.Line), &line); err != nil || line.Level != string(levels[i]) || line.Logger == "" || line.Message != logs.LogEntries[i].Message {
			t.Errorf("line %q, %v; the entry is %+v", l.Line, err, logs.LogEntries[i])
		}
		if logs.LogEntries[i].Level != levels[i] {
			t.Errorf("entry %d has level %s, want %s", i, logs.LogEntries[i].Level, levels[i])
		}
	}
	for level, want := range map[string]string{"": "warn info error info", "debug": "warn info error info", "info": "warn info error info", "warn": "warn error", "error": "error"} {
		var logs2 api.SandboxLogsV2
		query := "?direction=backward"
		if level != "" {
			query += "&level=" + level
		}
		f.want(200, &logs2, "GET", "/v2"+at+"/logs"+query, "")
		var got []string
		for _, e := range logs2.Logs {
			got = append(got, string(e.Level))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("from level %q: %v, want %s", level, got, want)
		}
	}
}

func TestListOverTheWire(t *testing.T) {
	f := newFixture(t)
	const odd = "a & b=ü%2F+"
	for i := range 5 {
		body, err := json.Marshal(map[string]any{"templateID": "base", "metadata": map[string]string{odd: fmt.Sprint(i % 2), "k": odd}})
		if err != nil {
			t.Fatal(err)
		}
		f.create(string(body))
	}
	// The encoding of the SDKs: each key and value, then the form, then the query.
	form := url.Values{url.PathEscape(odd): {url.PathEscape("0")}, "k": {url.PathEscape(odd)}}.Encode()
	path := "/v2/sandboxes?limit=2&state=running,paused&metadata=" + url.QueryEscape(form)
	var page []api.ListedSandbox
	h := f.want(200, &page, "GET", path, "")
	if len(page) != 2 || h.Get("X-Total-Running") != "3" || h.Get("X-Next-Token") == "" {
		t.Fatalf("page is %+v with %v", page, h)
	}
	h = f.want(200, &page, "GET", path+"&nextToken="+url.QueryEscape(h.Get("X-Next-Token")), "")
	if _, has := h["X-Next-Token"]; len(page) != 1 || has {
		t.Errorf("last page is %+v with %v", page, h)
	}
	one := page[0]
	f.want(200, &page, "GET", "/v2/sandboxes?name="+request.Deref(one.Name), "")
	if request.Deref(one.Name) == "" || len(page) != 1 || page[0].SandboxID != one.SandboxID {
		t.Errorf("the sandbox of the name %q is %+v, want %s", request.Deref(one.Name), page, one.SandboxID)
	}
	f.want(200, &page, "GET", "/sandboxes", "")
	if len(page) != 5 {
		t.Errorf("v1 lists %d, want 5", len(page))
	}
	if _, text, _ := f.do("GET", "/v2/sandboxes", "", "X-API-Key", f.other); strings.TrimSpace(text) != "[]" {
		t.Errorf("another team's list is %s", text)
	}
}

func TestTemplatesTeamsAndKeys(t *testing.T) {
	f := newFixture(t)
	var list []api.Template
	f.want(200, &list, "GET", "/templates?teamID=x", "")
	f.want(200, &list, "GET", "/v2/templates?limit=1", "")
	if len(list) != 1 || list[0].BuildStatus != "ready" || len(list[0].Names) == 0 {
		t.Errorf("templates are %+v", list)
	}
	var one api.TemplateWithBuilds
	f.want(200, &one, "GET", "/templates/base", "")
	var alias api.GetTemplateAlias200JSONResponse
	f.want(200, &alias, "GET", "/templates/aliases/"+url.PathEscape(templates.PublicNamespace+"/base"), "")
	if len(one.Builds) != 1 || alias.TemplateID != one.TemplateID || !alias.Public {
		t.Errorf("template is %+v, alias %+v", one, alias)
	}
	var teams []api.Team
	f.want(200, &teams, "GET", "/teams", "", "X-API-Key", "", "Authorization", "bearer "+f.key)
	if len(teams) != 1 || teams[0].TeamID != team || !teams[0].IsDefault {
		t.Errorf("teams are %+v", teams)
	}
	var made api.CreatedAPIKey
	f.want(201, &made, "POST", "/api-keys", `{"name":"second"}`)
	f.want(200, &teams, "GET", "/teams", "", "X-API-Key", made.Key)
	var keys []api.APIKey
	_, text, _ := f.do("GET", "/api-keys", "")
	if err := json.Unmarshal([]byte(text), &keys); err != nil || len(keys) != 2 || strings.Contains(text, made.Key) {
		t.Errorf("keys are %s, %v", text, err)
	}
	f.want(204, nil, "DELETE", "/api-keys/"+made.ID, "")
	f.want(401, nil, "GET", "/teams", "", "X-API-Key", made.Key)
}

// TestSSHKeys adds, lists and removes the public keys of an API key.
func TestSSHKeys(t *testing.T) {
	f := newFixture(t)
	const line = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAUBDrX+0xLqPBfPRqKcHIpaWNEL3tT8FZ1HSq6eMTE6 me@home"
	var made api.SSHKey
	f.want(201, &made, "POST", "/ssh-keys", `{"publicKey":"`+line+`"}`)
	if !strings.HasPrefix(made.Fingerprint, "SHA256:") || made.Comment != "me@home" || made.PublicKey != line {
		t.Errorf("made %+v", made)
	}
	f.want(201, &made, "POST", "/ssh-keys", `{"publicKey":"`+strings.TrimSuffix(line, " me@home")+` other"}`)
	var list []api.SSHKey
	f.want(200, &list, "GET", "/ssh-keys", "")
	if len(list) != 1 || list[0].Comment != "other" {
		t.Errorf("a key that is added again: %+v", list)
	}
	var second api.CreatedAPIKey
	f.want(201, &second, "POST", "/api-keys", `{"name":"second"}`)
	f.want(200, &list, "GET", "/ssh-keys", "", "X-API-Key", second.Key)
	if len(list) != 0 {
		t.Errorf("another API key has %+v", list)
	}
	for body, want := range map[string]string{
		`{"publicKey":"ssh-ed25519 AAAA"}`:           "publicKey: must have a ssh-ed25519 key",
		`{"publicKey":"ssh-dss AAAA"}`:               "publicKey: must be a public key",
		`{"publicKey":"command=\"x\" ` + line + `"}`: "publicKey: must be a public key",
		`{}`: "publicKey",
	} {
		if status, text, _ := f.do("POST", "/ssh-keys", body); status != 400 || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s, want %q", body, status, text, want)
		}
	}
	f.want(404, nil, "GET", "/ssh", "")
	f.want(404, nil, "DELETE", "/ssh-keys?fingerprint=SHA256:none", "")
	f.want(204, nil, "DELETE", "/ssh-keys?fingerprint="+url.QueryEscape(made.Fingerprint), "")
	f.want(200, &list, "GET", "/ssh-keys", "")
	if len(list) != 0 {
		t.Errorf("a removed key is listed: %+v", list)
	}
}

// TestKeysOfAKeyThatEnds end with it.
func TestKeysOfAKeyThatEnds(t *testing.T) {
	f := newFixture(t)
	end := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	var maker, child api.CreatedAPIKey
	f.want(201, &maker, "POST", "/api-keys", `{"name":"maker","expiresAt":"`+end.Format(time.RFC3339)+`"}`)
	f.want(201, &child, "POST", "/api-keys", `{"name":"child"}`, "X-API-Key", maker.Key)
	if child.ExpiresAt == nil || !child.ExpiresAt.Equal(end) {
		t.Errorf("the child ends %v, its maker %s", child.ExpiresAt, end)
	}
	later := `{"name":"later","expiresAt":"` + end.Add(time.Minute).Format(time.RFC3339) + `"}`
	if status, text, _ := f.do("POST", "/api-keys", later, "X-API-Key", child.Key); status != 400 || !strings.Contains(text, "expiresAt: must not be later than") {
		t.Errorf("a later end: %d %s", status, text)
	}
}

func TestPreflightNeedsNoKey(t *testing.T) {
	f := newFixture(t)
	h := f.want(204, nil, "OPTIONS", "/v2/sandboxes", "", "X-API-Key", "", "Origin", "https://example.com")
	if h.Get("Access-Control-Allow-Origin") != "*" || !strings.Contains(h.Get("Access-Control-Expose-Headers"), "X-Next-Token") {
		t.Errorf("headers are %v", h)
	}
}

func TestDomainOfResponses(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.Domain = "sandboxes.example:7743" })
	if s := f.create(`{"templateID":"base"}`); s.Domain == nil || *s.Domain != "sandboxes.example:7743" {
		t.Errorf("domain is %v", s.Domain)
	}
}

// TestDomainOfTheRequest: an answer has the domain that the request came by.
func TestDomainOfTheRequest(t *testing.T) {
	f := newFixture(t, func(c *Config) {
		c.Domain, c.Domains = "sandboxes.example:7743", []string{"sandboxes.example", "second.example:8443"}
	})
	for _, give := range []struct {
		host string
		tls  bool
		want string
	}{
		{"127.0.0.1:7700", false, "sandboxes.example:7743"},
		{"api.sandboxes.example:9443", true, "sandboxes.example:9443"}, // a port that is forwarded
		{"API.Second.Example:8443", true, "second.example:8443"},
		{"api.second.example", false, "second.example"}, // a proxy has ended TLS
		{"api.second.example:7700", false, "sandboxes.example:7743"},
		{"api.other.example", true, "sandboxes.example:7743"},
		{"second.example:8443", true, "sandboxes.example:7743"},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "POST", "/v2/sandboxes", strings.NewReader(`{"templateID":"base"}`))
		r.Host = give.host
		r.Header.Set("X-API-Key", f.key)
		if give.tls {
			r.TLS = &tls.ConnectionState{}
		}
		w := httptest.NewRecorder()
		f.Config.Handler.ServeHTTP(w, r)
		var s api.Sandbox
		if err := json.Unmarshal(w.Body.Bytes(), &s); err != nil || s.Domain == nil || *s.Domain != give.want {
			t.Errorf("by %s (TLS %v): %s, %v; want %s", give.host, give.tls, w.Body, err, give.want)
		}
	}
	bare := newFixture(t)
	if s := bare.create(`{"templateID":"base"}`); s.Domain != nil {
		t.Errorf("without a domain: %q", *s.Domain)
	}
}

// TestSecureUnlessRefused: v1 gives the agent a token unless the request refuses one.
func TestSecureUnlessRefused(t *testing.T) {
	f := newFixture(t)
	for body, secure := range map[string]bool{
		`{"templateID":"base"}`: true, `{"templateID":"base","secure":true}`: true, `{"templateID":"base","secure":false}`: false,
	} {
		var s api.Sandbox
		f.want(201, &s, "POST", "/sandboxes", body)
		o, err := f.cluster.SandboxByID(t.Context(), sandbox.ID(s.SandboxID))
		if err != nil || o.Spec.AgentSecured() != secure || (s.EnvdAccessToken != nil) != secure {
			t.Errorf("%s: token returned %v, object secured %v, %v; want %v", body, s.EnvdAccessToken != nil, o.Spec.AgentSecured(), err, secure)
		}
	}
}

// A template's access holds for creates by v1: its private traffic is kept, and its open agent is not.
func TestTemplatesAccessByV1(t *testing.T) {
	f := newFixture(t)
	change := func(access *agents.AccessPolicy) {
		t.Helper()
		template, err := f.cluster.Template(t.Context(), types.NamespacedName{Namespace: templates.PublicNamespace, Name: "base"})
		if err != nil {
			t.Fatal(err)
		}
		template.Spec.Barchan = &extensions.TemplateBarchanSpec{Public: true, Sandbox: &agents.BarchanSpec{Access: access}}
		if err := f.cluster.Update(t.Context(), template); err != nil {
			t.Fatal(err)
		}
	}
	no := false
	for name, c := range map[string]struct {
		access         *agents.AccessPolicy
		body           string
		status         int
		secure, public bool
	}{
		"nothing said":               {nil, `{"templateID":"base"}`, 201, true, true},
		"open agent":                 {&agents.AccessPolicy{OpenAgent: true}, `{"templateID":"base"}`, 201, true, true},
		"private traffic":            {&agents.AccessPolicy{PublicTraffic: &no}, `{"templateID":"base"}`, 201, true, false},
		"private traffic, open":      {&agents.AccessPolicy{PublicTraffic: &no}, `{"templateID":"base","secure":false}`, 400, false, false},
		"opened by the request":      {&agents.AccessPolicy{PublicTraffic: &no}, `{"templateID":"base","secure":false,"network":{"allowPublicTraffic":true}}`, 201, false, true},
		"public, with an open agent": {nil, `{"templateID":"base","secure":false}`, 201, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			change(c.access)
			var s api.Sandbox
			if c.status != 201 {
				f.want(c.status, nil, "POST", "/sandboxes", c.body)
				return
			}
			f.want(201, &s, "POST", "/sandboxes", c.body)
			o, err := f.cluster.SandboxByID(t.Context(), sandbox.ID(s.SandboxID))
			if err != nil {
				t.Fatal(err)
			}
			public := o.Spec.Barchan.Access.PublicTraffic == nil || *o.Spec.Barchan.Access.PublicTraffic
			if o.Spec.AgentSecured() != c.secure || (s.EnvdAccessToken != nil) != c.secure || public != c.public {
				t.Errorf("secured %t, token %t, public %t", o.Spec.AgentSecured(), s.EnvdAccessToken != nil, public)
			}
		})
	}
}

// TestPanicTellsNothing takes the manager away, so that the handler fails as no handler should.
func TestPanicTellsNothing(t *testing.T) {
	s, err := New(Config{Manager: &manager.Manager{}, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/teams", nil)
	r.Header.Set("X-API-Key", "e2b_00")
	s.ServeHTTP(w, r)
	if body := w.Body.String(); w.Code != 500 || strings.TrimSpace(body) != `{"code":500,"message":"`+request.InternalText+`"}` {
		t.Errorf("answer is %d %s", w.Code, body)
	}
}

func FuzzMetadata(f *testing.F) {
	f.Add("user=abc&app=prod")
	f.Add("a%2520b=c%252Fd")
	f.Add("%%%&;=")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := request.Metadata(text)
		if err != nil {
			return
		}
		form := url.Values{}
		for k, v := range got {
			form.Set(url.PathEscape(k), url.PathEscape(v))
		}
		if again, err := request.Metadata(form.Encode()); err != nil || !maps.Equal(again, got) {
			t.Errorf("%q: %v became %v, %v", text, got, again, err)
		}
	})
}
