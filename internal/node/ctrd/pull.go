package ctrd

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// resolverOf hides the optional methods of a resolver, whose limits belong to another caller.
type resolverOf struct{ remotes.Resolver }

type pullProgress struct {
	client *Client
	ref    string
	report func(Progress)

	mu   sync.Mutex
	seen map[digest.Digest]int64 // +checklocks:mu
	done int64                   // +checklocks:mu
}

func (t *pullProgress) add(_ context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.seen[d.Digest] = d.Size
	return nil, nil
}

func (t *pullProgress) sums() (done, total int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, size := range t.seen {
		total += size
	}
	return t.done, total
}

// watch reports until the returned function is called, which waits for the last report.
func (t *pullProgress) watch(ctx context.Context) (stop func()) {
	if t.report == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				t.poll(ctx)
			}
		}
	})
	return func() {
		cancel()
		running.Wait()
	}
}

// poll reads the received bytes from containerd. It ignores errors: progress is informational.
func (t *pullProgress) poll(ctx context.Context) {
	t.mu.Lock()
	parts := maps.Clone(t.seen)
	t.mu.Unlock()
	arriving, err := t.client.api.ContentStore().ListStatuses(ctx, "")
	if err != nil {
		return
	}
	var done int64
	for d, size := range parts {
		if _, err := t.client.api.ContentStore().Info(ctx, d); err == nil {
			done += size
		}
	}
	for _, a := range arriving {
		if _, ours := parts[a.Expected]; ours {
			done += a.Offset
		}
	}
	t.mu.Lock()
	t.done = done
	t.mu.Unlock()
	_, total := t.sums()
	Progress{Ref: t.ref, Step: "download", Done: done, Total: total}.report(t.report)
}
