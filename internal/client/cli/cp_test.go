package cli

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestCopyKeeps copies there and back: what comes back has the modes and times of what went.
func TestCopyKeeps(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	local, remote := t.TempDir(), t.TempDir()
	at := time.Date(2001, 2, 3, 4, 5, 6, 789_000_000, time.UTC)
	tree := filepath.Join(local, "tree")
	modes := map[string]fs.FileMode{".": 0o775, "f": 0o640, "open": 0o666, "d": 0o500, "d/x": 0o711}
	err := errors.Join(os.MkdirAll(tree+"/d", 0o700), os.WriteFile(tree+"/f", nil, 0o600),
		os.WriteFile(tree+"/open", nil, 0o600), os.WriteFile(tree+"/d/x", nil, 0o600))
	for _, name := range []string{"f", "open", "d/x", "d", "."} {
		err = errors.Join(err, os.Chtimes(filepath.Join(tree, name), at, at), os.Chmod(filepath.Join(tree, name), modes[name]))
	}
	if err != nil {
		t.Fatal(err)
	}
	check := func(file string, mode fs.FileMode) {
		t.Helper()
		info, err := os.Stat(file)
		if err != nil || info.Mode().Perm() != mode || !info.ModTime().Equal(at) {
			t.Errorf("%s: %v, %v, %v; want %v, %v", file, info.Mode(), info.ModTime(), err, mode, at)
		}
	}
	s.run("", "cp", tree, "iaaa:"+remote+"/tree").want(t, 0, "", "")
	s.run("", "cp", "iaaa:"+remote+"/tree", local+"/back").want(t, 0, "", "")
	for name, mode := range modes {
		check(filepath.Join(remote, "tree", name), mode)
		check(filepath.Join(local, "back", name), mode)
	}
	s.run("", "cp", tree+"/f", "iaaa:"+remote+"/file").want(t, 0, "", "")
	s.run("", "cp", "iaaa:"+remote+"/file", local+"/file").want(t, 0, "", "")
	check(remote+"/file", 0o640)
	check(local+"/file", 0o640)
}

// TestCopyNamesWhatItSkips has FIFOs and sockets on both sides.
func TestCopyNamesWhatItSkips(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	local, remote := t.TempDir(), t.TempDir()
	if err := errors.Join(os.WriteFile(local+"/f", []byte("x"), 0o600), unix.Mkfifo(local+"/pi\x1bpe", 0o600)); err != nil {
		t.Fatal(err)
	}
	s.run("", "cp", local, "iaaa:"+remote+"/in").want(t, 1, "", "barchan: skipped "+local+`/pi\x1bpe: FIFOs are not copied`+"\n")
	if b, err := os.ReadFile(remote + "/in/f"); string(b) != "x" {
		t.Errorf("%q, %v: the rest was not copied", b, err)
	}
	s.run("", "cp", local+"/pi\x1bpe", "iaaa:"+remote+"/in/other").want(t, 1, "", "FIFOs are not copied")
	if err := errors.Join(unix.Mkfifo(remote+"/in/pipe", 0o600), unix.Mknod(remote+"/in/socket", unix.S_IFSOCK|0o600, 0)); err != nil {
		t.Fatal(err)
	}
	back := s.run("", "cp", "iaaa:"+remote+"/in", local+"/back")
	back.want(t, 1, "", "barchan: skipped pipe: FIFOs are not copied\n")
	if !strings.Contains(back.stderr, "socket ignored") {
		t.Errorf("no message on the socket: %s", back.stderr)
	}
	if b, err := os.ReadFile(local + "/back/f"); string(b) != "x" {
		t.Errorf("%q, %v: the rest was not copied", b, err)
	}
	s.run("", "cp", "iaaa:"+remote+"/in/pipe", local+"/pipe").want(t, 1, "", "neither a file nor a directory")
}

// TestCopyOfLinkLoop ends.
func TestCopyOfLinkLoop(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	dir := t.TempDir()
	if err := errors.Join(os.Symlink("b", dir+"/a"), os.Symlink("a", dir+"/b"), os.Symlink("self", dir+"/self")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "self"} {
		s.run("", "cp", "iaaa:"+dir+"/"+name, t.TempDir()).want(t, 1, "", "barchan: "+dir+"/"+name+": too many levels of symbolic links\n")
		s.run("x", "cp", "-", "iaaa:"+dir+"/"+name+"/").want(t, 1, "", "too many levels of symbolic links")
		s.run("", "cp", dir+"/"+name, "iaaa:"+dir+"/new").want(t, 1, "", "too many levels of symbolic links")
	}
	// Within a directory links are copied as such.
	to := t.TempDir() + "/copy"
	s.run("", "cp", "iaaa:"+dir, to).want(t, 0, "", "")
	s.run("", "cp", to, "iaaa:"+to+"2").want(t, 0, "", "")
	for name, want := range map[string]string{"a": "b", "b": "a", "self": "self"} {
		if got, err := os.Readlink(to + "2/" + name); got != want {
			t.Errorf("%s leads to %q, %v; want %q", name, got, err, want)
		}
	}
}

// TestCopyTar has a directory go through standard output and input.
func TestCopyTar(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	from, to := t.TempDir(), t.TempDir()
	if err := errors.Join(os.MkdirAll(from+"/-data/sub", 0o755), os.WriteFile(from+"/-data/sub/f", []byte("x"), 0o600)); err != nil {
		t.Fatal(err)
	}
	tar := s.run("", "cp", "iaaa:"+from+"/-data", "-")
	tar.want(t, 0, "", "")
	for _, dest := range []string{to, to + "/new/"} {
		s.run(tar.stdout, "cp", "-", "iaaa:"+dest).want(t, 0, "", "")
		if b, err := os.ReadFile(filepath.Join(dest, "-data/sub/f")); string(b) != "x" {
			t.Errorf("%s: %q, %v", dest, b, err)
		}
	}
	s.run("no tar", "cp", "-", "iaaa:"+to).want(t, 1, "", "tar in the sandbox: exit code 2")
}
