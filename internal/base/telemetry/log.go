// Package telemetry sets up the logs, metrics and traces of a process, with one vocabulary for all
// packages. It makes no decisions and has no global state: loggers, registries and tracers are passed
// to their users.
package telemetry

import (
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"
)

// Log formats.
const (
	FormatText = "text"
	FormatJSON = "json"
)

// LogConfig configures a logger. Its zero value is text from level info up.
type LogConfig struct {
	Format string // FormatText (default) or FormatJSON
	Level  string // debug, info (default), warn or error
}

// NewLogger returns a logger that writes to w. Durations are written as text
// (1.5ms) in both formats. Of warnings and errors with one message it writes 20 a second, with bursts of 200; the next line has the
// number of the missing ones, `dropped_before`.
func NewLogger(w io.Writer, cfg LogConfig) (*slog.Logger, error) {
	var level slog.Level
	if cfg.Level != "" {
		if err := level.UnmarshalText([]byte(cfg.Level)); err != nil {
			return nil, fmt.Errorf("log level %q: use debug, info, warn or error", cfg.Level)
		}
	}
	opts := &slog.HandlerOptions{Level: level, ReplaceAttr: plain}
	switch strings.ToLower(cfg.Format) {
	case "", FormatText:
		return slog.New(limited(slog.NewTextHandler(w, opts))), nil
	case FormatJSON:
		return slog.New(limited(slog.NewJSONHandler(w, opts))), nil
	default:
		return nil, fmt.Errorf("log format %q: use text or json", cfg.Format)
	}
}

// maxText is how long a text of a line may be, in bytes: errors have what sandboxes answer.
const maxText = 16 << 10

// plain writes durations as text in JSON, not as bare nanoseconds, and cuts long texts.
func plain(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().Round(time.Microsecond).String())
	} else if text := textOf(a.Value); len(text) > maxText {
		a.Value = slog.StringValue(strings.ToValidUTF8(text[:maxText], "") + "…")
	}
	return a
}

// textOf returns a string or the text of an error, else nothing.
func textOf(v slog.Value) (text string) {
	if v.Kind() == slog.KindString {
		return v.String()
	}
	defer func() { _ = recover() }() // of a nil pointer's Error, which the handler shows as nil
	if err, is := v.Any().(error); is {
		text = err.Error()
	}
	return text
}

// Discard returns a logger that writes nothing.
func Discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
