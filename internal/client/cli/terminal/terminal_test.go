package terminal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

func TestWords(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Age(-time.Second), "0s"},
		{Age(119 * time.Second), "119s"},
		{Age(2 * time.Minute), "2m"},
		{Age(119 * time.Minute), "119m"},
		{Age(47 * time.Hour), "47h"},
		{Age(49 * time.Hour), "2d"},
		{Since(time.Time{}), "-"},
		{Until(time.Time{}), "-"},
		{Size(0), "0 B"},
		{Size(1023), "1023 B"},
		{Size(1 << 20), "1.0 MiB"},
		{Size(1536 << 20), "1.5 GiB"},
		{Size(1 << 60), "1048576.0 TiB"},
		{Pairs(map[string]string{"b": "2", "a": "1"}), "a=1,b=2"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}

func TestProgressWithoutTerminal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := NewProgress(&out)
		p.Event(adminclient.Event{Step: "fetch"})
		for n := range int64(10_000) { // of 25 s
			p.Event(adminclient.Event{Step: "unpack", Message: fmt.Sprint("file ", n), Done: n, Total: 10_000})
			time.Sleep(2500 * time.Microsecond)
		}
		p.Event(adminclient.Event{Step: "unpack", Done: 10_000, Total: 10_000})
		p.Event(adminclient.Event{Step: "unpack", Done: 10_000, Total: 10_000})
		p.Event(adminclient.Event{Message: "almost there"})
		p.End()
		want := "fetch\nunpack: file 0   0%\nunpack: file 4000  40%\nunpack: file 8000  80%\nunpack 100%\nalmost there\n"
		if out.String() != want {
			t.Errorf("got %q, want %q", out.String(), want)
		}
	})
}

// TestPlain has no character reach a terminal that commands it, or reverses text.
func TestPlain(t *testing.T) {
	for text, want := range map[string]string{
		"näme 名 🙂":                     "näme 名 🙂",
		"a\x1b[2Jb\rc\nd\te\x00\x7f":   `a\x1b[2Jb\rc\nd\te\x00\x7f`,
		"\u009b31m":                    `\u009b31m`,
		"abc\u202etxt.exe\u2066\u200f": `abc\u202etxt.exe\u2066\u200f`,
		"\xff\xfe ok":                  `\xff\xfe ok`,
		"it's":                         "it's",
		strings.Repeat("é", 600):       strings.Repeat("é", maxPlain) + "…",
	} {
		if got := Plain(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// TestSignalTwiceAtOnce: a signal that arrives twice, as timeout(1) sends it, leaves a command the time to clean up.
func TestSignalTwiceAtOnce(t *testing.T) {
	// The signals are not restored: the kernel may deliver the second one after Kill returned.
	ctx, _ := WithSignals(t.Context())
	for range 2 {
		if err := syscall.Kill(os.Getpid(), syscall.SIGINT); err != nil {
			t.Fatal(err)
		}
		<-ctx.Done()
	}
	if sig, ok := errors.AsType[Interrupted](context.Cause(ctx)); !ok || sig.Signal != syscall.SIGINT {
		t.Errorf("%v, want that of the signal", context.Cause(ctx))
	}
}

// A long table takes few writes, each of which is a system call.
func TestTableIsBuffered(t *testing.T) {
	tab := NewTable("ID", "NAME")
	for range 1000 {
		tab.Add("i0123456789", "name")
	}
	var w writes
	tab.Write(&w)
	if w.count > 2 || w.lines != 1001 {
		t.Errorf("%d writes of %d lines", w.count, w.lines)
	}
}

type writes struct{ count, lines int }

func (w *writes) Write(p []byte) (int, error) {
	w.count++
	w.lines += bytes.Count(p, []byte("\n"))
	return len(p), nil
}
