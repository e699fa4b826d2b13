package layers

import (
	"fmt"
	"io"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/builds"
)

// Failure is an error that only a change of the build can help, with the step at which it came.
type Failure struct{ Step, Message string }

// Error implements error.
func (f *Failure) Error() string { return f.Message }

// Refuse returns a *Failure.
func Refuse(step, format string, args ...any) error {
	return &Failure{step, fmt.Sprintf(format, args...)}
}

// Log is the log of a build, as a writer for the output of one of its steps.
type Log struct {
	r     *Runner
	build types.UID
	// Step is the one that lines are of.
	Step  string
	level string
	line  []byte
	mask  masks
}

var _ io.Writer = (*Log)(nil)

// maxLine bounds a line of output; longer ones are divided.
const maxLine = 8 << 10

// Say adds a line. A log that cannot be written ends no build.
func (l *Log) Say(level, format string, args ...any) {
	err := l.r.Store.Append(l.build, builds.Entry{Timestamp: time.Now().UTC(), Level: level, Message: fmt.Sprintf(format, args...), Step: l.Step})
	if err != nil {
		l.r.Log.Warn("log of a template build not written", telemetry.Error, err)
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
			l.flush()
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

// flush adds the rest of the output.
func (l *Log) flush() {
	if len(l.line) > 0 {
		l.Say(l.level, "%s", l.mask.hide(l.line))
		l.line = l.line[:0]
	}
}
