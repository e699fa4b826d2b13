package node

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"testing/synctest"

	bolt "go.etcd.io/bbolt"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/keyedlock"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Issue 11: an interruption reached the holder only. What was queued before the removal ran to its
// end, and the removal waited for it.
func TestRemovalInterruptsAllBeforeIt(t *testing.T) {
	type acquire func(ctx context.Context, interrupts bool) (context.Context, func(), error)
	u := registry.New(registry.Config{}).Of(sandbox.Ref{Name: "s", UID: "1"})
	db, err := bolt.Open(filepath.Join(t.TempDir(), "node.db"), 0o600, nil)
	must(t, err)
	defer func() { must(t, db.Close()) }()
	s, err := checkpoint.Open(checkpoint.Config{DB: db})
	must(t, err)
	for name, take := range map[string]acquire{
		"sandbox": func(ctx context.Context, interrupts bool) (context.Context, func(), error) {
			if interrupts {
				return u.AcquireToRemove(ctx)
			}
			return u.Acquire(ctx)
		},
		"checkpoint": func(ctx context.Context, interrupts bool) (context.Context, func(), error) {
			ctx, _, done, err := s.Acquire(ctx, sandbox.CheckpointRef{Name: "c", UID: "1"}, interrupts)
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
				if err := <-queued; !errors.Is(err, errs.ErrUnavailable) || !errors.Is(err, keyedlock.ErrInterrupted) {
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
