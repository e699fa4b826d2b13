package ctrd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
)

// spaceInterval is how often the disk is looked at while an image is unpacked.
const spaceInterval = 200 * time.Millisecond

// whileSpace calls do under a lease, so that containerd removes what it leaves, and ends it when the disk has no space.
func (c *Client) whileSpace(ctx context.Context, do func(context.Context) error) error {
	if _, leased := leases.FromContext(ctx); !leased {
		l, err := c.lease(ctx)
		if err != nil {
			return err
		}
		defer c.release(ctx, l)
		ctx = leases.WithLease(ctx, l.ID)
	}
	if c.space == nil {
		return do(ctx)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan struct{})
	defer close(ended)
	go func() { // ends with do
		tick := time.NewTicker(spaceInterval)
		defer tick.Stop()
		for {
			if err := c.space(); err != nil {
				cancel(fmt.Errorf("unpack image: %w", err))
				return
			}
			select {
			case <-ended:
				return
			case <-tick.C:
			}
		}
	}()
	err := do(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil && !errors.Is(cause, ctx.Err()) {
		return cause
	}
	return err
}
