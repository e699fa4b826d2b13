package supervisor

import (
	"context"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

// Find returns the directory's running containerd.
func (s *Supervisor) Find(ctx context.Context) (lifecycle.Process, bool) { return s.find(ctx) }
