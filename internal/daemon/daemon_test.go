package daemon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
)

func TestPhases(t *testing.T) {
	p := &phases{log: telemetry.Discard()}
	readyz := func() (int, string) {
		rec := httptest.NewRecorder()
		p.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/readyz", http.NoBody))
		var body struct {
			Ready  bool
			Phase  string
			Phases []struct{ Name string }
		}
		if err := json.Unmarshal(rec.Body.Bytes(), &body); err != nil {
			t.Fatal(err)
		}
		return rec.Code, body.Phase
	}
	if err := p.do(t.Context(), "first", func(context.Context) error {
		if code, phase := readyz(); code != http.StatusServiceUnavailable || phase != "first" {
			t.Errorf("within a phase: %d, %q", code, phase)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	boom := errors.New("boom")
	if err := p.do(t.Context(), "second", func(context.Context) error { return boom }); !errors.Is(err, boom) || !strings.Contains(err.Error(), `"second"`) {
		t.Errorf("a phase that fails: %v", err)
	}
	p.setReady()
	if code, phase := readyz(); code != http.StatusOK || phase != "ready" {
		t.Errorf("when ready: %d, %q", code, phase)
	}
	p.setStopping()
	if code, phase := readyz(); code != http.StatusServiceUnavailable || phase != "stopping" {
		t.Errorf("while it stops: %d, %q", code, phase)
	}
}

func TestEarlyHandlerTellsTheTruth(t *testing.T) {
	h := earlyHandler(&phases{log: telemetry.Discard()})
	for path, want := range map[string]int{"/healthz": http.StatusOK, "/readyz": http.StatusServiceUnavailable, "/sandboxes": http.StatusServiceUnavailable} {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, http.NoBody))
		if rec.Code != want || (want != http.StatusOK && rec.Header().Get("Retry-After") == "") {
			t.Errorf("%s: %d, headers %v", path, rec.Code, rec.Header())
		}
	}
}

func TestListenerInUse(t *testing.T) {
	d := &Daemon{cfg: Config{Log: telemetry.Discard()}}
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
