package daemon

import (
	"errors"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

// TestOperationsBeforeReady calls operations while phases of the boot are still to come.
func TestOperationsBeforeReady(t *testing.T) {
	for _, role := range []string{config.RoleServer, config.RoleReplica} {
		t.Run(role, func(t *testing.T) {
			d := wired(t, role)
			checks, err := d.operations().Doctor(t.Context())
			if err != nil || len(checks) == 0 {
				t.Errorf("Doctor = %v, %v", checks, err)
			}
			if role == config.RoleReplica && (checks[0].State != adminclient.CheckFailed || !strings.Contains(checks[0].Detail, "not ready")) {
				t.Errorf("Doctor = %+v", checks)
			}
			all := adminclient.ShutdownRequest{All: true}
			err = d.operations().Prepare(t.Context(), all, func(adminclient.Event) {})
			if want := role == config.RoleServer; errors.Is(err, errs.ErrUnavailable) != want || (err != nil) != want {
				t.Errorf("Prepare = %v", err)
			}
			if _, err := d.operations().Audit(t.Context()); !errors.Is(err, errs.ErrUnavailable) {
				t.Errorf("Audit = %v", err)
			}
			d.progress.SetReady()
			d.rest = &rest.Config{}
			if role == config.RoleServer {
				return
			}
			if _, err := d.operations().Audit(t.Context()); !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("Audit of a replica = %v", err)
			}
		})
	}
}
