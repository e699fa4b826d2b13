package apart

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/config"
)

var other = user{unnamed, unnamed}

// oldData makes the data directory of a server that was one process.
func oldData(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: only root changes owners")
	}
	dir, err := os.MkdirTemp("/tmp", "apart-") //nolint:usetesting // below a directory that others may pass
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil { //nolint:gosec // see above
		t.Fatal(err)
	}
	data := filepath.Join(dir, "d")
	for _, name := range []string{"apiserver/etcd/db", "credentials/token-secret", "node/node.db", "containerd/x", "migrations.json", "members.json"} {
		path := filepath.Join(data, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(name), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	return data
}

func wantOwner(t *testing.T, path string, want int) {
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Error(err)
		return
	}
	if st, _ := info.Sys().(*syscall.Stat_t); int(st.Uid) != want || int(st.Gid) != want {
		t.Errorf("%s belongs to %d:%d, want %d", path, st.Uid, st.Gid, want)
	}
}

func wantDivided(t *testing.T, data string) {
	t.Helper()
	for _, name := range []string{"", "apiserver", "apiserver/etcd/db", "credentials/token-secret", "members.json", "migrations.json"} {
		wantOwner(t, filepath.Join(data, "server", name), other.uid)
	}
	for _, name := range []string{"node", "node/node.db", "containerd/x", "migrations.json"} {
		wantOwner(t, filepath.Join(data, name), 0)
	}
	if b, err := os.ReadFile(filepath.Join(data, "credentials", "token-secret")); err != nil || string(b) != "credentials/token-secret" {
		t.Errorf("by the old path clients read %q, %v", b, err)
	}
	if info, err := os.Stat(data); err != nil || info.Mode().Perm() != 0o710 {
		t.Errorf("mode of the data directory: %v, %v", info.Mode(), err)
	}
}

func TestDivideAndUnite(t *testing.T) {
	t.Parallel()
	data := oldData(t)
	for range 2 { // the second has nothing to do
		if err := Divide(data, other); err != nil {
			t.Fatal(err)
		}
		wantDivided(t, data)
	}
	for range 2 {
		if err := Unite(data); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"", "apiserver/etcd/db", "credentials", "members.json", "node/node.db"} {
			wantOwner(t, filepath.Join(data, name), 0)
		}
		for _, name := range []string{"server", "node-account"} {
			if _, err := os.Lstat(filepath.Join(data, name)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is left: %v", name, err)
			}
		}
	}
	if err := Divide(data, other); err != nil {
		t.Fatal(err)
	}
	wantDivided(t, data)
}

// TestDivideAfterACrash begins where another was killed: between the owner and the move, and with some parts moved.
func TestDivideAfterACrash(t *testing.T) {
	t.Parallel()
	data := oldData(t)
	err := errors.Join(own(filepath.Join(data, "apiserver"), other), os.Mkdir(filepath.Join(data, "server"), 0o700),
		os.Rename(filepath.Join(data, "credentials"), filepath.Join(data, "server", "credentials")))
	if err == nil {
		err = Divide(data, other)
	}
	if err != nil {
		t.Fatal(err)
	}
	wantDivided(t, data)
}

// TestUniteRefuses has a server's process that was taken over leave what root would follow.
func TestUniteRefuses(t *testing.T) {
	t.Parallel()
	for name, make := range map[string]func(path string) error{
		"a symbolic link": func(path string) error { return os.Symlink("/etc", path) },
		"a file with several names": func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o600), os.Link(path, path+"2"))
		},
	} {
		data := oldData(t)
		if err := Divide(data, other); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(data, "server", "apiserver", "planted")
		err := make(path)
		for _, p := range []string{path, path + "2"} {
			_ = os.Lchown(p, other.uid, other.gid) // the second is there once
		}
		if err == nil {
			err = Unite(data)
		}
		if !errors.Is(err, errs.ErrForbidden) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClosedWay(t *testing.T) {
	t.Parallel()
	data := oldData(t)
	parent := filepath.Dir(data)
	if err := os.Chmod(parent, 0o700); err != nil {
		t.Fatal(err)
	}
	err := Divide(data, other)
	if !errors.Is(err, errs.ErrForbidden) || !strings.Contains(err.Error(), "dataDir: "+parent+" is closed") {
		t.Errorf("below a closed directory: %v", err)
	}
	wantOwner(t, filepath.Join(data, "apiserver"), 0)
}

func TestFilesOfTheOperator(t *testing.T) {
	t.Parallel()
	data := oldData(t)
	cfg := config.Default()
	cfg.TLSKey = filepath.Join(filepath.Dir(data), "key")
	if err := os.WriteFile(cfg.TLSKey, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := other.checkFiles(&cfg); !errors.Is(err, errs.ErrForbidden) || !strings.Contains(err.Error(), "tlsKey: "+cfg.TLSKey+" cannot be read") {
		t.Errorf("a key of root's: %v", err)
	}
	if err := errors.Join(os.Chown(cfg.TLSKey, 0, other.gid), os.Chmod(cfg.TLSKey, 0o640), other.checkFiles(&cfg)); err != nil {
		t.Errorf("of the server's group: %v", err)
	}
}
