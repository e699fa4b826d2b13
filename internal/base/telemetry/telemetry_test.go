package telemetry_test

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	coltrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

func TestNewLogger(t *testing.T) {
	var out bytes.Buffer
	log, err := telemetry.NewLogger(&out, telemetry.LogConfig{Format: "json", Level: "warn"})
	if err != nil {
		t.Fatal(err)
	}
	log.Info("hidden")
	log.Warn("shown", telemetry.Sandbox, "abc", telemetry.Duration, 1500*time.Microsecond, telemetry.Error, io.EOF)

	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("want exactly one line of JSON, got %q: %v", out.String(), err)
	}
	for key, want := range map[string]string{"msg": "shown", "sandbox": "abc", "duration": "1.5ms", "error": "EOF"} {
		if line[key] != want {
			t.Errorf("%s = %v, want %s", key, line[key], want)
		}
	}
}

func TestNewLoggerDefaults(t *testing.T) {
	var out bytes.Buffer
	log, err := telemetry.NewLogger(&out, telemetry.LogConfig{})
	if err != nil {
		t.Fatal(err)
	}
	log.Debug("hidden")
	log.Info("shown", telemetry.Duration, 2*time.Second)
	if got := out.String(); strings.Contains(got, "hidden") || !strings.Contains(got, "msg=shown duration=2s") {
		t.Errorf("logged %q", got)
	}
}

func TestNewLoggerRefuses(t *testing.T) {
	for name, cfg := range map[string]telemetry.LogConfig{
		"level":  {Level: "loud"},
		"format": {Format: "xml"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := telemetry.NewLogger(io.Discard, cfg); err == nil {
				t.Error("NewLogger = nil, want an error")
			}
		})
	}
}

func TestBucketsRise(t *testing.T) {
	b := telemetry.Buckets()
	if !slices.IsSorted(b) || len(slices.Compact(slices.Clone(b))) != len(b) || b[0] != 0.00025 {
		t.Errorf("Buckets = %v", b)
	}
	b[0] = 9
	if telemetry.Buckets()[0] == 9 {
		t.Error("Buckets hands out shared memory")
	}
}

func TestMetricsHandler(t *testing.T) {
	r := telemetry.NewRegistry("v1.2.3")
	claims := prometheus.NewHistogram(telemetry.DurationOpts("claim", "duration", "Time of a claim."))
	r.MustRegister(claims)
	claims.Observe(0.0004)

	w := httptest.NewRecorder()
	telemetry.MetricsHandler(r).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
	for _, want := range []string{
		`barchan_build_info{version="v1.2.3"} 1`,
		`barchan_claim_duration_seconds_bucket{le="0.00025"} 0`,
		`barchan_claim_duration_seconds_bucket{le="0.0005"} 1`,
		"go_goroutines",
		"process_open_fds",
	} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("metrics lack %s", want)
		}
	}
}

// received is a span that a collector was sent.
type received struct {
	service, name, trace, span, parent string
}

// collector is an OTLP receiver, which keeps the spans that it is sent.
type collector struct {
	coltrace.UnimplementedTraceServiceServer
	spans chan received
}

func (c *collector) Export(
	_ context.Context, req *coltrace.ExportTraceServiceRequest,
) (*coltrace.ExportTraceServiceResponse, error) {
	for _, r := range req.GetResourceSpans() {
		service := ""
		for _, a := range r.GetResource().GetAttributes() {
			if a.GetKey() == "service.name" {
				service = a.GetValue().GetStringValue()
			}
		}
		for _, s := range r.GetScopeSpans() {
			for _, span := range s.GetSpans() {
				c.spans <- received{service, span.GetName(), hex.EncodeToString(span.GetTraceId()), hex.EncodeToString(span.GetSpanId()), hex.EncodeToString(span.GetParentSpanId())}
			}
		}
	}
	return &coltrace.ExportTraceServiceResponse{}, nil
}

// TestTracingReachesACollector has two processes export one trace, whose context goes from one to the other on an object.
func TestTracingReachesACollector(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &collector{spans: make(chan received, 8)}
	srv := grpc.NewServer()
	coltrace.RegisterTraceServiceServer(srv, c)
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	t.Cleanup(func() {
		srv.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	process := func(service string) (trace.TracerProvider, func()) {
		provider, shutdown, err := telemetry.NewTracing(t.Context(), telemetry.TraceConfig{Endpoint: l.Addr().String(), Service: service})
		if err != nil {
			t.Fatal(err)
		}
		return provider, func() {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			if err := shutdown(ctx); err != nil {
				t.Fatal(err)
			}
		}
	}
	server, stopServer := process("barchan")
	ctx, span := server.Tracer("x").Start(t.Context(), "claim")
	object := &metav1.ObjectMeta{}
	telemetry.Stamp(ctx, object)
	span.End()
	node, stopNode := process("barchan-node")
	_, end := telemetry.StartSpan(telemetry.Continue(t.Context(), node, object), "node create")
	end(nil)
	stopServer()
	stopNode()
	close(c.spans) // all were exported
	got := slices.Collect(func(yield func(received) bool) {
		for s := range c.spans {
			yield(s)
		}
	})
	if len(got) != 2 || got[0].service != "barchan" || got[0].name != "claim" || got[1].service != "barchan-node" || got[1].name != "node create" {
		t.Fatalf("received %+v", got)
	}
	if got[1].trace != got[0].trace || got[1].parent != got[0].span {
		t.Errorf("the node's span is not below the server's: %+v", got)
	}
}

func TestTracingOff(t *testing.T) {
	provider, shutdown, err := telemetry.NewTracing(t.Context(), telemetry.TraceConfig{})
	if err != nil {
		t.Fatal(err)
	}
	_, span := provider.Tracer("x").Start(t.Context(), "y")
	if span.IsRecording() {
		t.Error("tracing records without an endpoint")
	}
	if err := shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestTracingRefuses(t *testing.T) {
	for name, cfg := range map[string]telemetry.TraceConfig{
		"scheme":  {Endpoint: "ftp://127.0.0.1:1"},
		"no port": {Endpoint: "localhost"},
		"garbage": {Endpoint: "http://%zz:1"},
		"ratio":   {Endpoint: "127.0.0.1:4317", Ratio: 2},
	} {
		t.Run(name, func(t *testing.T) {
			if _, _, err := telemetry.NewTracing(t.Context(), cfg); err == nil {
				t.Error("NewTracing = nil, want an error")
			}
		})
	}
}

// TestExemplars: the histogram has the trace of a request that is traced, and of no other.
func TestExemplars(t *testing.T) {
	for _, sampled := range []bool{true, false} {
		r := prometheus.NewRegistry()
		h := prometheus.NewHistogram(telemetry.DurationOpts("x", "y", "Help."))
		r.MustRegister(h)
		id := trace.TraceID{1, 2, 3}
		ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{
			TraceID: id, SpanID: trace.SpanID{4}, TraceFlags: trace.TraceFlags(0).WithSampled(sampled),
		}))
		telemetry.ObserveSince(ctx, h, time.Now().Add(-time.Second))
		req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/metrics", nil)
		req.Header.Set("Accept", "application/openmetrics-text; version=1.0.0")
		w := httptest.NewRecorder()
		telemetry.MetricsHandler(r).ServeHTTP(w, req)
		text := w.Body.String()
		if !strings.Contains(text, "barchan_x_y_seconds_count 1\n") || strings.Contains(text, `# {trace_id="`+id.String()+`"}`) != sampled {
			t.Errorf("sampled %v: %s", sampled, text)
		}
	}
}
