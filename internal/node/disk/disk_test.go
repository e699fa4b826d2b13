package disk_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func newStore(t testing.TB) (*disk.Store, string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for mounts")
	}
	dir := t.TempDir()
	s := disk.Open(filepath.Join(dir, "templates"))
	if err := s.Fault(); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	t.Cleanup(func() {
		if err := disk.DiscardBelow(dir); err != nil {
			t.Error(err)
		}
	})
	return s, dir
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func fill(dir string) (n int, err error) {
	f, err := os.Create(filepath.Join(dir, "fill"))
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	block := make([]byte, 1<<20)
	for ; n < 200; n++ {
		if _, err := f.Write(block); err != nil {
			return n, err
		}
	}
	return n, nil
}

func TestBytesAreBounded(t *testing.T) {
	s, dir := newStore(t)
	image, at := filepath.Join(dir, "a.img"), filepath.Join(dir, "a")
	must(t, s.Mount(t.Context(), image, at, 64<<20))
	n, err := fill(at)
	if !errors.Is(err, unix.ENOSPC) || n < 60 || n > 68 {
		t.Errorf("%d MiB written, then %v; want about 64 and ENOSPC", n, err)
	}
}

func TestInodesAreBounded(t *testing.T) {
	s, dir := newStore(t)
	image, at := filepath.Join(dir, "a.img"), filepath.Join(dir, "a")
	must(t, s.Mount(t.Context(), image, at, 32<<20))
	u, err := disk.UsageOf(at)
	must(t, err)
	for i := range u.MaxFiles + 1 {
		if err = os.Symlink("x", filepath.Join(at, string(rune('a'+i%26))+filepath.Base(filepath.Clean(itoa(i))))); err != nil {
			break
		}
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("with %d inodes: %v, want ENOSPC", u.MaxFiles, err)
	}
}

func itoa(i int64) string {
	if i < 10 {
		return string(rune('0' + i))
	}
	return itoa(i/10) + string(rune('0'+i%10))
}

func TestRemovalReturnsSpace(t *testing.T) {
	s, dir := newStore(t)
	image, at := filepath.Join(dir, "a.img"), filepath.Join(dir, "a")
	must(t, s.Mount(t.Context(), image, at, 128<<20))
	empty := disk.Allocated(image)
	if empty > 12<<20 {
		t.Errorf("an empty disk takes %d bytes", empty)
	}
	must(t, os.WriteFile(filepath.Join(at, "big"), make([]byte, 64<<20), 0o600))
	unix.Sync()
	if used := disk.Allocated(image) - empty; used < 60<<20 {
		t.Errorf("64 MiB take %d bytes", used)
	}
	must(t, os.Remove(filepath.Join(at, "big")))
	f, err := os.Open(at)
	must(t, err)
	must(t, unix.Syncfs(int(f.Fd())))
	must(t, f.Close())
	eventually.True(t, "the space is returned", func() bool { return disk.Allocated(image)-empty < 4<<20 })
}

// A disk that is detached but in use has one device, or two would write the same blocks.
func TestMountedAgainWhileInUse(t *testing.T) {
	s, dir := newStore(t)
	image, at := filepath.Join(dir, "a.img"), filepath.Join(dir, "a")
	must(t, s.Mount(t.Context(), image, at, 16<<20))
	must(t, s.Mount(t.Context(), image, at, 16<<20))
	f, err := os.Create(filepath.Join(at, "held"))
	must(t, err)
	must(t, disk.Unmount(at))
	must(t, s.Mount(t.Context(), image, at, 16<<20))
	_, err = f.WriteString("late")
	must(t, errors.Join(err, f.Close()))
	if text, err := os.ReadFile(filepath.Join(at, "held")); string(text) != "late" {
		t.Errorf("the other mount reads %q, %v", text, err)
	}
	must(t, disk.Unmount(at))
	must(t, s.Mount(t.Context(), image, at, 0))
	if text, err := os.ReadFile(filepath.Join(at, "held")); string(text) != "late" {
		t.Errorf("mounted again, it reads %q, %v", text, err)
	}
}

func TestGrow(t *testing.T) {
	s, dir := newStore(t)
	image, at := filepath.Join(dir, "a.img"), filepath.Join(dir, "a")
	must(t, s.Mount(t.Context(), image, at, 32<<20))
	must(t, os.WriteFile(filepath.Join(at, "kept"), []byte("x"), 0o600))
	must(t, s.Mount(t.Context(), image, at, 128<<20))
	must(t, disk.Unmount(at))
	must(t, s.Mount(t.Context(), image, at, 128<<20))
	if n, err := fill(at); n < 110 || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%d MiB written, then %v", n, err)
	}
	must(t, s.Mount(t.Context(), image, at, 16<<20)) // never smaller
}

