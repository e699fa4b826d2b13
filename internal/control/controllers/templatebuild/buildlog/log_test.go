package buildlog

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/control/builds"
)

// TestLogHasNoSecret writes secrets in lines of all lengths, in pieces.
func TestLogHasNoSecret(t *testing.T) {
	t.Parallel()
	store, err := builds.Open(builds.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	const secret, line = "s3cr3t-of-20-letters", "second-line"
	l := &Log{store: store, build: types.UID("u"), level: builds.LevelInfo, mask: masksOf(map[string][]byte{"a": []byte(secret + "\n " + line + "\r\nab\n"), "b": nil}), tail: &tail{}}
	text := "it is " + secret + " and " + line + " and ab\n" + strings.Repeat("x", maxLine-7) + secret + strings.Repeat("y", maxLine) + secret + strings.Repeat("z", 3*maxLine) + secret
	for i := 0; i < len(text); i += 11 {
		if _, err := l.Write([]byte(text[i:min(i+11, len(text))])); err != nil {
			t.Fatal(err)
		}
	}
	l.Flush()
	entries, err := store.Entries("u", 0, 100)
	if err != nil {
		t.Fatal(err)
	}
	all := ""
	for _, e := range entries {
		all += e.Message
	}
	if last := strings.Join(l.Tail(), ""); !strings.Contains(last, "***") || strings.Contains(last, secret) || strings.Contains(last, line) {
		t.Errorf("the last lines: %.200s", last)
	}
	if strings.Contains(all, secret) || strings.Contains(all, line) || strings.Count(all, "***") != 5 || !strings.Contains(all, "and ab") || strings.Count(all, "z") != 3*maxLine {
		t.Errorf("%d entries, %d masks:\n%.200s", len(entries), strings.Count(all, "***"), all)
	}
}
