package node

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// interrupted reports whether the holder of a key's lock was interrupted.
func (l *keyedLock) interrupted(key types.UID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queues[key]) > 0 && l.queues[key][0].interrupted
}

// Issue 11: an interruption reached the holder only. What was queued before the removal ran to its
// end, and the removal waited for it.
func TestRemovalInterruptsAllBeforeIt(t *testing.T) {
	type acquire func(ctx context.Context, interrupts bool) (context.Context, func(), error)
	u := newSandboxHandle(sandbox.Ref{Name: "s", UID: "1"}, sandbox.Observed{}, &keyedLock{})
	s := &checkpointStore{kept: map[types.UID]*checkpointHandle{}}
	for name, take := range map[string]acquire{
		"sandbox": func(ctx context.Context, interrupts bool) (context.Context, func(), error) {
			if interrupts {
				return u.takeToRemove(ctx)
			}
			return u.take(ctx)
		},
		"checkpoint": func(ctx context.Context, interrupts bool) (context.Context, func(), error) {
			ctx, _, done, err := s.take(ctx, sandbox.CheckpointRef{Name: "c", UID: "1"}, interrupts)
			return ctx, done, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				holder, release, err := take(t.Context(), false)
				must(t, err)
				queued := make(chan error, 1)
				wait := func() {
					ctx, done, err := take(t.Context(), false)
					if err == nil {
						defer done()
						<-ctx.Done() // only an interruption ends it
					}
					queued <- err
				}
				go wait()
				synctest.Wait()
				removed := make(chan error, 1)
				removing, removes := make(chan struct{}), make(chan struct{})
				go func() {
					_, done, err := take(t.Context(), true)
					close(removing)
					<-removes
					done()
					removed <- err
				}()
				<-holder.Done()
				if err := <-queued; !errors.Is(err, errs.ErrUnavailable) || !errors.Is(err, errInterrupted) {
					t.Errorf("who waited before the removal: %v", err)
				}
				later := make(chan context.Context, 1)
				go func() {
					ctx, done, err := take(t.Context(), false)
					must(t, err)
					later <- ctx
					done()
				}()
				synctest.Wait()
				release()
				<-removing
				synctest.Wait()
				if len(later) > 0 {
					t.Error("who came after the removal went before it")
				}
				close(removes)
				must(t, <-removed)
				<-later
			})
		})
	}
}

// Removals wait for one another; what has ended its wait leaves nothing behind.
func TestKeyedLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l keyedLock
		first, release, err := l.acquire(t.Context(), "a", true)
		must(t, err)
		_, other, err := l.acquire(t.Context(), "b", false)
		must(t, err)
		other()
		gone, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, _, err := l.acquire(gone, "a", false)
			ended <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("a wait that was given up: %v", err)
		}
		second := make(chan error, 1)
		go func() {
			_, done, err := l.acquire(t.Context(), "a", true)
			defer done()
			second <- err
		}()
		synctest.Wait()
		if first.Err() != nil || len(second) > 0 {
			t.Errorf("a removal was interrupted by another, or both went on: %v, %d", first.Err(), len(second))
		}
		release()
		must(t, <-second)
		synctest.Wait()
		if l.busy("a") || len(l.queues) > 0 {
			t.Errorf("left: %v", l.queues)
		}
	})
}

// A resume from disk goes on when its caller gives up, and ends when the sandbox is to be removed.
func TestUnlessInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l keyedLock
		caller, cancel := context.WithCancel(t.Context())
		held, release, err := l.acquire(caller, "a", false)
		must(t, err)
		ctx, done := l.unlessInterrupted(held, "a")
		defer done()
		cancel()
		if held.Err() == nil || ctx.Err() != nil {
			t.Errorf("after the caller gave up: %v, %v", held.Err(), ctx.Err())
		}
		removed := make(chan error, 1)
		go func() {
			_, done, err := l.acquire(t.Context(), "a", true)
			done()
			removed <- err
		}()
		<-ctx.Done()
		again, done := l.unlessInterrupted(held, "a")
		defer done()
		if !errors.Is(context.Cause(again), errInterrupted) {
			t.Errorf("begun after the interruption: %v", again.Err())
		}
		release()
		must(t, <-removed)
	})
}
