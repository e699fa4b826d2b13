package boot

import (
	"context"
	"errors"
	"fmt"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

// Resource names what a phase provides for later phases, such as "API server".
type Resource string

// Phase is one step of the boot. Nothing later starts before it is done.
type Phase struct {
	// Name is shown in /readyz, logs and errors.
	Name string
	// Needs are provided by earlier phases.
	Needs, Provides []Resource
	// Run constructs what the phase provides; nil: nothing.
	Run func(ctx context.Context) error
	// Services returns what runs from this phase until the server stops. It is called after Run; nil: none.
	Services func() []Service
}

// Service runs in the background until its context ends. It calls ready when later services and phases may use it.
type Service struct {
	Name string
	Run  func(ctx context.Context, ready func()) error
}

// Background is a service that is ready at once.
func Background(name string, run func(ctx context.Context) error) Service {
	return Service{Name: name, Run: func(ctx context.Context, ready func()) error {
		ready()
		return run(ctx)
	}}
}

// Awaited is a service that is ready when await returns nil. If await fails, the service stops, and its error has both.
func Awaited(name string, run, await func(ctx context.Context) error) Service {
	return Service{Name: name, Run: func(ctx context.Context, ready func()) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		waiting, stopWaiting := context.WithCancel(ctx)
		defer stopWaiting()
		awaited := make(chan error, 1)
		go func() { // received below
			err := await(waiting)
			if err == nil {
				ready()
			} else {
				cancel()
			}
			awaited <- err
		}()
		err := run(ctx)
		stopWaiting()
		failure := <-awaited
		switch { // one may be a consequence of the other
		case failure == nil || err != nil && errors.Is(failure, context.Canceled):
			return err
		case errors.Is(err, context.Canceled):
			return failure
		default:
			return errors.Join(err, failure)
		}
	}}
}

// Closed returns a function for [Awaited] that waits for a channel.
func Closed(ch <-chan struct{}) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-ch:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Check returns an error for the first phase that needs what no earlier phase provides, or whose name or resource is not unique.
func Check(phases []Phase) error {
	names, by := map[string]bool{}, map[Resource]string{}
	for _, p := range phases {
		if p.Name == "" || names[p.Name] {
			return fmt.Errorf("boot phase %q: the name is empty or not unique: %w", p.Name, errs.ErrInvalid)
		}
		names[p.Name] = true
		for _, need := range p.Needs {
			if by[need] == "" {
				return fmt.Errorf("boot phase %q needs %q, which no earlier phase provides: %w", p.Name, need, errs.ErrInvalid)
			}
		}
		for _, r := range p.Provides {
			if by[r] != "" {
				return fmt.Errorf("boot phases %q and %q both provide %q: %w", by[r], p.Name, r, errs.ErrInvalid)
			}
			by[r] = p.Name
		}
	}
	return nil
}

// Run executes the phases in order and reports them to progress. Services are on the stack, also if Run fails.
func Run(ctx context.Context, phases []Phase, progress *Progress, stack *lifecycle.Stack) error {
	if err := Check(phases); err != nil {
		return err
	}
	for _, p := range phases {
		err := progress.Do(ctx, p.Name, func(ctx context.Context) error { return p.start(ctx, stack) })
		if err == nil {
			select {
			case <-stack.Failed():
				err = fmt.Errorf("boot phase %q: a service has ended", p.Name)
			default:
				err = context.Cause(ctx)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p Phase) start(ctx context.Context, stack *lifecycle.Stack) error {
	if p.Run != nil {
		if err := p.Run(ctx); err != nil {
			return err
		}
	}
	if p.Services == nil {
		return nil
	}
	return Push(ctx, stack, p.Services()...)
}

// Push starts services in order, each when the one before it is ready.
func Push(ctx context.Context, stack *lifecycle.Stack, services ...Service) error {
	for _, s := range services {
		if err := stack.Push(ctx, s.Name, s.Run); err != nil {
			return err
		}
	}
	return nil
}
