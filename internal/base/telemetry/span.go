package telemetry

import (
	"context"
	"maps"
	"net/http"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// AnnotationTrace of an object is the trace of its last change of desired state: a W3C traceparent, a space, and the time in
// RFC 3339. Controllers continue that trace, in this process or in that of a node, which see the change by a watch alone.
const AnnotationTrace = "barchan.dev/trace"

const (
	scope          = "github.com/barchan-dev/barchan"
	traceparent    = "traceparent"
	maxTraceparent = 55 // bytes of version 00
	// traceAge bounds how long after a change controllers continue its trace: what they do later has other causes.
	traceAge = 5 * time.Minute
)

// StartSpan starts a span below that of ctx, by the tracer provider of that one. Without tracing it costs nothing. End must be
// called, with the result of what the span is of. A span has no text of an error, which may be a tenant's.
func StartSpan(ctx context.Context, name string, opts ...trace.SpanStartOption) (_ context.Context, end func(error)) {
	parent := trace.SpanFromContext(ctx)
	if !parent.SpanContext().IsSampled() {
		return ctx, func(error) {}
	}
	return start(ctx, parent.TracerProvider(), name, opts)
}

// StartTrace is StartSpan by a given provider, also where ctx has no span: for work that no request began. A nil provider makes none.
func StartTrace(ctx context.Context, provider trace.TracerProvider, name string, opts ...trace.SpanStartOption) (_ context.Context, end func(error)) {
	if provider == nil {
		return ctx, func(error) {}
	}
	return start(ctx, provider, name, opts)
}

func start(ctx context.Context, provider trace.TracerProvider, name string, opts []trace.SpanStartOption) (_ context.Context, end func(error)) {
	ctx, span := provider.Tracer(scope).Start(ctx, name, opts...)
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, "")
		}
		span.End()
	}
}

// OfSandbox is the attribute of a span for the ID of its sandbox.
func OfSandbox(id string) trace.SpanStartEventOption {
	return trace.WithAttributes(attribute.String("barchan.sandbox", id))
}

// OfClaim is the attribute of a span for the namespace and name of its SandboxClaim.
func OfClaim(claim string) trace.SpanStartEventOption {
	return trace.WithAttributes(attribute.String("barchan.claim", claim))
}

// Annotated is an object of the API.
type Annotated interface {
	GetAnnotations() map[string]string
	SetAnnotations(annotations map[string]string)
}

// Stamp sets the object's AnnotationTrace to the span of ctx, or removes it where none is recorded: the change that is about to
// be written is not part of the trace of an earlier one.
func Stamp(ctx context.Context, o Annotated) {
	value := ""
	if span := trace.SpanFromContext(ctx); span.IsRecording() && span.SpanContext().IsSampled() {
		carrier := propagation.MapCarrier{}
		propagation.TraceContext{}.Inject(ctx, carrier)
		value = carrier[traceparent] + " " + time.Now().UTC().Format(time.RFC3339)
	}
	annotations := o.GetAnnotations()
	if annotations[AnnotationTrace] == value {
		return
	}
	annotations = maps.Clone(annotations)
	if value == "" {
		delete(annotations, AnnotationTrace)
	} else {
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations[AnnotationTrace] = value
	}
	o.SetAnnotations(annotations)
}

// Continue returns a context whose spans, by the given provider, are below the span that Stamp has written to an object. It
// returns ctx for a nil provider, for an annotation that is not valid, and for one older than five minutes: users may write
// annotations.
func Continue(ctx context.Context, provider trace.TracerProvider, o Annotated) context.Context {
	parent, at, _ := strings.Cut(o.GetAnnotations()[AnnotationTrace], " ")
	if provider == nil || len(parent) != maxTraceparent {
		return ctx
	}
	written, err := time.Parse(time.RFC3339, at)
	if age := time.Since(written); err != nil || age > traceAge || age < -traceAge {
		return ctx
	}
	span := trace.SpanFromContext(propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{traceparent: parent}))
	if !span.SpanContext().IsRemote() {
		return ctx
	}
	return trace.ContextWithSpan(ctx, remoteSpan{span, provider})
}

// WithSpanOf returns ctx with the span of another context, for work that outlives it.
func WithSpanOf(ctx, of context.Context) context.Context {
	return trace.ContextWithSpan(ctx, trace.SpanFromContext(of))
}

// remoteSpan is a span of another process, below which StartSpan finds this process' provider.
type remoteSpan struct {
	trace.Span
	provider trace.TracerProvider
}

// TracerProvider returns the provider of this process.
func (s remoteSpan) TracerProvider() trace.TracerProvider { return s.provider }

// TraceTransport adds the traceparent of the request's context, where a span is recorded, to each request. It adds no baggage.
func TraceTransport(next http.RoundTripper) http.RoundTripper { return traceTransport{next} }

type traceTransport struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (t traceTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	if trace.SpanFromContext(r.Context()).IsRecording() {
		r = r.Clone(r.Context())
		propagation.TraceContext{}.Inject(r.Context(), propagation.HeaderCarrier(r.Header)) //nolint:contextcheck // it is the request's
	}
	return t.next.RoundTrip(r)
}

// CloseIdleConnections closes those of the next transport, for http.Client.
func (t traceTransport) CloseIdleConnections() {
	if c, ok := t.next.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}
