package cli

import (
	"context"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// Ctrl-C ends a command that waits for more of what it is given to read.
func TestInputIsInterrupted(t *testing.T) {
	s := newServer(t, nil)
	for _, args := range []string{
		"checkpoint import -", "image import -", "apply -f -", "peers key add -", "image pull --username me --password-stdin some/image",
	} {
		in, more, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = more.Close() }) // ends one that waits for it
		if _, err := io.WriteString(more, "{"); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var printed strings.Builder
		code := make(chan int, 1)
		go func() {
			code <- Run(ctx, append([]string{"--data-dir", s.dir}, strings.Fields(args)...), in, io.Discard, &printed, app.Deps{})
			_ = in.Close()
		}()
		eventually.True(t, args+" reads", func() bool {
			left, err := unix.IoctlGetInt(int(more.Fd()), unix.TIOCINQ)
			return left == 0 || err != nil
		})
		cancel()
		eventually.True(t, args+" ends", func() bool { return len(code) == 1 })
		if got := <-code; got != 130 || printed.String() != "" {
			t.Errorf("%s ended with %d and printed %q", args, got, printed.String())
		}
	}
}

// Ctrl-C at a question is no answer, and at the one for a password it has the terminal show again what is typed.
func TestQuestionsAreInterrupted(t *testing.T) {
	s := newServer(t, nil)
	for args, question := range map[string]string{
		"net release 10.87.0.3":            "to any sandbox? [y/N] ",
		"image pull --username me some/it": "Password: ",
	} {
		y := s.atTerminal(t, nil, strings.Fields(args)...)
		y.sees(question)
		shown := func() bool {
			mode, err := unix.IoctlGetTermios(int(y.keys.Fd()), unix.TCGETS)
			if err != nil {
				t.Fatal(err)
			}
			return mode.Lflag&unix.ECHO != 0
		}
		if strings.HasPrefix(question, "Password") {
			eventually.True(t, "nothing is shown", func() bool { return !shown() })
		}
		if _, err := io.WriteString(y.keys, "\x03"); err != nil {
			t.Fatal(err)
		}
		eventually.True(t, "what is typed is shown", shown)
		y.ends(130)
	}
}
