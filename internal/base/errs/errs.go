// Package errs defines the kinds of error that cross package boundaries, and separates messages for
// users from causes for logs. It maps nothing to HTTP or exit codes: each edge has its own table for
// that.
//
// A kind exists because some caller handles it differently. Set one by wrapping it with %w and the
// action; test for it with errors.Is.
package errs

import (
	"errors"
	"fmt"
	"strings"
)

// The kinds.
var (
	// ErrNotFound means that the named thing does not exist.
	ErrNotFound = errors.New("not found")
	// ErrConflict means that the state has changed, or that a name is taken.
	ErrConflict = errors.New("conflict")
	// ErrInvalid means that the request can never succeed unchanged.
	ErrInvalid = errors.New("invalid")
	// ErrExhausted means that a limit is reached or a finite supply is used up.
	ErrExhausted = errors.New("exhausted")
	// ErrUnavailable means that a later retry may succeed.
	ErrUnavailable = errors.New("unavailable")
	// ErrUnauthenticated means that the caller is not authenticated.
	ErrUnauthenticated = errors.New("unauthenticated")
	// ErrForbidden means that the caller is authenticated but not authorized.
	ErrForbidden = errors.New("forbidden")
	// ErrTooLarge means that a body, file or message exceeds its limit.
	ErrTooLarge = errors.New("too large")
	// ErrTimeout means that the time limit has passed.
	ErrTimeout = errors.New("timeout")
	// ErrBadGateway means that a program which a tenant controls, such as the agent of a sandbox, gave no valid answer: the server
	// is not at fault.
	ErrBadGateway = errors.New("bad gateway")
)

// kinds orders the kinds for Kind; the first that matches wins.
var kinds = []error{
	ErrNotFound, ErrConflict, ErrInvalid, ErrExhausted, ErrUnavailable,
	ErrUnauthenticated, ErrForbidden, ErrTooLarge, ErrTimeout, ErrBadGateway,
}

// Kind returns the kind that err wraps, or nil if it wraps none. An edge's
// table is a map keyed by it.
func Kind(err error) error {
	for _, k := range kinds {
		if errors.Is(err, k) {
			return k
		}
	}
	return nil
}

// public is an error with a text for users and a cause that they must not see.
type public struct {
	cause   error
	message string
}

// Error returns the full text, for logs.
func (p *public) Error() string {
	if p.cause == nil {
		return p.message
	}
	return p.message + ": " + p.cause.Error()
}

// Unwrap returns the cause, so that errors.Is finds its kind.
func (p *public) Unwrap() error { return p.cause }

// Public returns an error that carries message as text safe for users, with
// err as its cause. A nil err gives an error without a cause, never nil.
func Public(err error, message string) error {
	return &public{cause: err, message: message}
}

// PublicMessage returns the text for users of the outermost Public error in err's chain, and false if
// there is none: then an edge uses a general text.
func PublicMessage(err error) (string, bool) {
	if p, ok := errors.AsType[*public](err); ok {
		return p.message, true
	}
	return "", false
}

// Text returns the text of err for readers who may see all of it: the text for users if there is one,
// else the full text without a bare kind at its end, which adds nothing.
func Text(err error) string {
	if text, ok := PublicMessage(err); ok {
		return text
	}
	if kind := Kind(err); kind != nil {
		return strings.TrimSuffix(err.Error(), ": "+kind.Error())
	}
	return err.Error()
}

// Retryable gives an error without a kind the kind ErrUnavailable, since a retry may succeed. A nil err is nil.
func Retryable(err error) error {
	if err == nil || Kind(err) != nil {
		return err
	}
	return fmt.Errorf("%w: %w", err, ErrUnavailable)
}
