package buildlog

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/builds"
)

// TestTail has the last lines of all writers of a log, as kubectl may print them.
func TestTail(t *testing.T) {
	t.Parallel()
	store, err := builds.Open(builds.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	l := New(store, slog.New(slog.DiscardHandler), "u", "base", []string{"[base] before"})
	l.Say(builds.LevelInfo, "building %s", "x")
	l.Step = "1"
	l.Say(builds.LevelInfo, "RUN one\ntwo")
	out := l.Output(builds.LevelWarn)
	for _, text := range []string{"\x1b[1;31mred\x1b[0m\n", "10%\r 90%\r100%\r\n", "\x1b]0;title\x07a\tb\x00\xff\u202e\n", "\n", "no end"} {
		if _, err := out.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	out.Flush()
	want := []string{"[base] before", "[base] building x", "[1] RUN one", "[1] two", "[1] red", "[1] 100%", "[1] a b\ufffd", "[1] no end"}
	if got := l.Tail(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	for i := range 2 * barchan.BuildLogLines {
		l.Say(builds.LevelInfo, "%d", i)
	}
	l.Say(builds.LevelInfo, "%s", strings.Repeat("é", barchan.BuildLogLine))
	got := l.Tail()
	if len(got) != barchan.BuildLogLines || got[0] != fmt.Sprintf("[1] %d", barchan.BuildLogLines+1) {
		t.Errorf("%d lines from %q", len(got), got[0])
	}
	if last := got[len(got)-1]; len(last) > barchan.BuildLogLine || !utf8.ValidString(last) || !strings.HasSuffix(last, "é…") {
		t.Errorf("a long line is %q", last)
	}
}
