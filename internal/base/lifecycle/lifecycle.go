// Package lifecycle starts and stops the long-lived parts of a process. It never kills: a part ends by
// returning from its Run.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

var errEarly = errors.New("ended without a stop request")

// Service is a part that runs about as long as the process. Run blocks until ctx is done or the part
// fails; all its goroutines have ended when it returns.
type Service struct {
	Name string
	Run  func(ctx context.Context) error
}

// Run runs the services concurrently until ctx is done or one of them returns. It then stops the
// others, waits for all of them, and returns their failures joined. A service that returns before it
// is stopped has failed, even with nil.
func Run(ctx context.Context, services ...Service) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failures := make([]error, len(services))
	var running sync.WaitGroup
	for i, s := range services {
		running.Go(func() {
			failures[i] = runOne(ctx, s)
			cancel()
		})
	}
	running.Wait()
	return errors.Join(failures...)
}

// runOne runs one service and converts an early return to an error.
func runOne(ctx context.Context, s Service) error {
	err := s.Run(ctx)
	stopping := ctx.Err() != nil
	switch {
	case stopping && (err == nil || errors.Is(err, context.Canceled) || errors.Is(err, ctx.Err())):
		return nil
	case err == nil:
		err = errEarly
	}
	return fmt.Errorf("service %s: %w", s.Name, err)
}
