package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Stack runs services in order: each is started after the one before it is ready, and they are stopped
// in reverse order, one at a time. Use it where a later part depends on an earlier one.
//
// The zero value is ready. Push and Stop are for one goroutine, the owner's.
type Stack struct {
	layers []*layer

	mu     sync.Mutex
	failed chan struct{} // +checklocks:mu
	closed bool          // +checklocks:mu
}

// layer is one running service.
type layer struct {
	name   string
	cancel context.CancelFunc
	ended  chan struct{}
	err    error // read after ended is closed
}

// Push starts a service on top of the stack and returns once it is ready or has ended. The service
// calls ready once, when others may depend on it. Its context carries the values of ctx and outlives
// ctx: only Stop ends it. If ctx is done before the service is ready, the service is stopped again.
func (s *Stack) Push(ctx context.Context, name string, run func(ctx context.Context, ready func()) error) error {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l := &layer{name: name, cancel: cancel, ended: make(chan struct{})}
	isReady := make(chan struct{})
	var once sync.Once
	go func() { // Stop, or the failing branches below, wait for ended
		defer close(l.ended)
		l.err = runService(own, name, func(ctx context.Context) error {
			return run(ctx, func() { once.Do(func() { close(isReady) }) })
		})
		if l.err != nil {
			s.fail()
		}
	}()
	select {
	case <-isReady:
		s.layers = append(s.layers, l)
		return nil
	case <-l.ended:
		cancel()
		return l.err
	case <-ctx.Done():
		cancel()
		<-l.ended
		return errors.Join(fmt.Errorf("start %s: %w", name, context.Cause(ctx)), l.err)
	}
}

// Failed returns a channel that is closed when a service ends early.
func (s *Stack) Failed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failedLocked()
}

// +checklocks:s.mu
func (s *Stack) failedLocked() chan struct{} {
	if s.failed == nil {
		s.failed = make(chan struct{})
	}
	return s.failed
}

func (s *Stack) fail() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed = true
		close(s.failedLocked())
	}
}

// Stop stops the services from the top down, waits for each, and returns their failures joined, the
// earlier ones included. The stack is then empty.
func (s *Stack) Stop() error {
	var failures []error
	for _, l := range slices.Backward(s.layers) {
		l.cancel()
		<-l.ended
		failures = append(failures, l.err)
	}
	s.layers = nil
	return errors.Join(failures...)
}
