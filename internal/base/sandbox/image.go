package sandbox

import (
	"errors"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// ErrImage is in the chain of the errors that NoImage marks.
var ErrImage = errors.New("no image")

// NoImage marks the error of an image that is not on the node and cannot be pulled at the moment. Its
// text and its kind stay.
func NoImage(err error) error { return markedError{err, ErrImage} }

// markedError is an error with a mark, which errors.Is finds.
type markedError struct {
	error
	mark error
}

// Is reports whether target is the mark.
func (e markedError) Is(target error) bool { return target == e.mark }

// Unwrap returns the marked error.
func (e markedError) Unwrap() error { return e.error }

// ReasonImage is the reason of condition Ready while the node cannot get the image. It continues to
// retry; clients should not wait for it.
const ReasonImage = "ImageUnavailable"

// LacksImage returns why the node could not get the sandbox's image when it last tried.
func LacksImage(s *agents.Sandbox) (message string, lacks bool) {
	return unreadyFor(s, ReasonImage)
}
