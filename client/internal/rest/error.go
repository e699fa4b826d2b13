package rest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Error is an error response of the server, or of a sandbox. errors.Is matches its kind.
type Error struct {
	Status  int // as of HTTP
	Message string
}

// Error returns the server's message.
func (e *Error) Error() string { return e.Message }

// Unwrap returns the kind of the status, or nil.
func (e *Error) Unwrap() error { return kinds[e.Status] }

var kinds = map[int]error{
	http.StatusBadRequest:            errs.ErrInvalid,
	http.StatusUnauthorized:          errs.ErrUnauthenticated,
	http.StatusForbidden:             errs.ErrForbidden,
	http.StatusNotFound:              errs.ErrNotFound,
	http.StatusRequestTimeout:        errs.ErrTimeout,
	http.StatusConflict:              errs.ErrConflict,
	http.StatusRequestEntityTooLarge: errs.ErrTooLarge,
	http.StatusTooManyRequests:       errs.ErrExhausted,
	http.StatusInsufficientStorage:   errs.ErrExhausted,
	http.StatusBadGateway:            errs.ErrUnavailable,
	http.StatusServiceUnavailable:    errs.ErrUnavailable,
	http.StatusGatewayTimeout:        errs.ErrTimeout,
}

// Check returns the [*Error] of a response of no success, whose body it closes.
func Check(res *http.Response) error {
	if res.StatusCode/100 == 2 {
		return nil
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	if err != nil {
		return fmt.Errorf("read error of %d: %w", res.StatusCode, err)
	}
	var body struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(b, &body) != nil || body.Message == "" {
		body.Message = fmt.Sprintf("the API responded %s", res.Status)
	}
	return &Error{Status: res.StatusCode, Message: body.Message}
}
