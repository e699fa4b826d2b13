package sandboxes

import (
	"errors"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// CheckCheckpoints refuses checkpoints where sandboxes are Pods: an errors.ErrUnsupported.
func (st *Store) CheckCheckpoints() error {
	if !st.Pods {
		return nil
	}
	return errs.Public(errors.ErrUnsupported, "snapshots and forks: not available on a Kubernetes cluster, where "+sandbox.NoMemory+"; keep files in volumeClaimTemplates")
}
