package apiserver_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// onEtcd configures a server on an etcd at endpoint.
func onEtcd(endpoint, node string) func(*apiserver.Config) {
	return func(c *apiserver.Config) {
		c.Etcd.Endpoints, c.Etcd.NodeName, c.Listen, c.Etcd.Lease = []string{endpoint}, node, "", 10*time.Second
	}
}

func wantHeld(t *testing.T, s *apiserver.Server, holder string) {
	t.Helper()
	err := s.Start(t.Context())
	if !errors.Is(err, errs.ErrConflict) {
		s.Stop()
		t.Fatalf("Start of a second server = %v, want a conflict", err)
	}
	for _, want := range []string{"node " + holder, "process ", "etcdPrefix"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("Start of a second server = %v, want %q in it", err, want)
		}
	}
}

func TestOneServerPerPrefix(t *testing.T) {
	endpoint := startOtherEtcd(t)
	first := start(t, onEtcd(endpoint, "first"))
	if err := clientAs(t, first, apiserver.UserAdmin).Create(t.Context(), configMap("outside")); err != nil {
		t.Fatal(err)
	}
	wantHeld(t, newServer(t, onEtcd(endpoint, "second")), "first")

	beside := start(t, onEtcd(endpoint, "beside"), func(c *apiserver.Config) { c.Etcd.Prefix = "/beside" })
	err := clientAs(t, beside, apiserver.UserAdmin).Get(t.Context(), client.ObjectKeyFromObject(configMap("outside")), &corev1.ConfigMap{})
	if !apierrors.IsNotFound(err) {
		t.Errorf("an object below another prefix: %v, want not found", err)
	}

	time.Sleep(11 * time.Second) // longer than the lease, which is renewed before Run is called
	wantHeld(t, newServer(t, onEtcd(endpoint, "second")), "first")

	first.Stop()
	second := start(t, onEtcd(endpoint, "second"))
	if err := clientAs(t, second, apiserver.UserAdmin).Get(t.Context(), client.ObjectKeyFromObject(configMap("outside")), &corev1.ConfigMap{}); err != nil {
		t.Errorf("after the first server ended in order: %v", err)
	}
}

func TestKilledServerTakesItsPrefixBack(t *testing.T) {
	endpoint, dir := startOtherEtcd(t), t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), writerDir+"="+dir, writerEtcd+"="+endpoint)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if !bufio.NewScanner(out).Scan() {
		t.Error("the first server wrote nothing")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()

	wantHeld(t, newServer(t, onEtcd(endpoint, "another")), writerNode)
	wantHeld(t, newServer(t, onEtcd(endpoint, "copy"), func(c *apiserver.Config) { c.DataDir = copyOfInstance(t, dir) }), writerNode)
	start(t, onEtcd(endpoint, writerNode), func(c *apiserver.Config) { c.DataDir = dir })
}

// copyOfInstance is a data directory that was copied to another machine.
func copyOfInstance(t *testing.T, dir string) string {
	t.Helper()
	id, err := os.ReadFile(filepath.Join(dir, "instance"))
	if err != nil {
		t.Fatal(err)
	}
	other := t.TempDir()
	if err := os.WriteFile(filepath.Join(other, "instance"), id, 0o600); err != nil {
		t.Fatal(err)
	}
	return other
}

// A server that cannot reach etcd ends while etcd still excludes other servers.
func TestServerCutOffFromEtcdStops(t *testing.T) {
	endpoint := startOtherEtcd(t)
	l := newLink(t, strings.TrimPrefix(endpoint, "unix://"))
	cut := newServer(t, onEtcd("unix://"+l.path, "cut-off"), func(c *apiserver.Config) { c.Etcd.Lease = 12 * time.Second })
	ended := run(t, cut)
	l.freeze()
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "another server may use etcd prefix /barchan") {
		t.Errorf("Run = %v, want the lost lease", err)
	}
	if keys := ownerKeys(t, endpoint); keys != 1 {
		t.Errorf("%d keys name an owner when the server has stopped, want 1: another could have started before", keys)
	}
	wantHeld(t, newServer(t, onEtcd(endpoint, "other")), "cut-off")
	until(t, "another server takes the prefix", func(ctx context.Context) (bool, error) {
		s := newServer(t, onEtcd(endpoint, "other"))
		defer s.Stop()
		return true, s.Start(ctx)
	})
}

// A lease that etcd no longer has, or a key that was changed, ends the server.
func TestServerWithoutItsLeaseStops(t *testing.T) {
	for name, spoil := range map[string]func(context.Context, *clientv3.Client) error{
		"lease revoked": func(ctx context.Context, c *clientv3.Client) error {
			got, err := c.Get(ctx, "/barchan/server")
			if err == nil {
				_, err = c.Revoke(ctx, clientv3.LeaseID(got.Kvs[0].Lease))
			}
			return err
		},
		"key replaced": func(ctx context.Context, c *clientv3.Client) error {
			_, err := c.Put(ctx, "/barchan/server", "{}", clientv3.WithIgnoreLease())
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			endpoint := startOtherEtcd(t)
			ended := run(t, newServer(t, onEtcd(endpoint, "first")))
			if err := spoil(t.Context(), etcdClient(t, endpoint)); err != nil {
				t.Fatal(err)
			}
			if err := <-ended; err == nil || !strings.Contains(err.Error(), "lease lost") {
				t.Errorf("Run = %v, want the lost lease", err)
			}
		})
	}
}

func run(t *testing.T, s *apiserver.Server) <-chan error {
	t.Helper()
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context()) }()
	return ended
}

func etcdClient(t *testing.T, endpoint string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Context: t.Context(), Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func ownerKeys(t *testing.T, endpoint string) int {
	t.Helper()
	got, err := etcdClient(t, endpoint).Get(t.Context(), "/barchan/server")
	if err != nil {
		t.Fatal(err)
	}
	return len(got.Kvs)
}

// link forwards connections to a socket, until it is frozen: then bytes get lost on the way, and
// both ends see nothing of it.
type link struct {
	path   string
	frozen chan struct{}
}

func newLink(t *testing.T, to string) *link {
	t.Helper()
	l := &link{path: filepath.Join(t.TempDir(), "link.sock"), frozen: make(chan struct{})}
	ln, err := net.Listen("unix", l.path) //nolint:noctx // it ends with the test
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(func() {
		cancel()
		_ = ln.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			from, err := ln.Accept()
			if err != nil {
				return
			}
			conn, err := new(net.Dialer).DialContext(ctx, "unix", to)
			if err != nil {
				_ = from.Close()
				continue
			}
			context.AfterFunc(ctx, func() { _, _ = from.Close(), conn.Close() })
			wg.Go(func() { _, _ = io.Copy(lossy{conn, l.frozen}, from) })
			wg.Go(func() { _, _ = io.Copy(lossy{from, l.frozen}, conn) })
		}
	})
	return l
}

func (l *link) freeze() { close(l.frozen) }

// lossy is a connection that swallows what is written once it is frozen.
type lossy struct {
	io.Writer
	frozen chan struct{}
}

func (l lossy) Write(b []byte) (int, error) {
	select {
	case <-l.frozen:
		return len(b), nil
	default:
		return l.Writer.Write(b)
	}
}
