package remote_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/node/volumes/remote"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/program"
	"github.com/barchan-dev/barchan/internal/testkit/s3"
)

type fixture struct {
	*remote.Mounter
	server     *s3.Server
	dir, state string
	at         volumetree.Remote
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	server := s3.Start(t, "data")
	m, err := remote.New(remote.Config{Program: program.VolumeFS(t), Endpoints: []string{server.Address}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	f := &fixture{Mounter: m, server: server, dir: filepath.Join(root, "data"), state: filepath.Join(root, "state"), at: volumetree.Remote{
		Endpoint: server.URL(), Region: "us-east-1", Bucket: "data", Prefix: "in", AccessKeyID: s3.AccessKeyID, SecretAccessKey: s3.SecretAccessKey, CacheBytes: 1 << 30,
	}}
	f.prepare(t)
	return f
}

// prepare makes the mount point, and unmounts it at the end.
func (f *fixture) prepare(t *testing.T) {
	t.Helper()
	if err := os.Mkdir(f.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if log, err := os.ReadFile(filepath.Join(f.state, "log")); err == nil && t.Failed() {
			t.Logf("%s", log)
		}
		if err := f.Detach(context.WithoutCancel(t.Context()), f.dir, f.state); err != nil {
			t.Error(err)
		}
	})
}

// refuses wants a volume to be refused for a reason, and nothing to be mounted.
func (f *fixture) refuses(t *testing.T, at volumetree.Remote, reason string) {
	t.Helper()
	began := time.Now()
	err := f.Attach(t.Context(), f.dir, f.state, at)
	refused := &volumetree.RemoteError{}
	if !errors.As(err, &refused) || refused.Reason != reason {
		log, _ := os.ReadFile(filepath.Join(f.state, "log"))
		t.Fatalf("error %v (%+v), want reason %s; the log:\n%s", err, refused, reason, log)
	}
	t.Logf("after %v: %v", time.Since(began).Round(time.Millisecond), err)
	if strings.Contains(err.Error(), s3.SecretAccessKey) {
		t.Error("the error has the secret")
	}
	if mounts, err := remote.Mounts(); err != nil || slices.Contains(mounts, f.dir) {
		t.Errorf("still mounted: %v, %v", mounts, err)
	}
}

func (f *fixture) attach(t *testing.T) {
	t.Helper()
	if err := f.Attach(t.Context(), f.dir, f.state, f.at); err != nil {
		log, _ := os.ReadFile(filepath.Join(f.state, "log"))
		t.Fatalf("attach: %v\n%s", err, log)
	}
}

// signal sends a signal to the process of the volume.
func (f *fixture) signal(t *testing.T, signal unix.Signal) {
	t.Helper()
	lock, err := os.OpenFile(filepath.Join(f.state, "lock"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lock.Close() }()
	has := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(lock.Fd(), unix.F_GETLK, &has); err != nil || has.Type == unix.F_UNLCK {
		t.Fatalf("no process serves the volume: %v", err)
	}
	if err := unix.Kill(int(has.Pid), signal); err != nil {
		t.Fatal(err)
	}
}

// A close puts a file into the bucket; the bucket's files are read, renamed and removed; a lost process is replaced; files that were
// not uploaded are uploaded by the next one.
func TestFilesOfABucket(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.attach(t)
	at := func(name string) string { return filepath.Join(f.dir, name) }
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<20) // more than one part
	for name, text := range map[string][]byte{"a.txt": []byte("one"), "big": big} {
		if err := os.WriteFile(at(name), text, 0o644); err != nil {
			t.Fatal(err)
		}
		if got := f.server.Object(t, "data", "in/"+name); !bytes.Equal(got, text) {
			t.Fatalf("%s is not in the bucket when its close returns: %d bytes", name, len(got))
		}
	}
	f.server.Put(t, "data", "in/sub/there", "before")
	eventually.True(t, "another client's object appears", func() bool { text, err := os.ReadFile(at("sub/there")); return err == nil && string(text) == "before" })
	if err := errors.Join(os.Mkdir(at("d"), 0o755), os.Rename(at("a.txt"), at("d/b.txt"))); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(at("d/b.txt"), os.O_RDWR|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	if _, err := file.WriteString(" two"); err != nil {
		t.Fatal(err)
	}
	// It stays open, as gVisor keeps it.
	eventually.True(t, "an open file is uploaded", func() bool { return string(f.server.Object(t, "data", "in/d/b.txt")) == "one two" })
	if err := os.Remove(at("big")); err != nil {
		t.Fatal(err)
	}
	if got := f.server.Object(t, "data", "in/big"); got != nil {
		t.Error("a removed file is still in the bucket")
	}
	if _, err := file.WriteString(" three"); err != nil { // not uploaded yet
		t.Fatal(err)
	}
	f.signal(t, unix.SIGKILL)
	eventually.True(t, "the loss is seen", func() bool { return f.Check(f.dir, f.state) != nil })
	f.attach(t)
	eventually.True(t, "the next process uploads", func() bool { return string(f.server.Object(t, "data", "in/d/b.txt")) == "one two three" })
	if err := f.Detach(t.Context(), f.dir, f.state); err != nil {
		t.Fatal(err)
	}
	if list, err := os.ReadDir(f.dir); err != nil || len(list) > 0 {
		t.Errorf("after the unmount: %v, %v", list, err)
	}
}

// Each fault has a reason, within seconds; nothing stays mounted.
func TestRefusals(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	silent, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	m, err := remote.New(remote.Config{Program: program.VolumeFS(t), Endpoints: []string{f.server.Address, silent.Addr().String(), "127.0.0.1:9"}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	f.Mounter = m
	for name, c := range map[string]struct {
		change func(*volumetree.Remote)
		reason string
	}{
		"bucket":   {func(r *volumetree.Remote) { r.Bucket = "missing" }, "BucketNotFound"},
		"secret":   {func(r *volumetree.Remote) { r.SecretAccessKey = "wrong" }, "AccessDenied"},
		"key":      {func(r *volumetree.Remote) { r.AccessKeyID = "wrong" }, "AccessDenied"},
		"closed":   {func(r *volumetree.Remote) { r.Endpoint = "http://127.0.0.1:9" }, "EndpointUnreachable"},
		"silent":   {func(r *volumetree.Remote) { r.Endpoint = "http://" + silent.Addr().String() }, "EndpointUnreachable"},
		"loopback": {func(r *volumetree.Remote) { r.Endpoint = "http://127.0.0.1:10" }, "EndpointRefused"},
		"name":     {func(r *volumetree.Remote) { r.Endpoint = "http://localhost:10" }, "EndpointRefused"},
		"mapped":   {func(r *volumetree.Remote) { r.Endpoint = "http://[::ffff:127.0.0.1]:10" }, "EndpointRefused"},
		"private":  {func(r *volumetree.Remote) { r.Endpoint = "https://169.254.169.254" }, "EndpointRefused"},
	} {
		t.Run(name, func(t *testing.T) {
			at := f.at
			c.change(&at)
			f.refuses(t, at, c.reason)
		})
	}
}

// A backend that is lost gives EIO, and one that is back works again; a process that hangs is replaced.
func TestLostBackend(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.attach(t)
	if err := os.WriteFile(filepath.Join(f.dir, "x"), []byte("1"), 0o644); err != nil {
		t.Fatal(err)
	}
	f.server.Stop(t)
	began := time.Now()
	if err := os.WriteFile(filepath.Join(f.dir, "y"), []byte("2"), 0o644); !errors.Is(err, unix.EIO) {
		t.Errorf("a write without a backend: %v, want EIO", err)
	}
	t.Logf("EIO after %v", time.Since(began).Round(time.Millisecond))
	eventually.True(t, "the loss is seen", func() bool {
		refused := &volumetree.RemoteError{}
		return errors.As(f.Check(f.dir, f.state), &refused) && refused.Reason == "EndpointUnreachable"
	})
	f.server.Restart(t)
	eventually.True(t, "the return is seen", func() bool { return f.Check(f.dir, f.state) == nil })
	eventually.True(t, "what failed is uploaded", func() bool { return string(f.server.Object(t, "data", "in/y")) == "2" })
}
