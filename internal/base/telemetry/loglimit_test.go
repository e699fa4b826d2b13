package telemetry_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// TestWarningsAreLimited has one message come without an end: its lines are few, and say how many are missing. Others are not concerned.
func TestWarningsAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log, err := telemetry.NewLogger(&out, telemetry.LogConfig{})
		if err != nil {
			t.Fatal(err)
		}
		parts := log.With(telemetry.Component, "a")
		for range 10_000 {
			parts.WarnContext(t.Context(), "request failed")
			log.ErrorContext(t.Context(), "request failed") // the same message of another part
			log.InfoContext(t.Context(), "sandbox ready")
		}
		log.WarnContext(t.Context(), "disk full")
		text := out.String()
		if n := strings.Count(text, "request failed"); n != 200 {
			t.Errorf("%d lines of a message that came 20,000 times, want 200", n)
		}
		if n := strings.Count(text, "sandbox ready"); n != 10_000 {
			t.Errorf("%d lines of level info, want all", n)
		}
		if !strings.Contains(text, "disk full") {
			t.Error("another warning is missing")
		}
		out.Reset()
		time.Sleep(time.Second)
		for range 1000 {
			log.WarnContext(t.Context(), "request failed")
		}
		if n := strings.Count(out.String(), "request failed"); n != 20 || !strings.Contains(out.String(), "dropped_before=19800") {
			t.Errorf("a second later %d lines:\n%.300s", n, out.String())
		}
	})
}

// TestTextsAreCut has a sandbox answer an error without an end.
func TestTextsAreCut(t *testing.T) {
	var out bytes.Buffer
	log, err := telemetry.NewLogger(&out, telemetry.LogConfig{Format: telemetry.FormatJSON})
	if err != nil {
		t.Fatal(err)
	}
	log.WarnContext(t.Context(), "request failed", telemetry.Error, errors.New(strings.Repeat("é", 1<<20)), telemetry.Path, strings.Repeat("a", 1<<20))
	if n := out.Len(); n < 32<<10 || n > 34<<10 {
		t.Errorf("a line of %d bytes", n)
	}
}
