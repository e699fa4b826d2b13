package checkpoint

import (
	"context"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// Verify reads and verifies the memory of a checkpoint, once for all that ask at the same time. It continues without a caller
// whose context ends.
func (s *Store) Verify(ctx context.Context, uid types.UID) error {
	done := s.verifying.DoChan(string(uid), func() (any, error) {
		return nil, memimage.Verify(context.WithoutCancel(ctx), s.MemoryDir(uid))
	})
	select {
	case r := <-done:
		return r.Err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
