// Package running runs controllers in tests.
package running

import (
	"context"
	"sync"
	"testing"
)

// Cache is what controllers look at.
type Cache interface {
	Run(ctx context.Context) error
	WaitSynced(ctx context.Context) error
}

// Over runs a cache and controllers over it, and returns once the cache is filled. The function that it
// returns ends them and waits until they have. A controller that is ended before it has begun may call
// that an error: what they return then has no meaning.
func Over(t testing.TB, c Cache, start ...func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, run := range append(start, c.Run) {
		running.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		})
	}
	stop = func() { cancel(); running.Wait() }
	if err := c.WaitSynced(t.Context()); err != nil {
		stop()
		t.Fatal(err)
	}
	return stop
}
