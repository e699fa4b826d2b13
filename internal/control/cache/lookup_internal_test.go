package cache

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// slowLists are lists of a second each, in which a sandbox is from the second list on.
func slowLists(lists *atomic.Int64) *lookups {
	return newLookups(func(ctx context.Context, _ string) (map[sandbox.ID]string, error) {
		names := map[sandbox.ID]string{}
		if lists.Add(1) > 1 {
			names["made"] = "a"
		}
		select {
		case <-time.After(time.Second):
			return names, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
}

// TestLookupsShareLists: a call never gets a list that began before it. Calls during a list share the next, which begins after a pause.
func TestLookupsShareLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lists atomic.Int64
		l, began := slowLists(&lists), time.Now()
		var all sync.WaitGroup
		defer all.Wait()
		all.Go(func() {
			if _, err := l.find(t.Context(), "a", "made"); !errors.Is(err, errs.ErrNotFound) || time.Since(began) != time.Second {
				t.Errorf("in the first list: %v after %s", err, time.Since(began))
			}
		})
		synctest.Wait()
		time.Sleep(time.Millisecond)
		for range 100 {
			all.Go(func() {
				name, err := l.find(t.Context(), "a", "made")
				if took := time.Since(began); name != "a" || err != nil || took != (1+lookupShare+1)*time.Second {
					t.Errorf("in the second list: %q, %v after %s", name, err, took)
				}
			})
		}
		all.Wait()
		if got := lists.Load(); got != 2 {
			t.Errorf("%d lists, want 2", got)
		}
		began = time.Now()
		if _, err := l.find(t.Context(), "b", "made"); err != nil || time.Since(began) != time.Second {
			t.Errorf("another namespace waited: %v after %s", err, time.Since(began))
		}
		if _, err := l.find(t.Context(), "a", "made"); err != nil || time.Since(began) != (lookupShare+1)*time.Second {
			t.Errorf("the pause was forgotten: %v after %s", err, time.Since(began))
		}
		time.Sleep(lookupShare * time.Second)
		if _, err := l.find(t.Context(), "c", "none"); !errors.Is(err, errs.ErrNotFound) {
			t.Error(err)
		}
		if len(l.of) != 1 {
			t.Errorf("%d namespaces are kept, want that of the last list", len(l.of))
		}
	})
}

// TestLookupsEnd: a caller that leaves ends its own list alone; what the API server answers is for all that wait.
func TestLookupsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lists atomic.Int64
		l := slowLists(&lists)
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		all.Go(func() {
			if _, err := l.find(ctx, "a", "made"); !errors.Is(err, context.Canceled) {
				t.Errorf("the caller that left: %v", err)
			}
		})
		synctest.Wait()
		all.Go(func() {
			if name, err := l.find(t.Context(), "a", "made"); name != "a" || err != nil {
				t.Errorf("the caller that waited for it: %q, %v", name, err)
			}
		})
		synctest.Wait()
		cancel()
		all.Wait()

		lists.Store(0)
		l.list = func(context.Context, string) (map[sandbox.ID]string, error) {
			lists.Add(1)
			time.Sleep(time.Second)
			return nil, errs.ErrUnavailable
		}
		for range 10 {
			all.Go(func() {
				if _, err := l.find(t.Context(), "b", "made"); !errors.Is(err, errs.ErrUnavailable) {
					t.Errorf("without an API server: %v", err)
				}
			})
		}
		all.Wait()
		if got := lists.Load(); got > 2 {
			t.Errorf("%d lists failed for callers that came together", got)
		}
	})
}
