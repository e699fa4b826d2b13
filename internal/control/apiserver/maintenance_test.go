package apiserver_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/apiserver/etcd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const blockSize = 900 << 10 // of one object, below the limit of a request

func block(name string) *corev1.ConfigMap {
	cm := configMap(name)
	cm.BinaryData = map[string][]byte{"x": random(blockSize)}
	return cm
}

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return b
}

func openGate(t *testing.T) *health.Gate {
	t.Helper()
	g, err := health.NewGate(telemetry.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// fillStore makes objects until one is refused.
func fillStore(t *testing.T, c client.Client) {
	t.Helper()
	var err error
	for i := 0; err == nil && i < 40; i++ {
		err = c.Create(t.Context(), block(fmt.Sprintf("b-%d", i)))
	}
	if !apierrors.IsServiceUnavailable(err) {
		t.Fatalf("creates into a store of 16 MiB = %v", err)
	}
}

// fillForGood makes objects that, beside one of the same size, take more of a store of 16 MiB than
// new work may, and less than keeps etcd from taking writes at all: eleven of 1.23 MB each, as JSON
// has them. The store may refuse some for a while, as long as its file holds more than the objects.
func fillForGood(t *testing.T, c client.Client) {
	t.Helper()
	for i := range 10 {
		until(t, "room is made for another object", func(ctx context.Context) (bool, error) {
			b := block(fmt.Sprintf("b-%d", i))
			err := c.Create(ctx, b)
			if apierrors.IsServiceUnavailable(err) { // one that timed out may be there all the same
				err = c.Get(ctx, client.ObjectKeyFromObject(b), b)
				return err == nil, client.IgnoreNotFound(err)
			}
			return err == nil || apierrors.IsAlreadyExists(err), client.IgnoreAlreadyExists(err)
		})
	}
}

// A full store refuses new objects, takes deletions, and recovers automatically.
func TestFullStore(t *testing.T) {
	gate := openGate(t)
	s := start(t, func(c *apiserver.Config) { c.Listen, c.Gate, c.Etcd.QuotaBackendBytes = "", gate, 16<<20 })
	c, direct := clientAs(t, s, apiserver.UserAdmin), s.Direct(apiserver.UserController)
	first := block("first")
	if err := c.Create(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	fillForGood(t, c)
	until(t, "the gate is closed", func(context.Context) (bool, error) { return gate.Err() != nil, nil })
	if text, _ := errs.PublicMessage(gate.Err()); !strings.Contains(text, "object store: ") {
		t.Errorf("the public message is %q", text)
	}
	if err := c.Create(t.Context(), configMap("small")); !apierrors.IsServiceUnavailable(err) || !strings.Contains(err.Error(), "object store") {
		t.Errorf("a create meanwhile = %v", err)
	}
	if err := direct.Create(t.Context(), configMap("small")); !apierrors.IsServiceUnavailable(err) {
		t.Errorf("a direct create meanwhile = %v", err)
	}
	// What is there may still be written, until etcd itself takes no more.
	var full error
	for i := 0; i < 40 && full == nil; i++ {
		first.BinaryData["x"] = random(blockSize)
		full = c.Update(t.Context(), first)
	}
	if !apierrors.IsServiceUnavailable(full) || !strings.Contains(full.Error(), "full") {
		t.Fatalf("updates into a full store = %v", full)
	}
	// Its history is dropped, and it takes writes again, although nothing was deleted.
	until(t, "writes work again", func(ctx context.Context) (bool, error) {
		if err := c.Get(ctx, client.ObjectKeyFromObject(first), first); err != nil {
			return false, err
		}
		first.BinaryData = nil
		err := c.Update(ctx, first)
		return err == nil, err
	})
	if err := c.DeleteAllOf(t.Context(), &corev1.ConfigMap{}, client.InNamespace("default")); err != nil {
		t.Fatal(err)
	}
	until(t, "the gate opens", func(context.Context) (bool, error) { return gate.Err() == nil, gate.Err() })
	if err := c.Create(t.Context(), block("after")); err != nil {
		t.Errorf("a create afterwards = %v", err)
	}
}

// A store that was left full is opened again.
func TestStartOverFullStore(t *testing.T) {
	dir, gate := t.TempDir(), openGate(t)
	at := func(c *apiserver.Config) {
		c.DataDir, c.Listen, c.Gate, c.Etcd.QuotaBackendBytes = dir, "", gate, 16<<20
	}
	s := start(t, at)
	c := clientAs(t, s, apiserver.UserAdmin)
	fillStore(t, c)
	s.Stop()
	if err := clientAs(t, start(t, at), apiserver.UserAdmin).Get(t.Context(), client.ObjectKeyFromObject(configMap("b-0")), &corev1.ConfigMap{}); err != nil {
		t.Errorf("what was written before = %v", err)
	}
}

// While another condition closes the gate, new objects are refused, but for namespaces and events.
func TestClosedGate(t *testing.T) {
	gate := openGate(t)
	s := start(t, func(c *apiserver.Config) { c.Listen, c.Gate = "", gate })
	c := clientAs(t, s, apiserver.UserAdmin)
	if err := c.Create(t.Context(), configMap("before")); err != nil {
		t.Fatal(err)
	}
	gate.Set("disk", errs.Public(nil, "no room"))
	if err := c.Create(t.Context(), configMap("new")); !apierrors.IsServiceUnavailable(err) || !strings.Contains(err.Error(), "disk: no room") {
		t.Errorf("create = %v, want it refused with the reason", err)
	}
	if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: configMap("ns").ObjectMeta}); err != nil && !strings.Contains(err.Error(), "namespace") {
		t.Errorf("create of a namespace = %v", err)
	}
	changed := configMap("before")
	if err := c.Get(t.Context(), client.ObjectKeyFromObject(changed), changed); err != nil {
		t.Fatal(err)
	}
	changed.Data = map[string]string{"a": "b"}
	if err := c.Update(t.Context(), changed); err != nil {
		t.Errorf("update = %v", err)
	}
	if err := c.Delete(t.Context(), changed); err != nil {
		t.Errorf("delete = %v", err)
	}
	gate.Set("disk", nil)
	if err := c.Create(t.Context(), configMap("new")); err != nil {
		t.Errorf("create afterwards = %v", err)
	}
}

// tmpfs mounts a small filesystem for the test.
func tmpfs(t *testing.T, size string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil { // a stuck etcd has files open
			t.Error(err)
		}
	})
	return dir
}

