package manager

import (
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

func noSandbox(id string) error {
	return apistatus.Refuse(errs.ErrNotFound, `Sandbox "%s" doesn't exist or you don't have access to it`, id)
}

// hasEnded is noSandbox with why, where that is known.
func hasEnded(id, why string) error {
	if why == "" {
		return noSandbox(id)
	}
	return apistatus.Refuse(errs.ErrNotFound, `Sandbox "%s" doesn't exist or you don't have access to it: it has ended: %s`, id, why)
}

// isPaused refuses what only a running sandbox can do, and says how to have it run.
func isPaused(id string) error {
	return apistatus.Refuse(errs.ErrConflict, "Sandbox %q is paused; resume it first: connect to it, or run: barchan resume %s", id, id)
}

func noTemplate(name string) error {
	return apistatus.Refuse(errs.ErrNotFound, "template '%s' not found", name)
}
