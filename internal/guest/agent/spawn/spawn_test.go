package spawn

import (
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
)

// TestPipes: what one end is given the other gets; the agent's ends can have deadlines.
func TestPipes(t *testing.T) {
	for _, withStdin := range []bool{true, false} {
		s := openPipes(t, withStdin)
		pass := func(from, to *os.File, text string) {
			t.Helper()
			if _, err := from.WriteString(text); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 16)
			if n, err := to.Read(b); err != nil || string(b[:n]) != text {
				t.Errorf("read %q, %v, want %q", b[:n], err, text)
			}
		}
		pass(s.Child[1], s.Stdout, "out")
		pass(s.Child[2], s.Stderr, "err")
		own := []*os.File{s.Stdout, s.Stderr}
		if (s.Stdin != nil) != withStdin {
			t.Errorf("stdin %v, want one: %v", s.Stdin, withStdin)
		} else if withStdin {
			pass(s.Stdin, s.Child[0], "in")
			own = append(own, s.Stdin)
		}
		for _, f := range own {
			if err := f.SetDeadline(time.Now()); err != nil {
				t.Errorf("%s: %v", f.Name(), err)
			}
		}
	}
}

// TestChildsPipes: the child's ends block, and other children do not get them.
func TestChildsPipes(t *testing.T) {
	for i, f := range openPipes(t, true).Child {
		raw, err := f.SyscallConn() // not Fd, which makes a file block
		if err != nil {
			t.Fatal(err)
		}
		var status, flags int
		err = raw.Control(func(fd uintptr) {
			status, _ = unix.FcntlInt(fd, unix.F_GETFL, 0)
			flags, _ = unix.FcntlInt(fd, unix.F_GETFD, 0)
		})
		if err != nil || status&unix.O_NONBLOCK != 0 || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("file %d: %v, status %#x, flags %#x", i, err, status, flags)
		}
	}
}

func openPipes(t *testing.T, withStdin bool) *Stdio {
	t.Helper()
	s, err := OpenPipes(account.User{UID: uint32(os.Getuid()), GID: uint32(os.Getgid())}, withStdin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.CloseAll)
	return s
}

// TestPipesWithoutRoom leaves nothing open when the process may open no more.
func TestPipesWithoutRoom(t *testing.T) {
	open := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	before := open()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	for room := range 4 { // of the six that are needed
		low := limit
		low.Cur = uint64(before - 1 + room) // ReadDir's own is in before
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &low); err != nil {
			t.Fatal(err)
		}
		s, err := OpenPipes(account.User{}, true)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
		if err == nil {
			s.CloseAll()
			t.Errorf("with room for %d files: opened", room)
		} else if !strings.Contains(err.Error(), "pipe2: too many open files") {
			t.Errorf("with room for %d files: %v", room, err)
		}
		if after := open(); after != before {
			t.Fatalf("with room for %d files: %d are open, %d before", room, after, before)
		}
	}
}
