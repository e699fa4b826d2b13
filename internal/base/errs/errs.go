// Package errs names the kinds of error that cross package boundaries, and
// keeps the words meant for users apart from the causes meant for logs. It maps
// nothing to HTTP or exit codes: each edge has its own table for that.
//
// A kind exists because some caller acts differently on it. Give one by
// wrapping it with %w and the action; ask for it with errors.Is.
package errs

import (
	"errors"
	"fmt"
	"strings"
)

// The kinds.
var (
	// ErrNotFound says that what was named does not exist.
	ErrNotFound = errors.New("not found")
	// ErrConflict says that the state moved on, or that a name is taken.
	ErrConflict = errors.New("conflict")
	// ErrInvalid says that the request can never succeed as it stands.
	ErrInvalid = errors.New("invalid")
	// ErrExhausted says that a limit or a finite supply has been used up.
	ErrExhausted = errors.New("exhausted")
	// ErrUnavailable says that a retry later may well succeed.
	ErrUnavailable = errors.New("unavailable")
	// ErrUnauthenticated says that the caller did not prove who they are.
	ErrUnauthenticated = errors.New("unauthenticated")
	// ErrForbidden says that the caller is known and may not do this.
	ErrForbidden = errors.New("forbidden")
	// ErrTooLarge says that a body, file or message exceeds its limit.
	ErrTooLarge = errors.New("too large")
	// ErrTimeout says that the time allowed for the work has run out.
	ErrTimeout = errors.New("timeout")
)

// kinds orders the kinds for Kind; the first that matches wins.
var kinds = []error{
	ErrNotFound, ErrConflict, ErrInvalid, ErrExhausted, ErrUnavailable,
	ErrUnauthenticated, ErrForbidden, ErrTooLarge, ErrTimeout,
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

// public carries a text that users may see beside a cause that they may not.
type public struct {
	cause   error
	message string
}

// Error is the whole story, for logs.
func (p *public) Error() string {
	if p.cause == nil {
		return p.message
	}
	return p.message + ": " + p.cause.Error()
}

// Unwrap returns the cause, so that its kind can still be asked for.
func (p *public) Unwrap() error { return p.cause }

// Public returns an error that carries message as text safe for users, with
// err as its cause. A nil err gives an error without a cause, never nil.
func Public(err error, message string) error {
	return &public{cause: err, message: message}
}

// PublicMessage returns the text for users of the outermost Public error in
// err's chain, and false if there is none: then an edge says something general.
func PublicMessage(err error) (string, bool) {
	if p, ok := errors.AsType[*public](err); ok {
		return p.message, true
	}
	return "", false
}

// Text is what is shown of err where its reader may see all of it: the text for
// users if there is one, else the whole story without the words of a bare kind
// at its end, which say nothing that the rest does not.
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
