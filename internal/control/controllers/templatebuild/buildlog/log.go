// Package buildlog has the log of a template build as its steps write it: by lines of bounded length, without the build's
// secrets; and the failures that end a build, by the step at which they came.
package buildlog

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/builds"
)

// Log is the log of a build, as a writer for the output of one of its steps.
type Log struct {
	store *builds.Store
	// trouble gets what keeps the log from being written.
	trouble *slog.Logger
	build   types.UID
	// Step is the one that lines are of.
	Step  string
	level string
	line  []byte
	mask  masks
	tail  *tail // of all writers of the log
}

var _ io.Writer = (*Log)(nil)

// New returns the log of a build, at level info, whose last lines so far are known. No line that is written to it has a secret of the build.
func New(store *builds.Store, trouble *slog.Logger, build types.UID, step string, last []string) *Log {
	return &Log{store: store, trouble: trouble, build: build, Step: step, level: builds.LevelInfo, mask: masksOf(store.Secrets(build)), tail: &tail{lines: last}}
}

// Tail returns the last lines of the log, for the status of the build. Any goroutine may call it.
func (l *Log) Tail() []string { return l.tail.get() }

// Output returns a writer for output at a level, of the step that the log is at.
func (l *Log) Output(level string) *Log {
	return &Log{store: l.store, trouble: l.trouble, build: l.build, Step: l.Step, level: level, mask: l.mask, tail: l.tail}
}

// maxLine bounds a line of output; longer ones are divided.
const maxLine = 8 << 10

// Say adds a line. A log that cannot be written ends no build.
func (l *Log) Say(level, format string, args ...any) {
	message := fmt.Sprintf(format, args...)
	l.tail.add(l.Step, message)
	err := l.store.Append(l.build, builds.Entry{Timestamp: time.Now().UTC(), Level: level, Message: message, Step: l.Step})
	if err != nil {
		l.trouble.Warn("log of a template build not written", telemetry.Error, err)
	}
}

// Write adds whole lines of output, and keeps the rest for the next call.
func (l *Log) Write(p []byte) (int, error) {
	for _, c := range p {
		if c != '\n' {
			l.line = append(l.line, c)
		}
		switch {
		case c == '\n':
			l.Flush()
		case len(l.line) >= maxLine+l.mask.longest():
			l.part()
		}
	}
	return len(p), nil
}

// part adds the beginning of a line that is too long. The rest may have the end of a secret.
func (l *Log) part() {
	l.line = l.mask.hide(l.line)
	n := max(0, len(l.line)-l.mask.longest())
	l.Say(l.level, "%s", l.line[:n])
	l.line = append(l.line[:0], l.line[n:]...)
}

// Flush adds the rest of the output.
func (l *Log) Flush() {
	if len(l.line) > 0 {
		l.Say(l.level, "%s", l.mask.hide(l.line))
		l.line = l.line[:0]
	}
}

// LastLines is what a program says of its failure. Each line is held until the next one is there: the last is the error.
type LastLines struct {
	Log  *Log
	text []byte
}

// Write implements io.Writer.
func (l *LastLines) Write(b []byte) (int, error) {
	l.text = append(l.text, b...)
	for len(l.text) > maxLine || bytes.Count(l.text, []byte{'\n'}) > 1 {
		line, rest, _ := bytes.Cut(l.text, []byte{'\n'})
		if len(line) > maxLine {
			line, rest = l.text[:maxLine], l.text[maxLine:]
		}
		l.Log.Say(l.Log.level, "%s", line)
		l.text = append([]byte(nil), rest...)
	}
	return len(b), nil
}

// End returns the error.
func (l *LastLines) End() string {
	return strings.TrimPrefix(strings.TrimSpace(string(l.text)), "barchan-agent: ")
}

// Failure is an error that only a change of the build can help, with the step at which it came.
type Failure struct{ Step, Message string }

// Error implements error.
func (f *Failure) Error() string { return f.Message }

// Refuse returns a *Failure.
func Refuse(step, format string, args ...any) error {
	return &Failure{step, fmt.Sprintf(format, args...)}
}
