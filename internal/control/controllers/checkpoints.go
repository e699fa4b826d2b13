package controllers

import (
	"context"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// CheckpointRunner stores the data of checkpoints on a node; package node implements it. All methods are
// idempotent and safe for concurrent use, in any order.
type CheckpointRunner interface {
	// Capture creates a checkpoint, or returns the existing one with its UID. The data are durable when it
	// returns; after an error there are none. An errs.ErrInvalid or errs.ErrNotFound is final; a retry
	// may succeed after any other error.
	Capture(ctx context.Context, c sandbox.Capture) (sandbox.Captured, error)
	// Captured returns an existing checkpoint, or an errs.ErrNotFound.
	Captured(ctx context.Context, ref sandbox.CheckpointRef) (sandbox.Captured, error)
	// DropCheckpoint deletes all data of a checkpoint. It waits until operations that read them end.
	DropCheckpoint(ctx context.Context, ref sandbox.CheckpointRef) error
	// Checkpoints lists all checkpoints that have data.
	Checkpoints(ctx context.Context) ([]sandbox.Captured, error)
}

// Origins finds the sandboxes that start from a checkpoint; package cache implements it.
type Origins interface {
	// RestoringFrom returns the sandboxes whose spec refers to a checkpoint, started or not.
	RestoringFrom(ctx context.Context, checkpoint types.NamespacedName) ([]agents.Sandbox, error)
}
