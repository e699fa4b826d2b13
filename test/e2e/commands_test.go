package e2e

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// command is a command of ours that a test does things to while it runs.
type command struct {
	*exec.Cmd
	t      *testing.T
	out    io.ReadCloser
	stderr bytes.Buffer
}

func (s *server) command(args ...string) *command {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	s.t.Cleanup(cancel)
	c := &command{Cmd: exec.CommandContext(ctx, programs.barchan, args...), t: s.t}
	c.Env, c.Stderr = s.env, &c.stderr
	var err error
	if c.out, err = c.StdoutPipe(); err == nil {
		err = c.Start()
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// prints waits for the first line.
func (c *command) prints(line string) {
	c.t.Helper()
	got := make([]byte, len(line))
	if _, err := io.ReadFull(c.out, got); err != nil || string(got) != line {
		c.t.Fatalf("%v: %q, %v", c.Args[1:], got, err)
	}
}

func (c *command) ends(code int, text string) {
	c.t.Helper()
	_ = c.Wait() // the exit code is checked below
	if got := c.ProcessState.ExitCode(); got != code || !strings.Contains(c.stderr.String(), text) {
		c.t.Errorf("%v: exit code %d, %s; want %d, %s", c.Args[1:], got, c.stderr.String(), code, text)
	}
}

// TestCommandsEnd ends commands in every way that is not their own, and checks for leftovers.
func TestCommandsEnd(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	id, _ := s.keep("base", "true")
	alone := func() {
		t.Helper()
		if got := s.data("ls"); strings.Count(got, "\n") != 2 || !strings.Contains(got, id) {
			t.Errorf("want one sandbox:\n%s", got)
		}
		if got := s.exec(id, "pgrep -c -f 'sleep 1000|yes' || true"); got != "1" { // pgrep's own shell
			t.Errorf("%s processes match", got)
		}
	}
	for _, verb := range [][]string{{"run"}, {"exec", id}} {
		c := s.command(append(verb, "--", "sh", "-c", "yes; true")...)
		c.prints("y\n")
		_ = c.out.Close()
		c.ends(141, "")
		for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
			if signal.Ignored(sig) { // the tests run under nohup, whose children ignore SIGHUP too
				continue
			}
			c := s.command(append(verb, "--", "sh", "-c", "echo begun; exec sleep 1000")...)
			c.prints("begun\n")
			if err := c.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			c.ends(128+int(sig), "")
		}
		alone()
	}
	s.command("run", "--", "nonesuch").ends(127, "executable file not found")
	s.command("exec", id, "--", "/etc/passwd").ends(126, "permission denied")
	s.command("run", "--timeout", "3s", "--", "sleep", "1000").ends(1, "ended at its timeout")
	alone()

	begun := func() *command {
		c := s.command("exec", id, "--", "sh", "-c", "echo begun; exec sleep 1000")
		c.prints("begun\n")
		return c
	}
	c := begun()
	s.must("pause", id)
	c.ends(1, "was paused while it was in use; `barchan resume "+id)
	s.command("logs", id).ends(1, "is paused; resume it with `barchan resume "+id)
	s.must("resume", id)
	c = begun()
	s.stop(syscall.SIGKILL)
	c.ends(1, "is out of reach; sandboxes keep running without it")
	s.start()
	c = begun()
	s.must("kill", id)
	c.ends(1, "sandbox "+id+" ended while it was in use")
}

// TestCopies has files keep their modes and times, and a directory go from sandbox to sandbox as a tar.
func TestCopies(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	id, _ := s.keep("base", "true")
	dir := t.TempDir()
	at := time.Date(2001, 2, 3, 4, 5, 6, 789_000_000, time.UTC)
	file := filepath.Join(dir, "d", "f")
	if err := errors.Join(os.Mkdir(filepath.Dir(file), 0o700), os.WriteFile(file, []byte("x"), 0o640), os.Chtimes(file, at, at)); err != nil {
		t.Fatal(err)
	}
	s.must("cp", file, id+":/tmp/f")
	s.must("cp", filepath.Dir(file), id+":/tmp/d")
	for _, name := range []string{"/tmp/f", "/tmp/d/f"} {
		if got := s.exec(id, "stat -c '%a %.3Y %U' "+name); got != "640 981173106.789 user" {
			t.Errorf("%s: %s", name, got)
		}
	}
	other, _ := s.keep("base", "true")
	if out, err := s.tryIn(s.data("cp", id+":/tmp/d", "-"), "cp", "-", other+":/tmp"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	s.must("cp", other+":/tmp/d", filepath.Join(dir, "back"))
	if info, err := os.Stat(filepath.Join(dir, "back", "f")); err != nil || info.Mode() != 0o640 || !info.ModTime().Equal(at) {
		t.Errorf("%+v, %v", info, err)
	}
	s.exec(id, "mkfifo /tmp/d/pipe; ln -s b /tmp/a; ln -s a /tmp/b")
	s.command("cp", id+":/tmp/d", filepath.Join(dir, "more")).ends(1, "skipped pipe: FIFOs are not copied")
	s.command("cp", id+":/tmp/a", dir).ends(1, "too many levels of symbolic links")
}

// TestRunVariants overrides template settings by flags of run.
func TestRunVariants(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	out := s.data("run", "--memory", "256Mi", "-u", "1234:5678", "--", "sh", "-c", "id -u; id -g; free -m | awk '/Mem/{print $2}'")
	if out != "1234\n5678\n256\n" {
		t.Errorf("%q", out)
	}
	id := strings.TrimSpace(s.data("run", "--keep", "--cpu", "1"))
	s.must("pause", id) // its template is gone by now
	s.must("resume", id)
	pid := strings.TrimSpace(s.data("exec", "-d", id, "--", "sleep", "1000"))
	eventually.True(t, "the detached command runs", func() bool { return s.exec(id, "ps -o args= -p "+pid) == "sleep 1000" })
	if got := s.data("template", "ls", "-A"); strings.Contains(got, "run-") {
		t.Errorf("a template is left:\n%s", got)
	}
}
