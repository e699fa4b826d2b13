// Package reply writes the agent's HTTP replies, reads its JSON requests and maps errors to them. It
// has no routes.
package reply

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// maxJSON bounds the body of requests that are JSON.
const maxJSON = 4 << 20

const defaultKeepalive = 90 * time.Second

var (
	// ErrRestored ends requests that were in flight at a checkpoint.
	ErrRestored = errors.New(envd.RestoredText)
	// ErrStopping refuses to start anything while the agent stops.
	ErrStopping = errors.New("the agent stops")
)

// errStatus is an error with the status of its reply.
type errStatus struct {
	status int
	err    error
}

func (e *errStatus) Error() string { return e.err.Error() }
func (e *errStatus) Unwrap() error { return e.err }

// WithStatus gives an error the status of its reply.
func WithStatus(status int, err error) error { return &errStatus{status, err} }

// Refuse is a formatted error with the status of its reply.
func Refuse(status int, format string, args ...any) error {
	return WithStatus(status, fmt.Errorf(format, args...))
}

// Handler replies with a handler's error. An error without a status is logged, and sent in full:
// the client owns the sandbox and must fix the cause.
func Handler(log *slog.Logger, h func(http.ResponseWriter, *http.Request) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := h(w, r)
		if err == nil {
			return
		}
		if known, ok := errors.AsType[*errStatus](err); ok {
			WriteError(w, known.status, known.err)
			return
		}
		log.WarnContext(r.Context(), "request failed", "method", r.Method, "path", r.URL.Path, "error", err)
		WriteError(w, http.StatusInternalServerError, err)
	})
}

// WriteError writes an error as JSON.
func WriteError(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// The client has gone if this fails.
	_ = json.NewEncoder(w).Encode(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, err.Error()})
}

// JSON writes a reply that must not be cached.
func JSON(w http.ResponseWriter, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode reply: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(b) // the client has gone if this fails
	return nil
}

// NoContent writes an empty reply.
func NoContent(w http.ResponseWriter, _ *http.Request) error {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set(envd.HeaderVersion, envd.Version)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// ReadJSON decodes a body; an empty one leaves v as it is.
func ReadJSON(w http.ResponseWriter, r *http.Request, v any) error {
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxJSON)).Decode(v)
	if err == nil || errors.Is(err, io.EOF) {
		return nil
	}
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return Refuse(http.StatusRequestEntityTooLarge, "request body is larger than %d bytes", tooLarge.Limit)
	}
	return Refuse(http.StatusBadRequest, "invalid request body: %w", err)
}

// ContextError is the RPC error of an ended context.
func ContextError(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), ErrRestored) {
		return connect.NewError(connect.CodeUnavailable, ErrRestored)
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
	}
	return connect.NewError(connect.CodeCanceled, ctx.Err())
}

// Keepalive reads how often a client requests a keepalive.
func Keepalive(h http.Header) time.Duration {
	if s, err := strconv.ParseUint(h.Get(envd.HeaderKeepalive), 10, 16); err == nil && s > 0 {
		return time.Duration(s) * time.Second
	}
	return defaultKeepalive
}

// Timeout reads the time a process may take; zero is without end.
func Timeout(h http.Header) (time.Duration, error) {
	text := h.Get(envd.HeaderConnectMillis)
	if text == "" {
		return 0, nil
	}
	// The protocol allows ten digits, which a Duration holds.
	ms, err := strconv.ParseUint(text, 10, 34)
	if err != nil {
		return 0, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%s: %q is not a number of milliseconds", envd.HeaderConnectMillis, text))
	}
	return time.Duration(ms) * time.Millisecond, nil
}
