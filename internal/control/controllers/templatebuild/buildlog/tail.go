package buildlog

import (
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// tail has the last lines of a log. It is safe for concurrent use.
type tail struct {
	mu    sync.Mutex
	lines []string // +checklocks:mu
}

// add adds the lines of a message, with the step that they are of.
func (t *tail) add(step, message string) {
	var more []string
	for text := range strings.Lines(message) {
		if text = plain(text); text != "" {
			more = append(more, shorten("["+step+"] "+text))
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	all := slices.Concat(t.lines, more)
	t.lines = all[max(0, len(all)-barchan.BuildLogLines):]
}

func (t *tail) get() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.lines)
}

// escapes are those by which programs colour text and move the cursor.
var escapes = regexp.MustCompile(`\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|[ -/]*[0-~])`)

// plain returns a line as a terminal would leave it, without what could change a terminal: kubectl prints it as it is.
func plain(line string) string {
	line = strings.TrimRight(escapes.ReplaceAllString(line, ""), "\r\n")
	line = line[strings.LastIndexByte(line, '\r')+1:] // such as a progress bar
	return strings.TrimRight(strings.Map(func(r rune) rune {
		switch {
		case r == '\t':
			return ' '
		case r == utf8.RuneError, unicode.IsPrint(r):
			return r
		}
		return -1
	}, line), " ")
}

// shorten cuts a line, between characters.
func shorten(line string) string {
	if len(line) <= barchan.BuildLogLine {
		return line
	}
	const cut = "…"
	end := barchan.BuildLogLine - len(cut)
	for end > 0 && !utf8.RuneStart(line[end]) {
		end--
	}
	return line[:end] + cut
}
