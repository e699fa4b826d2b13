package machine

import (
	"bytes"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestProtect(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "credentials", "token-secret")
	other := filepath.Join(dir, "node", "f")
	for path, mode := range map[string]fs.FileMode{secret: 0o640, other: 0o666} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, mode), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	if err := Protect(t.Context(), dir, 0, log); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]fs.FileMode{dir: 0o700, filepath.Dir(secret): 0o700, secret: 0o600, other: 0o666} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want %v", path, info.Mode().Perm(), err, want)
		}
	}
	if n := strings.Count(logged.String(), "mode of data corrected"); n != 3 || !strings.Contains(logged.String(), secret) {
		t.Errorf("%d corrections are logged: %s", n, logged.String())
	}
	wantProtected(t, dir, secret)
}

// wantProtected repeats the protection, which changes nothing, and refuses a secret of another user.
func wantProtected(t *testing.T, dir, secret string) {
	t.Helper()
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	if err := Protect(t.Context(), dir, 0, log); err != nil || logged.Len() > 0 {
		t.Errorf("again: %v %s", err, logged.String())
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: a file of another user needs root")
	}
	if err := os.Chown(secret, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	if err := Protect(t.Context(), dir, 0, log); !errors.Is(err, errs.ErrForbidden) || !strings.Contains(err.Error(), secret) {
		t.Errorf("a secret of another user: %v", err)
	}
}
