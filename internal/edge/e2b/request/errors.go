package request

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"reflect"
	"strconv"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/control/manager/idempotency"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
)

const (
	// InternalText is the message of an error that tells clients nothing.
	InternalText = "internal error; the server's log has more"
	// statusClosed is for clients that disconnected; only the metrics show it.
	statusClosed = 499
)

// answer is a status and the text for errors without a public message.
type answer struct {
	status int
	text   string
}

// answers maps kinds of errors to responses.
var answers = map[error]answer{
	errs.ErrNotFound:        {http.StatusNotFound, "not found"},
	errs.ErrConflict:        {http.StatusConflict, "the state changed meanwhile; try again"},
	errs.ErrInvalid:         {http.StatusBadRequest, "the request is not valid"},
	errs.ErrExhausted:       {http.StatusTooManyRequests, "a limit is reached"},
	errs.ErrUnavailable:     {http.StatusServiceUnavailable, "not available at the moment; try again"},
	errs.ErrUnauthenticated: {http.StatusUnauthorized, "an API key is required"},
	errs.ErrForbidden:       {http.StatusForbidden, "not allowed"},
	errs.ErrTooLarge:        {http.StatusRequestEntityTooLarge, "the request is too large"},
	errs.ErrTimeout:         {http.StatusGatewayTimeout, "it took too long; try again"},
	errs.ErrBadGateway:      {http.StatusBadGateway, "the sandbox's agent gave no valid answer"},
}

var closed = answer{statusClosed, "the client went away"}

// Unavailable returns an error that is answered 501: a 404 would mean to the SDKs that the sandbox is gone.
func Unavailable(message string) error { return errs.Public(errors.ErrUnsupported, message) }

// AnswerTo returns the status and the text with which an error is answered.
func AnswerTo(err error) (status int, text string) {
	a := answerTo(err)
	return a.status, a.text
}

func answerTo(err error) answer {
	a, known := answers[errs.Kind(err)]
	switch {
	case errors.Is(err, context.Canceled):
		return closed
	case errors.Is(err, volumetree.ErrFull): // 429 would mean that a later request succeeds
		a.status = http.StatusInsufficientStorage
	case errors.Is(err, idempotency.ErrKeyReused):
		a.status = http.StatusUnprocessableEntity
	case !known && errors.Is(err, context.DeadlineExceeded):
		a = answers[errs.ErrTimeout]
	case errors.Is(err, errors.ErrUnsupported):
		a = answer{http.StatusNotImplemented, "not available on this server"}
	case !known:
		return answer{http.StatusInternalServerError, InternalText}
	}
	if text, ok := errs.PublicMessage(err); ok {
		a.text = text
	}
	return a
}

// Errors sends and logs errors.
type Errors struct{ Log *slog.Logger }

// Fail sends and logs an error. No other function logs it.
func (e Errors) Fail(w http.ResponseWriter, r *http.Request, err error) {
	a := answerTo(err)
	log := e.Log.DebugContext
	switch {
	case a.status == http.StatusInternalServerError && errors.Is(r.Context().Err(), context.Canceled):
		// Most likely the end of the request, whose error the API server's client does not keep.
		a, log = closed, e.Log.WarnContext
	case a.status == http.StatusInternalServerError:
		log = e.Log.ErrorContext
	case a.status > http.StatusNotImplemented:
		log = e.Log.WarnContext
	}
	log(r.Context(), "request failed", telemetry.Method, r.Method, telemetry.Path, r.URL.Path, telemetry.Status, a.status, telemetry.Error, err)
	if a.status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", strconv.Itoa(int(health.RetryAfter.Seconds())))
	}
	WriteError(w, a.status, a.text)
}

// WriteError sends an error of the API.
func WriteError(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(api.Error{Code: int32(status), Message: message}) // the client may be gone
}

// Invalid returns an errs.ErrInvalid whose text is for users.
func Invalid(format string, args ...any) error {
	return errs.Public(errs.ErrInvalid, fmt.Sprintf(format, args...))
}

// BadBody describes what is wrong with a body.
func BadBody(err error) error {
	cause := fmt.Errorf("%w: %w", errs.ErrInvalid, err)
	if errors.Is(err, io.EOF) {
		return errs.Public(cause, "the request needs a JSON body")
	}
	if syntax := (*json.SyntaxError)(nil); errors.As(err, &syntax) {
		return errs.Public(cause, fmt.Sprintf("the body is not JSON: %s, at byte %d", syntax.Error(), syntax.Offset))
	}
	if mismatch := (*json.UnmarshalTypeError)(nil); errors.As(err, &mismatch) {
		field := mismatch.Field
		if field == "" {
			field = "the body"
		}
		return errs.Public(cause, fmt.Sprintf("%s: must be %s, not %s", field, nameOf(mismatch.Type), mismatch.Value))
	}
	return errs.Public(cause, "the body is not what this route takes")
}

// nameOf returns the JSON name of a Go type.
func nameOf(t reflect.Type) string {
	switch t.Kind() { //nolint:exhaustive // the rest are numbers of some size
	case reflect.Bool:
		return "true or false"
	case reflect.String:
		return "a string"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Map, reflect.Struct, reflect.Pointer:
		return "an object"
	default:
		return "an integer"
	}
}

// BadParameter describes which parameter of the path or the query is wrong.
func BadParameter(err error) error {
	cause := fmt.Errorf("%w: %w", errs.ErrInvalid, err)
	if missing := (*api.RequiredParamError)(nil); errors.As(err, &missing) {
		return errs.Public(cause, missing.ParamName+": is required")
	}
	if many := (*api.TooManyValuesForParamError)(nil); errors.As(err, &many) {
		return errs.Public(cause, many.ParamName+": must be given once")
	}
	if wrong := (*api.InvalidParamFormatError)(nil); errors.As(err, &wrong) {
		return errs.Public(cause, wrong.ParamName+": has the wrong form")
	}
	return errs.Public(cause, "a parameter is not valid")
}
