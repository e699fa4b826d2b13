package gateway

import (
	"context"
	"net/http"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// span starts the request's span as a child of the caller's, and as the parent of the sandbox's.
// Without tracing, the caller's headers pass unchanged. end must be called.
func (x *exchange) span() (end func()) {
	if x.g.tracer == nil {
		return func() {}
	}
	ctx := telemetry.Propagator().Extract(x.r.Context(), propagation.HeaderCarrier(x.r.Header))
	ctx, s := x.g.tracer.Start(ctx, "sandbox request", trace.WithSpanKind(trace.SpanKindServer), trace.WithAttributes(
		attribute.String("http.request.method", x.r.Method), attribute.String("barchan.sandbox", string(x.ID)), attribute.Int("barchan.port", int(x.Port)),
	))
	x.r, x.traced = x.r.WithContext(ctx), tracedHeaders(ctx) // a wake is below the request
	x.traceID = s.SpanContext().TraceID().String()
	return func() {
		s.SetAttributes(attribute.Int("http.response.status_code", x.status))
		if x.status == 0 || x.status >= http.StatusInternalServerError {
			s.SetStatus(codes.Error, "")
		}
		s.End()
	}
}

// tracedHeaders returns the headers that replace the caller's.
func tracedHeaders(ctx context.Context) http.Header {
	h := http.Header{}
	telemetry.Propagator().Inject(ctx, propagation.HeaderCarrier(h))
	return h
}
