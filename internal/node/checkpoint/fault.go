package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Fault classifies an error of creating a checkpoint.
func Fault(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("the disk is full: %w: %w", err, errs.ErrExhausted)
	case ctx.Err() != nil && errs.Kind(err) == nil:
		return fmt.Errorf("%w: %w: %w", context.Cause(ctx), err, errs.ErrUnavailable)
	default:
		return errs.Retryable(err)
	}
}
