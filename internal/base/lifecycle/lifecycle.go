// Package lifecycle starts and stops the long-lived parts of a process. It never kills: a part ends by
// returning from its function.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
)

var errEarly = errors.New("ended without a stop request")

// runService runs a service and converts an early return to an error. A service runs about as long as the
// process: it blocks until ctx is done or it fails, and all its goroutines have ended when it returns.
func runService(ctx context.Context, name string, run func(ctx context.Context) error) error {
	err := run(ctx)
	stopping := ctx.Err() != nil
	switch {
	case stopping && (err == nil || errors.Is(err, context.Canceled) || errors.Is(err, ctx.Err())):
		return nil
	case err == nil:
		err = errEarly
	}
	return fmt.Errorf("service %s: %w", name, err)
}
