// Package filetreetest describes and compares directory trees in tests.
package filetreetest

import (
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
)

// Change makes every kind of change to a tree that an image can carry.
func Change(t *testing.T, dir string) {
	t.Helper()
	in := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.Remove(in("kept/a")))
	must(t, os.RemoveAll(in("gone")))
	must(t, os.RemoveAll(in("replaced")))
	must(t, os.Mkdir(in("replaced"), 0o711))
	must(t, os.WriteFile(in("replaced/new"), []byte("new"), 0o600))
	must(t, os.WriteFile(in("kept/b"), []byte("changed"), 0o640))
	must(t, os.Lchown(in("kept/b"), 1000, 1001))
	must(t, os.WriteFile(in("tool"), []byte("x"), 0o755))
	must(t, os.Chown(in("tool"), 1000, 0))
	must(t, os.Chmod(in("tool"), 0o755|fs.ModeSetuid|fs.ModeSetgid))
	must(t, unix.Setxattr(in("tool"), "user.note", []byte("a\x00b"), 0))
	must(t, unix.Setxattr(in("tool"), "security.capability", []byte("\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0))
	must(t, os.Symlink("/etc/passwd", in("link")))
	must(t, os.Lchown(in("link"), 7, 8))
	must(t, os.Link(in("tool"), in("kept/tool2")))
	must(t, unix.Mkfifo(in("fifo"), 0o622))
	must(t, unix.Mknod(in("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, os.Mkdir(in("sticky"), 0o777))
	must(t, os.Chmod(in("sticky"), 0o777|fs.ModeSticky))
	must(t, os.WriteFile(in("sticky/odd\nname \xff"), []byte("odd"), 0o600))
	f, err := os.Create(in("sparse"))
	must(t, err)
	must(t, f.Truncate(64<<20))
	_, err = f.WriteAt([]byte("middle"), 30<<20)
	must(t, err)
	must(t, f.Close())
	for _, name := range []string{"tool", "link", "sticky", "kept", "fifo"} {
		old := []unix.Timespec{{Sec: 1e9, Nsec: 123456789}, {Sec: 1e9 + 5, Nsec: 987654321}}
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, in(name), old, unix.AT_SYMLINK_NOFOLLOW))
	}
}

// Describe returns all properties of each entry of a tree.
func Describe(t *testing.T, dir string) map[string]string {
	t.Helper()
	described := map[string]string{}
	inodes := map[uint64]string{}
	must(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		rel, _ := filepath.Rel(dir, path)
		var st unix.Stat_t
		must(t, unix.Lstat(path, &st))
		first, ok := inodes[st.Ino]
		if !ok {
			first, inodes[st.Ino] = rel, rel
		}
		var line strings.Builder
		fmt.Fprintf(&line, "mode=%o owner=%d:%d dev=%x time=%d.%d same=%q", st.Mode, st.Uid, st.Gid, st.Rdev, st.Mtim.Sec, st.Mtim.Nsec, first)
		attrs, err := filetree.Attributes(path)
		must(t, err)
		for _, name := range slices.Sorted(maps.Keys(attrs)) {
			fmt.Fprintf(&line, " %s=%q", name, attrs[name])
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			f, err := os.Open(path)
			must(t, err)
			defer func() { _ = f.Close() }()
			sum := sha256.New()
			_, err = io.Copy(sum, f)
			must(t, err)
			fmt.Fprintf(&line, " size=%d sum=%x", st.Size, sum.Sum(nil)[:6])
		case unix.S_IFLNK:
			target, err := os.Readlink(path)
			must(t, err)
			line.WriteString(" to=" + target)
		}
		described[rel] = line.String()
		return nil
	}))
	return described
}

// Same fails the test unless two descriptions are equal.
func Same(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	for name := range want {
		if got[name] != want[name] {
			t.Errorf("%s: %q is\n%s, want\n%s", what, name, got[name], want[name])
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%s: unexpected %q", what, name)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Deep makes nested directories with long names, as a program in a sandbox can.
func Deep(t *testing.T, dir string, levels int) {
	t.Helper()
	name := strings.Repeat("d", 255)
	fd, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_RDONLY, 0)
	must(t, err)
	for range levels {
		must(t, unix.Mkdirat(fd, name, 0o700))
		below, err := unix.Openat(fd, name, unix.O_DIRECTORY|unix.O_RDONLY, 0)
		must(t, err)
		must(t, unix.Close(fd))
		fd = below
	}
	must(t, unix.Close(fd))
}
