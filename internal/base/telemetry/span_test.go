package telemetry_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const parentOf = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// TestContinue: only a valid and recent annotation has spans below it; users may write any.
func TestContinue(t *testing.T) {
	now := time.Now().UTC()
	at := func(age time.Duration) string { return " " + now.Add(-age).Format(time.RFC3339) }
	for name, tt := range map[string]struct {
		value string
		want  bool
	}{
		"recent":       {parentOf + at(0), true},
		"old":          {parentOf + at(6*time.Minute), false},
		"future":       {parentOf + at(-time.Hour), false},
		"no time":      {parentOf, false},
		"no trace":     {at(0), false},
		"not sampled":  {strings.TrimSuffix(parentOf, "1") + "0" + at(0), false},
		"zero ID":      {"00-00000000000000000000000000000000-00f067aa0ba902b7-01" + at(0), false},
		"garbage":      {strings.Repeat("x", 55) + at(0), false},
		"long garbage": {strings.Repeat("x", 1<<20), false},
		"empty":        {"", false},
	} {
		t.Run(name, func(t *testing.T) {
			recorder := tracetest.NewSpanRecorder()
			o := &metav1.ObjectMeta{Annotations: map[string]string{telemetry.AnnotationTrace: tt.value}}
			ctx := telemetry.Continue(t.Context(), sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)), o)
			_, end := telemetry.StartSpan(ctx, "start container")
			end(errors.New("secret"))
			spans := recorder.Ended()
			if (len(spans) == 1) != tt.want {
				t.Fatalf("%d spans", len(spans))
			}
			if tt.want && (spans[0].Parent().SpanID().String() != "00f067aa0ba902b7" || spans[0].Status() != sdktrace.Status{Code: codes.Error}) {
				t.Errorf("%+v", spans[0])
			}
		})
	}
}

// TestStamp: a change in a trace carries it, and a change without one removes that of an earlier change.
func TestStamp(t *testing.T) {
	ctx, span := sdktrace.NewTracerProvider().Tracer("x").Start(t.Context(), "create")
	shared := map[string]string{"mine": "1"}
	o := &metav1.ObjectMeta{Annotations: shared}
	telemetry.Stamp(ctx, o)
	parent, _, _ := strings.Cut(o.Annotations[telemetry.AnnotationTrace], " ")
	if want := "00-" + span.SpanContext().TraceID().String() + "-" + span.SpanContext().SpanID().String() + "-01"; parent != want {
		t.Errorf("annotation %q, want %q", parent, want)
	}
	if len(shared) != 1 {
		t.Error("the map of a shared object was changed")
	}
	telemetry.Stamp(t.Context(), o)
	if _, left := o.Annotations[telemetry.AnnotationTrace]; left || o.Annotations["mine"] != "1" {
		t.Errorf("annotations %v", o.Annotations)
	}
	empty := &metav1.ObjectMeta{}
	if telemetry.Stamp(t.Context(), empty); empty.Annotations != nil {
		t.Errorf("annotations %v without tracing", empty.Annotations)
	}
}

// TestTraceTransport: a request has the trace of its span, and the header that it had without one.
func TestTraceTransport(t *testing.T) {
	got := make(chan string, 1)
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r.Header.Get("Traceparent") }))
	defer s.Close()
	c := &http.Client{Transport: telemetry.TraceTransport(http.DefaultTransport)}
	ctx, span := sdktrace.NewTracerProvider().Tracer("x").Start(t.Context(), "init")
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	for want, r := range map[string]*http.Request{span.SpanContext().SpanID().String(): req, "": req.WithContext(t.Context())} {
		res, err := c.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if header := <-got; !strings.Contains(header, want) || want == "" && header != "" {
			t.Errorf("traceparent %q, want %q", header, want)
		}
	}
}
