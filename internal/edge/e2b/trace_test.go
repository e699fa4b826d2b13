package e2b_test

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/e2b"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/agentconn"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

const team = "team-a"

// agentServer stands for the agents and the programs of all sandboxes. It keeps the traceparent of requests by their paths.
type agentServer struct {
	*httptest.Server
	mu   sync.Mutex
	seen map[string][]string // +checklocks:mu
}

func (a *agentServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.seen[r.URL.Path] = append(a.seen[r.URL.Path], r.Header.Get("Traceparent"))
	w.WriteHeader(http.StatusNoContent)
}

// DialContext reaches the server by any address.
func (a *agentServer) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", a.Listener.Addr().String())
}

// all returns what has come, by path.
func (a *agentServer) all() map[string][]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.seen)
}

// has reports whether a request of a path came from a span.
func (a *agentServer) has(path string, s sdktrace.ReadOnlySpan) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	want := fmt.Sprintf("00-%s-%s-01", s.SpanContext().TraceID(), s.SpanContext().SpanID())
	return slices.Contains(a.seen[path], want)
}

// runner stands for the node, which needs root. Its spans and its requests to agents are made as the node makes them.
type runner struct {
	controllers.Runner
	agents *agentconn.Agents
	mu     sync.Mutex
	states map[sandbox.Ref]sandbox.ContainerState // +checklocks:mu
}

func (r *runner) Observe(_ context.Context, ref sandbox.Ref) (sandbox.Observed, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	o := sandbox.Observed{State: sandbox.ContainerAbsent, Node: "n1", Runtime: agents.RuntimeGVisor, Probed: true, StartedAt: time.Unix(1000, 0), Address: netip.MustParseAddr("10.9.0.2")}
	if s, ok := r.states[ref]; ok {
		o.State = s
	}
	return o, nil
}

func (r *runner) move(ctx context.Context, span string, ref sandbox.Ref, to sandbox.ContainerState) (sandbox.Observed, error) {
	ctx, end := telemetry.StartSpan(ctx, span)
	err := error(nil)
	if to == sandbox.ContainerRunning {
		err = r.agents.AwaitStarted(ctx, agentconn.Container{
			ID: sandbox.IDOf(ref.UID), Address: netip.MustParseAddr("10.9.0.2"), Alive: func() bool { return true }, Output: func() string { return "" },
		})
	}
	end(err)
	if err != nil {
		return sandbox.Observed{}, err
	}
	r.mu.Lock()
	r.states[ref] = to
	r.mu.Unlock()
	return r.Observe(ctx, ref)
}

func (r *runner) Ensure(ctx context.Context, s *agents.Sandbox) (sandbox.Observed, error) {
	return r.move(ctx, "node create", sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID}, sandbox.ContainerRunning)
}

func (r *runner) Suspend(ctx context.Context, ref sandbox.Ref, _ agents.SuspendMode) (sandbox.Observed, error) {
	return r.move(ctx, "node suspend", ref, sandbox.ContainerPaused)
}

func (r *runner) Resume(ctx context.Context, ref sandbox.Ref, _ bool) (sandbox.Observed, error) {
	return r.move(ctx, "node resume", ref, sandbox.ContainerRunning)
}

func (r *runner) Bind(ctx context.Context, _ *agents.Sandbox) error {
	_, end := telemetry.StartSpan(ctx, "node bind")
	end(nil)
	return nil
}
func (r *runner) SetEgress(context.Context, *agents.Sandbox) error { return nil }
func (r *runner) Remove(context.Context, sandbox.Ref) error        { return nil }
func (r *runner) ObjectDeleted(string, string)                     {}

// world is a server and its node as two processes: each has a cache and a tracer provider of its own.
type world struct {
	*httptest.Server
	agents       *agentServer
	server, node *tracetest.SpanRecorder
	objects      *cache.Cache
	manager      *manager.Manager
	key          string
}

