package remote_test

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/node/volumes/remote"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/nfs"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// share is a volume of an NFS server.
type share struct {
	fixture
	export *nfs.Server
}

func newShare(t *testing.T, more ...string) *share {
	t.Helper()
	server := nfs.Start(t)
	m, err := remote.New(remote.Config{Program: program.VolumeFS(t), Endpoints: append(more, server.Address), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	root, port := t.TempDir(), server.Port(t)
	f := &share{export: server, fixture: fixture{Mounter: m, dir: filepath.Join(root, "data"), state: filepath.Join(root, "state"), at: volumetree.Remote{
		NFS: &volumetree.RemoteNFS{Server: "127.0.0.1", Path: nfs.Export, Port: port, MountPort: port},
	}}}
	f.prepare(t)
	return f
}

// What is done to files by the mount is done on the server when the call returns, and the other way round within a second.
func TestFilesOfAnExport(t *testing.T) {
	t.Parallel()
	f := newShare(t)
	f.attach(t)
	at, on := f.paths()
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<18) // several writes
	for name, text := range map[string][]byte{"a": []byte("one"), "big": big, "empty": {}} {
		if err := os.WriteFile(at(name), text, 0o640); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(on(name)); err != nil || !bytes.Equal(got, text) {
			t.Fatalf("%s on the server: %d bytes, %v", name, len(got), err)
		}
		if got, err := os.ReadFile(at(name)); err != nil || !bytes.Equal(got, text) {
			t.Fatalf("%s by the mount: %d bytes, %v", name, len(got), err)
		}
	}
	f.attributes(t)
	f.names(t)
	if list, err := os.ReadDir(f.export.Dir); err != nil || len(list) != 2 {
		t.Errorf("left on the server: %v, %v", list, err)
	}
}

func (f *share) paths() (at, on func(name string) string) {
	return func(name string) string { return filepath.Join(f.dir, name) }, func(name string) string { return filepath.Join(f.export.Dir, name) }
}

// attributes changes those of a file, and its name.
func (f *share) attributes(t *testing.T) {
	t.Helper()
	at, on := f.paths()
	when := time.Unix(1_600_000_000, 0)
	if err := errors.Join(os.Chmod(at("a"), 0o600), os.Chtimes(at("a"), when, when), os.Lchown(at("a"), 33, 33), os.Truncate(at("a"), 2),
		os.Chtimes(at("a"), when, when), os.Mkdir(at("d"), 0o755), os.Rename(at("a"), at("d/b")), os.Symlink("d/b", at("link"))); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(at("link")); err != nil || string(text) != "on" {
		t.Errorf("by the link: %q, %v", text, err)
	}
	info, err := os.Stat(on("d/b"))
	if err != nil || info.Mode().Perm() != 0o600 || !info.ModTime().Equal(when) {
		t.Errorf("on the server: %+v, %v", info, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(at("d/b"), &st); err != nil || st.Uid != volumetree.Owner || st.Size != 2 {
		t.Errorf("by the mount: %+v, %v", st, err)
	}
}

// names has the server refuse some, and list many.
func (f *share) names(t *testing.T) {
	t.Helper()
	at, on := f.paths()
	if os.Remove(at("d")) == nil { // this server calls it an I/O error
		t.Error("a directory that is not empty was removed")
	}
	if _, err := os.OpenFile(at("big"), os.O_CREATE|os.O_EXCL, 0o600); !errors.Is(err, unix.EEXIST) {
		t.Errorf("an exclusive create of a file that exists: %v", err)
	}
	if err := unix.Renameat2(unix.AT_FDCWD, at("empty"), unix.AT_FDCWD, at("big"), unix.RENAME_NOREPLACE); !errors.Is(err, unix.EEXIST) {
		t.Errorf("a rename that must not replace: %v", err)
	}
	if err := os.WriteFile(on("other"), []byte("there"), 0o644); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "another client's file appears", func() bool { text, err := os.ReadFile(at("other")); return err == nil && string(text) == "there" })
	for i := range 300 { // several replies
		if err := os.WriteFile(filepath.Join(on("d"), "file-with-a-long-name-"+time.Duration(i).String()), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if list, err := os.ReadDir(at("d")); err != nil || len(list) != 301 {
		t.Errorf("a large directory has %d entries: %v", len(list), err)
	}
	if err := errors.Join(os.RemoveAll(at("d")), os.Remove(at("link")), os.Remove(at("big"))); err != nil {
		t.Error(err)
	}
	if err := unix.Statfs(f.dir, &unix.Statfs_t{}); err != nil {
		t.Error(err)
	}
}

// Each fault has a reason, within seconds; nothing stays mounted.
func TestRefusedExports(t *testing.T) {
	t.Parallel()
	silent, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	mute := silent.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // it is
	f := newShare(t, silent.Addr().String(), "127.0.0.1:9")
	for name, c := range map[string]struct {
		change func(*volumetree.RemoteNFS)
		reason string
	}{
		"export":     {func(r *volumetree.RemoteNFS) { r.Path = "/missing" }, "ExportNotFound"},
		"denied":     {func(r *volumetree.RemoteNFS) { r.Path = nfs.Denied }, "AccessDenied"},
		"closed":     {func(r *volumetree.RemoteNFS) { r.Port, r.MountPort = 9, 9 }, "EndpointUnreachable"},
		"silent":     {func(r *volumetree.RemoteNFS) { r.Port, r.MountPort = mute, mute }, "EndpointUnreachable"},
		"name":       {func(r *volumetree.RemoteNFS) { r.Server = "no.such.name.invalid" }, "EndpointUnreachable"},
		"port":       {func(r *volumetree.RemoteNFS) { r.Port = 10 }, "EndpointRefused"},
		"mount port": {func(r *volumetree.RemoteNFS) { r.MountPort = 10 }, "EndpointRefused"},
		"loopback":   {func(r *volumetree.RemoteNFS) { r.Server = "localhost" }, "EndpointRefused"},
		"mapped":     {func(r *volumetree.RemoteNFS) { r.Server = "::ffff:127.0.0.1" }, "EndpointRefused"},
		"metadata":   {func(r *volumetree.RemoteNFS) { r.Server, r.Port, r.MountPort = "169.254.169.254", 0, 0 }, "EndpointRefused"},
	} {
		t.Run(name, func(t *testing.T) {
			at, export := f.at, *f.at.NFS
			at.NFS = &export
			c.change(&export)
			f.refuses(t, at, c.reason)
		})
	}
}

// A server that is lost gives EIO, and one that hangs blocks no removal. One that is back works again, also in files that are open, although it no
// longer knows their handles.
func TestLostServer(t *testing.T) {
	t.Parallel()
	f := newShare(t)
	f.attach(t)
	file, err := os.OpenFile(filepath.Join(f.dir, "x"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	write := func() error { _, err := file.WriteAt([]byte("1"), 0); return err }
	seen := func(what, reason string) {
		t.Helper()
		eventually.True(t, what, func() bool {
			err, refused := f.Check(f.dir, f.state), &volumetree.RemoteError{}
			return reason == "" && err == nil || errors.As(err, &refused) && refused.Reason == reason
		})
	}
	f.export.Stop(t)
	if err := write(); !errors.Is(err, unix.EIO) {
		t.Errorf("a write without a server: %v, want EIO", err)
	}
	seen("the loss is seen", "EndpointUnreachable")
	f.export.Restart(t)
	seen("the return is seen", "")
	if err := write(); err != nil {
		t.Errorf("a write by a handle of the server before: %v", err)
	}
	if err := os.Rename(filepath.Join(f.export.Dir, "x"), filepath.Join(f.export.Dir, "y")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(f.export.Dir, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f.export.Stop(t)
	f.export.Restart(t)
	seen("the return is seen", "")
	if err := write(); !errors.Is(err, unix.ESTALE) {
		t.Errorf("a write to a file of whose name there is another: %v, want ESTALE", err)
	}
	f.export.Signal(t, unix.SIGSTOP)
	defer f.export.Signal(t, unix.SIGCONT)
	began := time.Now()
	if _, err := os.ReadFile(filepath.Join(f.dir, "other")); !errors.Is(err, unix.EIO) {
		t.Errorf("a read of a server that hangs: %v, want EIO", err)
	}
	t.Logf("EIO after %v", time.Since(began).Round(time.Millisecond))
	began = time.Now()
	if err := f.Detach(t.Context(), f.dir, f.state); err != nil {
		t.Error(err)
	}
	t.Logf("unmounted after %v", time.Since(began).Round(time.Millisecond))
}
