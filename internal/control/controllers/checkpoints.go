package controllers

import (
	"context"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// CheckpointRunner is the machine that keeps the data of checkpoints; package node has it. Every
// method may be called any number of times, in any order, and from several goroutines.
type CheckpointRunner interface {
	// Capture makes a checkpoint, or returns the one that was made before under its UID. Its data are
	// durable when it returns; after an error there are none. An errs.ErrInvalid or errs.ErrNotFound is
	// for the user to mend; after any other another try may succeed.
	Capture(ctx context.Context, c sandbox.Capture) (sandbox.Captured, error)
	// Captured tells what there is of a checkpoint; none is an errs.ErrNotFound.
	Captured(ctx context.Context, ref sandbox.CheckpointRef) (sandbox.Captured, error)
	// DropCheckpoint returns nil only when no data of a checkpoint are left. It waits for what reads them.
	DropCheckpoint(ctx context.Context, ref sandbox.CheckpointRef) error
	// Checkpoints lists all whose data are there.
	Checkpoints(ctx context.Context) ([]sandbox.Captured, error)
}

// Origins tells which sandboxes start from a checkpoint; package cache has it.
type Origins interface {
	// RestoringFrom returns the sandboxes whose specification names a checkpoint, started or not.
	RestoringFrom(ctx context.Context, checkpoint types.NamespacedName) ([]agents.Sandbox, error)
}