func newCache(t *testing.T, api *apiserver.Server) *cache.Cache {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	objects, err := cache.New(ctx, cache.Config{REST: api.RESTConfig(apiserver.UserAdmin)})
	if err != nil {
		t.Fatal(err)
	}
	wg.Go(func() { _ = objects.Run(ctx) })
	if err := objects.WaitSynced(ctx); err != nil {
		t.Fatal(err)
	}
	return objects
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{agents: &agentServer{seen: map[string][]string{}}, server: tracetest.NewSpanRecorder(), node: tracetest.NewSpanRecorder()}
	w.agents.Server = httptest.NewServer(w.agents)
	t.Cleanup(w.agents.Close)
	api := embedded.APIServer(t)
	w.objects = newCache(t, api)
	w.startNode(t, newCache(t, api))
	for _, ns := range []string{team, templates.PublicNamespace} {
		_ = w.objects.Live().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}) // it may be there
	}
	if err := w.objects.Live().Create(t.Context(), fakecluster.Template(templates.PublicNamespace, "base", "base", fakecluster.Public())); err != nil {
		t.Fatal(err)
	}
	w.startServer(t)
	eventually.True(t, "the template", func() bool { _, err := w.manager.Templates.Get(t.Context(), team, "base"); return err == nil })
	return w
}

