package daemon

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

// TestAdministrationBeforeTheBoot asks for what the phases have yet to make, as an administrator may whose
// server waits for its disk, or a replica for its API server.
func TestAdministrationBeforeTheBoot(t *testing.T) {
	for _, role := range []string{config.RoleServer, config.RoleReplica} {
		t.Run(role, func(t *testing.T) {
			cfg := config.Default()
			cfg.DataDir, cfg.NodeName, cfg.Role = t.TempDir(), "n", role
			cfg.RunDir, cfg.TokenSecret = filepath.Join(cfg.DataDir, "run"), filepath.Join(cfg.DataDir, "secret")
			if role == config.RoleReplica {
				cfg.APIKubeconfig = "/nowhere"
			}
			d, err := New(Config{Config: cfg, Log: telemetry.Discard()})
			if err != nil {
				t.Fatal(err)
			}
			checks, err := administration{d}.Doctor(t.Context())
			if err != nil || len(checks) == 0 {
				t.Errorf("Doctor = %v, %v", checks, err)
			}
			if role == config.RoleReplica && (checks[0].State != adminclient.CheckFailed || !strings.Contains(checks[0].Detail, "not ready")) {
				t.Errorf("Doctor = %+v", checks)
			}
			all := adminclient.ShutdownRequest{All: true}
			err = administration{d}.Prepare(t.Context(), all, func(adminclient.Event) {})
			if want := role == config.RoleServer; errors.Is(err, errs.ErrUnavailable) != want || (err != nil) != want {
				t.Errorf("Prepare = %v", err)
			}
			if _, err := (administration{d}).Audit(t.Context()); !errors.Is(err, errs.ErrUnavailable) {
				t.Errorf("Audit = %v", err)
			}
			d.progress.SetReady()
			if role == config.RoleServer {
				return
			}
			if _, err := (administration{d}).Audit(t.Context()); !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("Audit of a replica = %v", err)
			}
			if _, err := (imageStore{d}).List(t.Context()); !errors.Is(err, errs.ErrNotFound) {
				t.Errorf("images of a replica: %v", err)
			}
		})
	}
}
