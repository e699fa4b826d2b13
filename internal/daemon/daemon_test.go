package daemon

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
)

func TestListenerInUse(t *testing.T) {
	d := &Daemon{cfg: Config{Log: telemetry.Discard()}, progress: boot.NewProgress(telemetry.Discard(), nil, nil)}
	first, err := d.bind(t.Context(), "httpAddr", "127.0.0.1:0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = first.Close() }()
	addr := first.Addr().String()
	_, err = d.bind(t.Context(), "httpAddr", addr, nil)
	if !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), "httpAddr: "+addr) {
		t.Errorf("bind = %v, want it to name key and address", err)
	}
}

func TestNewRefuses(t *testing.T) {
	cfg := config.Default()
	cfg.RunDir, cfg.NodeName = filepath.Join(cfg.DataDir, "run"), "n"
	if _, err := New(Config{Config: cfg}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("without a logger: %v", err)
	}
	cfg.HTTPAddr = "nowhere"
	if _, err := New(Config{Config: cfg, Log: telemetry.Discard()}); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "httpAddr") {
		t.Errorf("with a bad address: %v", err)
	}
}
