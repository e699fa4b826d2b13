package main

import (
	"context"
)

// measureBoot starts the server over an existing data directory, without sandboxes.
func measureBoot(ctx context.Context, b *bench) error {
	return b.boots(ctx, "boot to ready, no sandboxes", b.rounds(10))
}

func (b *bench) boots(ctx context.Context, name string, n int) error {
	var took samples
	for range n {
		d, err := b.server.restart(ctx)
		if err != nil {
			return err
		}
		took = append(took, millis(d))
	}
	b.report.add("boot", name, "ms", took).atMost(bootBar)
	return nil
}
