package telemetry

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// TraceConfig configures tracing.
type TraceConfig struct {
	// Endpoint is an OTLP gRPC collector: http://host:port, https://host:port, or
	// host:port, which is without TLS. Empty disables tracing.
	Endpoint string
	// Service is the name of this process, Version its build.
	Service, Version string
	// Ratio of the root spans to keep; 0 means all.
	Ratio float64
}

// NewTracing returns a provider of tracers and a function that flushes and stops it, which must be
// called with a context that has a deadline. If the collector is unreachable, spans are lost, never
// requests. Without an endpoint both do nothing.
func NewTracing(ctx context.Context, cfg TraceConfig) (trace.TracerProvider, func(context.Context) error, error) {
	if cfg.Endpoint == "" {
		return noop.NewTracerProvider(), func(context.Context) error { return nil }, nil
	}
	target, err := otlpURL(cfg.Endpoint)
	if err != nil {
		return nil, nil, err
	}
	if cfg.Ratio < 0 || cfg.Ratio > 1 {
		return nil, nil, fmt.Errorf("trace ratio %v: use a number from 0 to 1", cfg.Ratio)
	}
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpointURL(target))
	if err != nil {
		return nil, nil, fmt.Errorf("open trace exporter to %s: %w", target, err)
	}
	ratio := cfg.Ratio
	if ratio == 0 {
		ratio = 1
	}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithBatcher(exporter),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(ratio))),
		sdktrace.WithResource(resource.NewSchemaless(
			attribute.String("service.name", cfg.Service),
			attribute.String("service.version", cfg.Version),
		)),
	)
	return provider, provider.Shutdown, nil
}

// Propagator passes the trace context in W3C headers.
func Propagator() propagation.TextMapPropagator {
	return propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
}

// otlpURL completes an endpoint to a URL and rejects invalid ones.
func otlpURL(endpoint string) (string, error) {
	if _, _, err := net.SplitHostPort(endpoint); err == nil {
		endpoint = "http://" + endpoint
	}
	u, err := url.Parse(endpoint)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Port() == "" || u.Hostname() == "" {
		return "", fmt.Errorf("trace endpoint %q: use host:port, http://host:port or https://host:port", endpoint)
	}
	return u.String(), nil
}

// TraceHandler starts a span for each request as a child of the caller's. It wraps the response
// writer: do not use it for handlers that hijack connections or stream both ways.
func TraceHandler(provider trace.TracerProvider, name string, next http.Handler) http.Handler {
	return otelhttp.NewHandler(next, name, otelhttp.WithTracerProvider(provider), otelhttp.WithPropagators(Propagator()))
}
