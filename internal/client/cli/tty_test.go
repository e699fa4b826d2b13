package cli

import (
	"bytes"
	"errors"
	"io"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// screen collects what a terminal shows.
type screen struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *screen) has(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(s.b.String(), text)
}

// TestTerminal drives `exec -it` as a person would: the program on a real
// terminal, the real agent behind the gateway.
func TestTerminal(t *testing.T) {
	s := newServer(t, startAgent(t))
	s.add(id1, "running", nil)
	cmd := exec.CommandContext(t.Context(), "barchan", "--data-dir", s.dir, "exec", "-it", "-e", "PS1=ready> ", id1, "--", "sh", "-i")
	keys, terminal, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	if err := pty.Setsize(keys, &pty.Winsize{Rows: 31, Cols: 101}); err != nil {
		t.Fatal(err)
	}
	before, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, terminal, terminal
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	shows := &screen{}
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = io.Copy(shows, keys) }) // ends with the terminal, which is the program's too until it has ended
	t.Cleanup(func() { _ = keys.Close(); _ = terminal.Close(); wg.Wait() })
	typed := func(text string) {
		t.Helper()
		if _, err := io.WriteString(keys, text); err != nil {
			t.Fatal(err)
		}
	}
	sees := func(text string) {
		t.Helper()
		eventually.True(t, "the terminal shows "+text, func() bool { return shows.has(text) })
	}
	sees("ready> ")
	typed("stty size\r")
	sees("31 101")
	if err := pty.Setsize(keys, &pty.Winsize{Rows: 41, Cols: 121}); err != nil {
		t.Fatal(err)
	}
	typed("until stty size | grep -q '41 121'; do sleep 0.01; done; echo grown-$((40+2))\r") // a prompt may come between
	sees("grown-42")
	// Ctrl-C is the remote command's, not the program's.
	typed("sh -c 'trap \"echo caught-$((6*7)); exit\" INT; echo armed-$((1+1)); while :; do sleep 0.05; done'\r")
	sees("armed-2")
	typed("\x03")
	sees("caught-42")
	typed("exit 7\r")
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("ended with %v, want exit code 7", err)
	}
	after, err := unix.IoctlGetTermios(int(terminal.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("the terminal was left in another state: %+v, %v; before %+v", after, err, before)
	}
}

// TestProgressOnTerminal draws on one line of a terminal.
func TestProgressOnTerminal(t *testing.T) {
	s := newServer(t, nil)
	cmd := exec.CommandContext(t.Context(), "barchan", "--data-dir", s.dir, "image", "pull", "reg.test/a:1")
	keys, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = keys.Close() }()
	shows := &screen{}
	_, _ = io.Copy(shows, keys) // ends with an error when the terminal does
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if !shows.has("\r\x1b[K[########################] 100% of 100 B  pull\r\nreg.test/a:1") {
		t.Errorf("shows %q", shows.b.String())
	}
}
