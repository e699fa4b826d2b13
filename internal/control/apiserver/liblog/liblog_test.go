package liblog

import (
	"log/slog"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap/zapcore"
)

// ended is a hook in place of the end of the process.
type ended struct{ entries []string }

func (e *ended) OnWrite(ce *zapcore.CheckedEntry, _ []zapcore.Field) {
	e.entries = append(e.entries, ce.Message)
}

// TestRepeatedEntries: etcd repeats a request without a pause until it has started. Other entries, and the last one, are not affected.
func TestRepeatedEntries(t *testing.T) {
	var out strings.Builder
	hook := &ended{}
	log := NewZap(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), hook)
	for range 330 {
		log.Warn("again")
	}
	log.Warn("another")
	log.Log(zapcore.FatalLevel, "the end")
	for message, want := range map[string]int{"again": sameEntries + 3, "another": 1, `"the end"`: 1} {
		if got := strings.Count(out.String(), "msg="+message+" "); got != want {
			t.Errorf("%s is written %d times, want %d", message, got, want)
		}
	}
	if !slices.Equal(hook.entries, []string{"the end"}) {
		t.Errorf("after %q the process ends", hook.entries)
	}
}
