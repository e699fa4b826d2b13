// Package apistatus gives errors a kind, and the message that a client may read: those of the API server,
// those of validations, and refusals of the APIs' own. It logs nothing and drops no cause.
package apistatus

import (
	"context"
	"errors"
	"fmt"
	"net/url"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Refuse returns an error of a kind whose text is for users.
func Refuse(kind error, format string, args ...any) error {
	return errs.Public(kind, fmt.Sprintf(format, args...))
}

// InvalidFields returns the first error of a validation, and counts the others.
func InvalidFields(list field.ErrorList) error {
	switch len(list) {
	case 0:
		return nil
	case 1:
		return Refuse(errs.ErrInvalid, "%s", list[0])
	default:
		return Refuse(errs.ErrInvalid, "%s (and %d more)", list[0], len(list)-1)
	}
}

// From gives an error of the API server a kind, and a public message where the server's message is meant
// for the client.
func From(action string, err error) error {
	kind := Kind(err)
	if kind == nil {
		return fmt.Errorf("%s: %w", action, err)
	}
	joined := fmt.Errorf("%s: %w: %w", action, kind, err)
	if status := apierrors.APIStatus(nil); errors.As(err, &status) && errors.Is(kind, errs.ErrInvalid) {
		return errs.Public(joined, invalidStatus(status.Status()))
	}
	return joined
}

func invalidStatus(s metav1.Status) string {
	if s.Details != nil && len(s.Details.Causes) > 0 {
		return s.Details.Causes[0].Field + ": " + s.Details.Causes[0].Message
	}
	return s.Message
}

// Kind returns the kind of an error of the API server; nil if it has none.
func Kind(err error) error {
	switch {
	case err == nil || errs.Kind(err) != nil:
		return errs.Kind(err)
	case apierrors.IsNotFound(err) || apierrors.IsGone(err):
		return errs.ErrNotFound
	case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
		return errs.ErrConflict
	case apierrors.IsInvalid(err) || apierrors.IsBadRequest(err):
		return errs.ErrInvalid
	case apierrors.IsRequestEntityTooLargeError(err):
		return errs.ErrTooLarge
	case apierrors.IsForbidden(err):
		return errs.ErrForbidden
	case unavailable(err):
		return errs.ErrUnavailable
	case apierrors.IsTimeout(err):
		return errs.ErrTimeout
	}
	return nil
}

// unavailable reports whether the API server has refused a request for now, or sent no response: it is away, or the connection was
// lost.
func unavailable(err error) bool {
	if apierrors.IsTooManyRequests(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsServerTimeout(err) {
		return true
	}
	_, transport := errors.AsType[*url.Error](err)
	return transport && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
}
