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
// (1.5ms) in both formats.
func NewLogger(w io.Writer, cfg LogConfig) (*slog.Logger, error) {
	var level slog.Level
	if cfg.Level != "" {
		if err := level.UnmarshalText([]byte(cfg.Level)); err != nil {
			return nil, fmt.Errorf("log level %q: use debug, info, warn or error", cfg.Level)
		}
	}
	opts := &slog.HandlerOptions{Level: level, ReplaceAttr: plainDuration}
	switch strings.ToLower(cfg.Format) {
	case "", FormatText:
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case FormatJSON:
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	default:
		return nil, fmt.Errorf("log format %q: use text or json", cfg.Format)
	}
}

// plainDuration writes durations as text in JSON, not as bare nanoseconds.
func plainDuration(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().Round(time.Microsecond).String())
	}
	return a
}

// Discard returns a logger that writes nothing.
func Discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
