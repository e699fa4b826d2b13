package client

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/barchan-dev/barchan/client/internal/rest"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// The kinds of errors, for errors.Is.
var (
	// ErrNotFound: there is no such sandbox, template, volume, process or file.
	ErrNotFound = errs.ErrNotFound
	// ErrConflict: the state has changed, or a name is taken; a pause of a paused sandbox.
	ErrConflict = errs.ErrConflict
	// ErrInvalid: the request can never succeed unchanged.
	ErrInvalid = errs.ErrInvalid
	// ErrRateLimited: a quota or a limit is reached, or there is no space left.
	ErrRateLimited = errs.ErrExhausted
	// ErrUnavailable: the server or the sandbox is out of reach; a later retry may succeed.
	ErrUnavailable = errs.ErrUnavailable
	// ErrUnauthenticated: the key is missing or wrong.
	ErrUnauthenticated = errs.ErrUnauthenticated
	// ErrForbidden: the key is not allowed to do this.
	ErrForbidden = errs.ErrForbidden
	// ErrTooLarge: a body or a file exceeds its limit.
	ErrTooLarge = errs.ErrTooLarge
	// ErrTimeout: a time limit has passed; a command was killed for it.
	ErrTimeout = errs.ErrTimeout
)

// Error is an error response of the server, or of a sandbox, with the status of HTTP and the message. errors.Is matches its kind.
type Error = rest.Error

// ExitError is a command that ended with another code than 0.
type ExitError struct{ CommandResult }

// Error returns the code and the end of what the command wrote to its standard error.
func (e *ExitError) Error() string {
	text := fmt.Sprintf("command ended with code %d", e.ExitCode)
	if tail := strings.TrimSpace(e.Stderr); tail != "" {
		text += ": " + tail[max(0, len(tail)-1000):]
	}
	return text
}

// CheckResponse returns the [*Error] of a response of no success, whose body it closes.
func CheckResponse(res *http.Response) error { return rest.Check(res) }

// guestError gives an error of a call to an agent its kind. An agent that is out of reach is ErrUnavailable.
func guestError(ctx context.Context, action string, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", action, context.Cause(ctx))
	}
	if e := envd.ErrorOf(err); e != nil {
		return fmt.Errorf("%s: %w", action, &Error{Status: e.Status, Message: e.Message})
	}
	return fmt.Errorf("%s: %w: %w", action, err, ErrUnavailable)
}