func (w *world) startNode(t *testing.T, objects *cache.Cache) {
	t.Helper()
	conn := agentconn.New(nil, eventually.Patience)
	conn.HTTP = &http.Client{Transport: telemetry.TraceTransport(&http.Transport{DialContext: w.agents.DialContext, DisableKeepAlives: true})}
	c, err := controllers.NewSandbox(controllers.SandboxConfig{
		Log: telemetry.Discard(), Client: objects.Live(), Cache: objects.Informers(), Node: "n1",
		Runner: &runner{agents: conn, states: map[sandbox.Ref]sandbox.ContainerState{}}, Tracing: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(w.node)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { _ = c.Start(ctx) })
}

func (w *world) startServer(t *testing.T) {
	t.Helper()
	tracing := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(w.server))
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	members, err := picker.New(picker.Config{Writer: w.objects.Live()})
	if err != nil {
		t.Fatal(err)
	}
	quotas, err := quota.New(quota.Config{Reader: w.objects, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	routes, assumed := route.NewTable(), assumecache.New(w.objects.Sandbox)
	synced, err := cache.On(t.Context(), w.objects, func(older, newer *agents.Sandbox) {
		assumed.Observe(older, newer)
		members.Observe(older, newer)
		quotas.Observe(older, newer)
		if newer != nil {
			routes.Apply(newer)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	<-synced
	routes.MarkSynced()
	agentsOf := agentclient.New(agentclient.Config{Tokens: tokens, Dial: w.agents.DialContext})
	w.manager, err = manager.New(manager.Config{
		Objects: w.objects.Live(), Cache: w.objects, Routes: routes, Agents: agentsOf, Tokens: tokens, Log: telemetry.Discard(),
		Picker: members, Quota: quotas, Assumed: assumed, Binder: agentsOf,
		StartTimeout: eventually.Patience, MoveTimeout: eventually.Patience, SettleTimeout: eventually.Patience, BindTimeout: eventually.Patience,
	})
	if err != nil {
		t.Fatal(err)
	}
	rest, err := e2b.New(e2b.Config{Manager: w.manager, Log: telemetry.Discard(), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	g, err := gateway.New(gateway.Config{
		Domains: []string{"box.test"}, Routes: routes, Tokens: tokens, API: telemetry.TraceHandler(tracing, "api", rest), Waker: w.manager.Sandboxes,
		Tracing: tracing, Dialer: w.agents, Log: telemetry.Discard(), Registerer: prometheus.NewRegistry(),
	})
	if err != nil {
		t.Fatal(err)
	}
	w.Server = httptest.NewServer(g)
	t.Cleanup(w.Close)
	if _, w.key, err = w.manager.Keys.Create(t.Context(), apikeys.Identity{Namespace: team}, apikeys.New{Description: "test"}); err != nil {
		t.Fatal(err)
	}
}

// ask sends a request in a trace of its own, which it returns.
func (w *world) ask(t *testing.T, trace byte, method, path, body string, want int, header ...string) (traceID string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, w.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	traceID = strings.Repeat(fmt.Sprintf("%02x", trace), 16)
	req.Header.Set("Traceparent", "00-"+traceID+"-00f067aa0ba902b7-01")
	req.Header.Set("X-API-Key", w.key)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := w.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != want {
		t.Fatalf("%s %s: %s", method, path, res.Status)
	}
	return traceID
}

// wantPath requires that each span of a trace is the parent of the next one; the first is below the client's.
func (w *world) wantPath(t *testing.T, traceID string, names ...string) (last sdktrace.ReadOnlySpan) {
	t.Helper()
	parent, err := trace.SpanIDFromHex("00f067aa0ba902b7")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		last = nil
		eventually.True(t, "span "+name+" of trace "+traceID, func() bool {
			for _, s := range append(w.server.Ended(), w.node.Ended()...) {
				if s.Name() == name && s.SpanContext().TraceID().String() == traceID && s.Parent().SpanID() == parent {
					last = s
				}
			}
			return last != nil
		})
		parent = last.SpanContext().SpanID()
	}
	return last
}

// fillPool makes a pool of the template with one ready member.
func (w *world) fillPool(t *testing.T) {
	t.Helper()
	p := fakecluster.Pool(team, "base", templates.PublicNamespace, "base")
	if err := w.objects.Live().Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if _, err := fakecluster.Fill(t.Context(), w.objects.Live(), p, 1); err != nil {
		t.Fatal(err)
	}
	_, revision, err := w.objects.CurrentTemplate(t.Context(), pool.TemplateOf(p))
	if err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the pool is full", func() bool {
		pools, err := w.objects.PoolsOf(t.Context(), "", pool.TemplateOf(p))
		return err == nil && len(pools) == 1 && w.manager.Creates.Picker.Ready(p.UID, pool.TemplateOf(p), revision) == 1
	})
}

// TestTraceAcrossProcesses follows a create, a wake and a claim from the client to the agent, where the node is another process
// that sees objects alone.
func TestTraceAcrossProcesses(t *testing.T) {
	w := newWorld(t)
	t.Cleanup(func() {
		for _, s := range append(w.server.Ended(), w.node.Ended()...) {
			t.Logf("span %q of trace %s, below %s: %s", s.Name(), s.SpanContext().TraceID(), s.Parent().SpanID(), s.SpanContext().SpanID())
		}
	})
	id := w.ask(t, 0xa1, http.MethodPost, "/sandboxes", `{"templateID":"base","timeout":60,"autoPause":true,"autoResume":{"enabled":true}}`, http.StatusCreated)
	last := w.wantPath(t, id, "POST", "create sandbox", "cold start", "start container", "node create", "agent start")
	if !w.agents.has("/init", last) {
		t.Errorf("the agent got no traceparent of the create: %v", w.agents.all())
	}
	all, err := w.objects.Sandboxes(t.Context(), team)
	if err != nil || len(all) != 1 {
		t.Fatalf("%d sandboxes, %v", len(all), err)
	}
	box := string(sandbox.IDOf(all[0].UID))

	id = w.ask(t, 0xb2, http.MethodPost, "/sandboxes/"+box+"/pause", "", http.StatusNoContent)
	w.wantPath(t, id, "POST", "pause sandbox", "suspend container", "node suspend")
	id = w.ask(t, 0xc3, http.MethodGet, "/hello", "", http.StatusNoContent, envd.HeaderSandboxID, box, envd.HeaderSandboxPort, "8080")
	last = w.wantPath(t, id, "sandbox request", "wake sandbox", "connect sandbox", "resume container", "node resume", "agent start")
	if !w.agents.has("/init", last) {
		t.Errorf("the agent got no traceparent of the wake: %v", w.agents.all())
	}
	if request := w.wantPath(t, id, "sandbox request"); !w.agents.has("/hello", request) {
		t.Errorf("the sandbox got no traceparent of the request: %v", w.agents.all())
	}

	w.fillPool(t)
	id = w.ask(t, 0xd4, http.MethodPost, "/sandboxes", `{"templateID":"base","timeout":60,"envVars":{"A":"b"}}`, http.StatusCreated)
	last = w.wantPath(t, id, "POST", "create sandbox", "claim member", "agent init")
	if !w.agents.has("/init", last) {
		t.Errorf("the agent got no traceparent of the claim: %v", w.agents.all())
	}
	w.wantPath(t, id, "POST", "create sandbox", "claim member", "node bind")
}
