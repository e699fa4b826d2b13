package reply

import (
	"context"
	"net/http"
)

// combined is a response whose last parts are sent together.
type combined struct {
	http.ResponseWriter
	last bool // used by the handler's goroutine
}

type combinedKey struct{}

// Combine lets a handler call Last.
func Combine(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := &combined{ResponseWriter: w}
		next.ServeHTTP(c, r.WithContext(context.WithValue(r.Context(), combinedKey{}, c)))
	})
}

// Last has what is written from now on sent when the handler returns, which must be soon: the end of a stream is three parts, and each that
// is sent alone wakes all that it passes. Without Combine it does nothing. Only the handler's goroutine may call it.
func Last(ctx context.Context) {
	if c, ok := ctx.Value(combinedKey{}).(*combined); ok {
		c.last = true
	}
}

// Flush implements http.Flusher.
func (c *combined) Flush() {
	if !c.last {
		_ = http.NewResponseController(c.ResponseWriter).Flush() // as http.Flusher, which has no error
	}
}

// Unwrap is for http.ResponseController.
func (c *combined) Unwrap() http.ResponseWriter { return c.ResponseWriter }
