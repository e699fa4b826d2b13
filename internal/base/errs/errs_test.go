package errs_test

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestKind(t *testing.T) {
	for _, kind := range []error{
		errs.ErrNotFound, errs.ErrConflict, errs.ErrInvalid, errs.ErrExhausted, errs.ErrUnavailable,
		errs.ErrUnauthenticated, errs.ErrForbidden, errs.ErrTooLarge, errs.ErrTimeout, errs.ErrBadGateway,
	} {
		t.Run(kind.Error(), func(t *testing.T) {
			wrapped := errs.Public(fmt.Errorf("read sandbox x: %w", kind), "no such luck")
			if got := errs.Kind(wrapped); !errors.Is(got, kind) {
				t.Errorf("Kind = %v, want %v", got, kind)
			}
		})
	}
	if got := errs.Kind(io.EOF); got != nil {
		t.Errorf("Kind of a foreign error = %v, want nil", got)
	}
	if got := errs.Kind(nil); got != nil {
		t.Errorf("Kind(nil) = %v, want nil", got)
	}
}

func TestPublicMessage(t *testing.T) {
	cause := fmt.Errorf("dial 10.0.0.1: %w", io.ErrUnexpectedEOF)
	err := fmt.Errorf("claim: %w", errs.Public(cause, "try again in a minute"))

	message, ok := errs.PublicMessage(err)
	if !ok || message != "try again in a minute" {
		t.Errorf("PublicMessage = %q, %v", message, ok)
	}
	if strings.Contains(message, "10.0.0.1") {
		t.Errorf("the cause leaks into the public message %q", message)
	}
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error("the cause is lost")
	}
	if want := "claim: try again in a minute: dial 10.0.0.1: unexpected EOF"; err.Error() != want {
		t.Errorf("Error = %q, want %q", err, want)
	}
}

func TestPublicMessageOutermostWins(t *testing.T) {
	err := errs.Public(errs.Public(errs.ErrInvalid, "inner"), "outer")
	if message, _ := errs.PublicMessage(err); message != "outer" {
		t.Errorf("PublicMessage = %q, want outer", message)
	}
}

func TestPublicMessageAbsent(t *testing.T) {
	for name, err := range map[string]error{"nil": nil, "plain": io.EOF} {
		t.Run(name, func(t *testing.T) {
			if message, ok := errs.PublicMessage(err); ok || message != "" {
				t.Errorf("PublicMessage = %q, %v", message, ok)
			}
		})
	}
	if err := errs.Public(nil, "gone"); err == nil || err.Error() != "gone" {
		t.Errorf("Public(nil) = %v", err)
	}
}

func TestText(t *testing.T) {
	for name, give := range map[string]struct {
		err  error
		want string
	}{
		"public":    {errs.Public(errs.ErrNotFound, "no such thing"), "no such thing"},
		"bare kind": {fmt.Errorf("image x: %w", errs.ErrNotFound), "image x"},
		"no kind":   {errors.New("boom"), "boom"},
	} {
		if got := errs.Text(give.err); got != give.want {
			t.Errorf("%s: %q, want %q", name, got, give.want)
		}
	}
}
