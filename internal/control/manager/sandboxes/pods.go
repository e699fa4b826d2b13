package sandboxes

import (
	"errors"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// CheckCheckpoints refuses checkpoints where sandboxes are Pods: an errors.ErrUnsupported.
func (st *Store) CheckCheckpoints() error {
	if !st.Pods {
		return nil
	}
	return errs.Public(errors.ErrUnsupported, "snapshots and forks: not available on a Kubernetes cluster, where "+sandbox.NoMemory+"; keep files in volumeClaimTemplates")
}

// WithoutMemory is what a paused sandbox keeps if a request gives up its memory.
func (st *Store) WithoutMemory() agents.SuspendMode {
	if st.Pods {
		return agents.SuspendDelete
	}
	return agents.SuspendFiles
}

// CheckPause refuses to pause a sandbox that is a Pod and is to keep more than volumes. The request asks for the pause and for the memory
// by these fields. The error is no errs.ErrConflict, which the SDKs take for a sandbox that is paused already.
func (st *Store) CheckPause(b *agents.BarchanSpec, pause, memory string) error {
	if !st.Pods || sandbox.SuspendsAsPod(b) {
		return nil
	}
	return apistatus.Refuse(errs.ErrInvalid, "%s: not available with memory on a Kubernetes cluster, where %s; set %s to false, or let the template set spec.barchan.sandbox.suspend to %s, to keep volumeClaimTemplates alone",
		pause, sandbox.NoMemory, memory, agents.SuspendDelete)
}