// The host's disk fills, by whatever: sandboxes get ENOSPC before their disks lose blocks, and write again later.
func TestHostDiskFills(t *testing.T) {
	newStore(t)
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=320m"))
	t.Cleanup(func() { must(t, errors.Join(disk.DiscardBelow(dir), unix.Unmount(dir, unix.MNT_DETACH))) })
	s := disk.Open(filepath.Join(dir, "templates"))
	at := filepath.Join(dir, "a")
	must(t, s.Mount(t.Context(), filepath.Join(dir, "a.img"), at, 1<<30))
	must(t, os.WriteFile(filepath.Join(at, "before"), make([]byte, 1<<20), 0o600))
	unix.Sync()
	full, err := s.CheckRoom(true, 0)
	if must(t, err); full {
		t.Fatal("full at the start")
	}
	must(t, os.WriteFile(filepath.Join(dir, "other"), make([]byte, 260<<20), 0o600))
	for range 2 {
		if full, err = s.CheckRoom(full, 0); err != nil || !full {
			t.Fatalf("full %v, %v", full, err)
		}
	}
	if n, err := fill(at); n > 2 || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%d MiB written, then %v", n, err)
	}
	must(t, os.Remove(filepath.Join(dir, "other")))
	if full, err = s.CheckRoom(full, 0); err != nil || full {
		t.Fatalf("full %v, %v", full, err)
	}
	must(t, os.WriteFile(filepath.Join(at, "after"), make([]byte, 16<<20), 0o600))
}

// What the host's file system reserves for root, or for nobody, is no room: the server may run as another user.
func TestReservedBlocksAreNoRoom(t *testing.T) {
	newStore(t)
	dir := t.TempDir()
	image, host := filepath.Join(dir, "host.img"), filepath.Join(dir, "host")
	must(t, errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 400<<20), os.Mkdir(host, 0o755)))
	for _, command := range [][]string{{"mke2fs", "-q", "-t", "ext4", "-m", "40", image}, {"mount", "-o", "loop", image, host}} {
		if out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v: %s", command, err, out)
		}
	}
	t.Cleanup(func() { must(t, errors.Join(disk.DiscardBelow(host), unix.Unmount(host, unix.MNT_DETACH))) })
	s := disk.Open(filepath.Join(host, "templates"))
	at := filepath.Join(host, "a")
	must(t, s.Mount(t.Context(), filepath.Join(host, "a.img"), at, 1<<30))
	must(t, os.WriteFile(filepath.Join(host, "other"), make([]byte, 170<<20), 0o600))
	unix.Sync()
	if full, err := s.CheckRoom(false, 0); err != nil || !full {
		u, _ := disk.UsageOf(host)
		t.Fatalf("full %v, %v; %+v", full, err, u)
	}
	if n, err := fill(at); n > 2 || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("%d MiB written, then %v", n, err)
	}
}

func TestSpares(t *testing.T) {
	s, dir := newStore(t)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	templates := filepath.Join(dir, "templates")
	spares := func() int {
		found, err := filepath.Glob(filepath.Join(templates, "spare-*-image"))
		must(t, err)
		return len(found)
	}
	go func() {
		defer close(ended)
		s.KeepSpares(ctx, 32<<20, slog.New(slog.DiscardHandler))
	}()
	eventually.True(t, "spares are made", func() bool { return spares() == 3 }) // two, and the next
	for i, bytes := range []int64{32 << 20, 32 << 20, 64 << 20} {
		at := filepath.Join(dir, string(rune('a'+i)))
		must(t, s.Mount(t.Context(), at+".img", at, bytes))
		must(t, os.WriteFile(filepath.Join(at, "x"), []byte("x"), 0o600))
		if u, err := disk.UsageOf(at); err != nil || u.Total < bytes || u.Total > bytes+disk.Slack {
			t.Errorf("%d of %d: %+v, %v", i, bytes, u, err)
		}
	}
	eventually.True(t, "more are made", func() bool { return spares() == 3 })
	disk.Open(templates) // as after a crash: those of the earlier process are removed, and no others
	if n := spares(); n != 0 {
		t.Errorf("%d spares left", n)
	}
	stop()
	<-ended
	for i := range 3 {
		at := filepath.Join(dir, string(rune('a'+i)))
		must(t, disk.Unmount(at))
		must(t, s.Mount(t.Context(), at+".img", at, 0))
		if text, err := os.ReadFile(filepath.Join(at, "x")); string(text) != "x" {
			t.Errorf("%d: %q, %v", i, text, err)
		}
	}
	if table, err := os.ReadFile("/proc/self/mounts"); err != nil || strings.Contains(string(table), templates) {
		t.Error("spares still mounted")
	}
}

func BenchmarkCreate(b *testing.B) {
	s, dir := newStore(b)
	for b.Loop() {
		image, at := filepath.Join(dir, "a.img"), filepath.Join(dir, "a")
		must(b, s.Mount(b.Context(), image, at, 10<<30))
		must(b, os.WriteFile(filepath.Join(at, "x"), []byte("x"), 0o600))
		must(b, disk.Discard(at))
		must(b, os.Remove(image))
	}
}

// TestTooLarge: a disk larger than a file can be is refused in a sentence for users, without a path of this machine.
func TestTooLarge(t *testing.T) {
	s, dir := newStore(t)
	var fs unix.Statfs_t
	must(t, unix.Statfs(dir, &fs))
	if fs.Type != unix.EXT4_SUPER_MAGIC {
		t.Skip("SKIPPED: the largest file of another file system than ext4 is not known")
	}
	err := s.Mount(t.Context(), filepath.Join(dir, "image"), filepath.Join(dir, "at"), 99<<50)
	if text, ok := errs.PublicMessage(err); !ok || !errors.Is(err, errs.ErrInvalid) || strings.Contains(text, dir) {
		t.Errorf("%v, want a sentence for users", err)
	}
}
