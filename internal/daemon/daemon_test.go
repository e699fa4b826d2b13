package daemon

import (
	"bytes"
	"errors"
	"os"
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
	defer func() { _ = first.listener.Close() }()
	addr := first.listener.Addr().String()
	_, err = d.bind(t.Context(), "httpAddr", addr, nil)
	if !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), "httpAddr: "+addr) {
		t.Errorf("bind = %v, want it to name key and address", err)
	}
}

func TestSecretIsMadeOnceAndNeverReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c", "secret")
	made, err := loadSecret(path)
	if err != nil || len(made) != secretBytes {
		t.Fatalf("loadSecret = %d bytes, %v", len(made), err)
	}
	if again, err := loadSecret(path); err != nil || !bytes.Equal(again, made) {
		t.Errorf("the second time it differs, %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != secretMode {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if err := os.WriteFile(path, []byte("cut off"), secretMode); err != nil {
		t.Fatal(err)
	}
	if _, err := loadSecret(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("a damaged secret: %v, want an error that names the file", err)
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
