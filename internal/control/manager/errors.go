package manager

import (
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// refuse returns an error of a kind whose text is for users.
func refuse(kind error, format string, args ...any) error {
	return errs.Public(kind, fmt.Sprintf(format, args...))
}

func noSandbox(id string) error {
	return refuse(errs.ErrNotFound, `Sandbox "%s" doesn't exist or you don't have access to it`, id)
}

// hasEnded is noSandbox with why, where that is known.
func hasEnded(id, why string) error {
	if why == "" {
		return noSandbox(id)
	}
	return refuse(errs.ErrNotFound, `Sandbox "%s" doesn't exist or you don't have access to it: it has ended: %s`, id, why)
}

// isPaused refuses what only a running sandbox can do, and says how to have it run.
func isPaused(id string) error {
	return refuse(errs.ErrConflict, "Sandbox %q is paused; resume it first: connect to it, or run: barchan resume %s", id, id)
}

func noTemplate(name string) error {
	return refuse(errs.ErrNotFound, "template '%s' not found", name)
}

// invalidFields tells the first of the errors that a validation found, and how many more.
func invalidFields(list field.ErrorList) error {
	switch len(list) {
	case 0:
		return nil
	case 1:
		return refuse(errs.ErrInvalid, "%s", list[0])
	default:
		return refuse(errs.ErrInvalid, "%s (and %d more)", list[0], len(list)-1)
	}
}

// fromAPI gives an error of the API server one of our kinds, and a public message where what
// the server says is meant for whoever made the request.
func fromAPI(action string, err error) error {
	kind := kindOf(err)
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

func kindOf(err error) error {
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
	case apierrors.IsTooManyRequests(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsServerTimeout(err):
		return errs.ErrUnavailable
	case apierrors.IsTimeout(err):
		return errs.ErrTimeout
	}
	return nil
}
