package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// crowd is how many sandboxes a boot adopts at most; the light class stands in for gVisor's.
	crowd = 500
	// emptyBootBar and bootBar are times, in milliseconds, that boots shall keep to.
	emptyBootBar = 2000
	bootBar      = 5000
	// sustained is for how long sandboxes are made and killed without a rest.
	sustained = 30 * time.Second
)

// measureScale makes and kills sandboxes without a rest, and boots over many that live.
func measureScale(ctx context.Context, b *bench) error {
	if err := b.churn(ctx); err != nil {
		return err
	}
	class := b.server.classes[len(b.server.classes)-1]
	n := b.rounds(crowd)
	boxes, err := b.fill(ctx, class, n)
	if err != nil {
		return err
	}
	if err := b.boots(ctx, fmt.Sprintf("boot to ready, %d sandboxes of %s adopted", n, class), b.rounds(10)); err != nil {
		return err
	}
	return b.killAll(ctx, boxes)
}

// churn has a few clients create a sandbox, kill it, and begin again.
func (b *bench) churn(ctx context.Context) error {
	length := sustained
	if b.quick {
		length /= 10
	}
	var mu sync.Mutex
	made := 0
	began := time.Now()
	group, groupCtx := errgroup.WithContext(ctx)
	for range atOnce {
		group.Go(func() error {
			for time.Since(began) < length {
				x, err := b.server.create(groupCtx, "gvisor")
				if err != nil {
					return err
				}
				if err := b.server.kill(groupCtx, x); err != nil {
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
	b.report.one("scale", fmt.Sprintf("cold creates and kills a minute, %d clients, sustained", atOnce), "/min", float64(made)/took.Minutes())
	return b.awaitGone(ctx, "gvisor")
}

// killAll returns when none is left. The server has been started again, so that its counts of steps
// exclude them.
func (b *bench) killAll(ctx context.Context, boxes []box) error {
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, x := range boxes {
		group.Go(func() error { return b.server.kill(groupCtx, x) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return b.awaitFew(ctx, 0)
}

// awaitFew returns when no more sandboxes than n are left.
func (b *bench) awaitFew(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	for {
		status, err := b.server.admin.Status(ctx)
		if err != nil {
			return err
		}
		if len(status.Sandboxes) <= n {
			return nil
		}
		if err := rest(ctx, 10*goneTick); err != nil {
			return fmt.Errorf("wait until %d sandboxes are left: %w", n, err)
		}
	}
}