// fill uses up the free space of a filesystem.
func fill(t *testing.T, dir string) (path string) {
	t.Helper()
	path = filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	zeros := make([]byte, 64<<10)
	for err == nil {
		_, err = f.Write(zeros)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("fill the disk: %v", err)
	}
	return path
}

// An error of the disk itself ends the server in the same way. The disk is a file on another
// one, which is full: the kernel reports a failed write only at a sync.
func TestSyncFails(t *testing.T) {
	below := tmpfs(t, "260m")
	image, disk := filepath.Join(below, "image"), t.TempDir()
	for _, c := range [][]string{
		{"truncate", "-s", "1G", image},
		{"mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=1", image},
		{"mount", "-o", "loop,errors=continue", image, disk},
	} {
		if out, err := exec.CommandContext(t.Context(), c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Skipf("SKIPPED: %v: %v %s", c, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(disk, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	s := start(t, func(c *apiserver.Config) { c.DataDir, c.Listen = filepath.Join(disk, "d"), "" })
	c := clientAs(t, s, apiserver.UserAdmin)
	ended := make(chan error, 1)
	go func() { ended <- s.Run(context.WithoutCancel(t.Context())) }()
	fill(t, below)
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	go func() { // until it has its answer
		for i := 0; ctx.Err() == nil; i++ {
			_ = c.Create(ctx, block(fmt.Sprintf("b-%d", i)))
		}
	}()
	select {
	case err := <-ended:
		var free unix.Statfs_t
		if err := unix.Statfs(disk, &free); err != nil || free.Bavail*uint64(free.Bsize) < 256<<20 {
			t.Fatalf("the disk has become full itself (%v): this shows nothing", err)
		}
		fromKernel := errors.Is(err, unix.EIO) || errors.Is(err, unix.ENOSPC)
		if !errors.Is(err, etcd.ErrStorage) || !fromKernel {
			t.Errorf("Run = %v, want an ErrStorage with the error of the kernel", err)
		}
		t.Log(err)
	case <-ctx.Done():
		t.Error("writes continue that reach no disk")
	}
}

// A full disk ends the server with an error, and with all acknowledged writes on it.
func TestDiskFull(t *testing.T) {
	disk := tmpfs(t, "300m")
	at := func(c *apiserver.Config) { c.DataDir, c.Listen = filepath.Join(disk, "d"), "" }
	s := start(t, at)
	c := clientAs(t, s, apiserver.UserAdmin)
	ended := make(chan error, 1)
	go func() { ended <- s.Run(context.WithoutCancel(t.Context())) }()
	filler := fill(t, disk)
	var kept []string
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	var err error
	for i := 0; err == nil && i < 200; i++ {
		name := fmt.Sprintf("b-%d", i)
		write := make(chan error, 1)
		go func() { write <- c.Create(ctx, block(name)) }()
		select {
		case failed := <-write:
			if failed == nil {
				kept = append(kept, name)
			}
		case err = <-ended:
		}
	}
	if err == nil {
		err = <-ended
	}
	if !errors.Is(err, etcd.ErrStorage) || !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("Run = %v, want an ErrStorage for the disk", err)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d writes before: %v", len(kept), err)
	copied := t.TempDir() // the files of a stuck etcd are locked: only another process could open them
	if err := os.CopyFS(copied, os.DirFS(filepath.Join(disk, "d"))); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(copied, "secrets.key"), 0o600); err != nil { // copies are readable for all
		t.Fatal(err)
	}
	again := clientAs(t, start(t, func(c *apiserver.Config) { c.DataDir, c.Listen = copied, "" }), apiserver.UserAdmin)
	for _, name := range kept {
		if err := again.Get(t.Context(), client.ObjectKeyFromObject(configMap(name)), &corev1.ConfigMap{}); err != nil {
			t.Errorf("%s was acknowledged: %v", name, err)
		}
	}
}
