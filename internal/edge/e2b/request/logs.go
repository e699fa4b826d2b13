package request

import (
	"log/slog"

	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
)

// CheckLogs checks the enumerations of a request for logs.
func CheckLogs(direction *api.LogsDirection, level *api.LogLevel) error {
	if direction != nil && !direction.Valid() {
		return Invalid("direction: %q is none of forward and backward", *direction)
	}
	if level != nil && !level.Valid() {
		return Invalid("level: %q is none of debug, info, warn and error", *level)
	}
	return nil
}

// LevelOf returns the name of a level.
func LevelOf(level slog.Level) api.LogLevel {
	switch {
	case level >= slog.LevelError:
		return api.LevelError
	case level >= slog.LevelWarn:
		return api.LevelWarn
	case level >= slog.LevelInfo:
		return api.LevelInfo
	}
	return api.LevelDebug
}

// LevelNamed returns the level of a name that LevelOf returns; info for none.
func LevelNamed(name api.LogLevel) slog.Level {
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelWarn, slog.LevelError} {
		if LevelOf(level) == name {
			return level
		}
	}
	return slog.LevelInfo
}
