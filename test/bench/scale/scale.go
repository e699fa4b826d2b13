package scale

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/test/bench/harness"
)

const (
	// crowd is how many sandboxes a boot adopts at most; the light class stands in for gVisor's.
	crowd = 500
	// sustained is for how long sandboxes are made and killed without a rest.
	sustained = 30 * time.Second
)

// Boot starts the server over an existing data directory, without sandboxes.
func Boot(ctx context.Context, b *harness.Bench) error {
	return b.Boots(ctx, "boot to ready, no sandboxes", b.Rounds(10))
}

// Scale makes and kills sandboxes without a rest, and boots over many that live.
func Scale(ctx context.Context, b *harness.Bench) error {
	if err := churn(ctx, b); err != nil {
		return err
	}
	class := b.Server.Classes[len(b.Server.Classes)-1]
	n := b.Rounds(crowd)
	sandboxes, err := b.Server.Fill(ctx, class, n)
	if err != nil {
		return err
	}
	if err := b.Boots(ctx, fmt.Sprintf("boot to ready, %d sandboxes of %s adopted", n, class), b.Rounds(10)); err != nil {
		return err
	}
	return b.Server.KillAll(ctx, sandboxes)
}

// churn has a few clients create a sandbox, kill it, and begin again.
func churn(ctx context.Context, b *harness.Bench) error {
	length := sustained
	if b.Quick {
		length /= 10
	}
	var mu sync.Mutex
	made := 0
	began := time.Now()
	group, groupCtx := errgroup.WithContext(ctx)
	for range harness.AtOnce {
		group.Go(func() error {
			for time.Since(began) < length {
				x, err := b.Server.Create(groupCtx, "gvisor")
				if err != nil {
					return err
				}
				if err := b.Server.Kill(groupCtx, x); err != nil {
					return err
				}
				mu.Lock()
				made++
				mu.Unlock()
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	took := time.Since(began)
	b.Report.One("scale", fmt.Sprintf("cold creates and kills a minute, %d clients, sustained", harness.AtOnce), "/min", float64(made)/took.Minutes())
	return b.Server.AwaitGone(ctx, "gvisor")
}
