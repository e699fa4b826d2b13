package terminal

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// Progress shows how far a work is: one line that is redrawn on a terminal,
// else a line for each new step, and then one each logEach at most.
type Progress struct {
	Out   io.Writer
	TTY   *os.File // nil: not a terminal
	quiet bool     // report only on a terminal

	mu sync.Mutex
	// +checklocks:mu
	step string
	// +checklocks:mu
	drawn time.Time
	// +checklocks:mu
	over bool // the end of the step was shown; only without a terminal
	// +checklocks:mu
	open bool // the terminal's line is not ended
	// +checklocks:mu
	latest *adminclient.Event // it is not drawn yet
}

const (
	redrawEvery = 100 * time.Millisecond
	logEach     = 10 * time.Second
	barWidth    = 24
)

// NewProgress shows the progress on a stream.
func NewProgress(w io.Writer) *Progress {
	p := &Progress{Out: w}
	if IsTerminal(w) {
		p.TTY = FileOf(w)
	}
	return p
}

// NewQuietProgress shows nothing without a terminal.
func NewQuietProgress(w io.Writer) *Progress {
	p := NewProgress(w)
	p.quiet = true
	return p
}

// Event shows one event. It may be called from any goroutine.
func (p *Progress) Event(e adminclient.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.TTY != nil {
		p.drawLocked(e)
		return
	}
	if p.quiet {
		return
	}
	over := e.Total > 0 && e.Done >= e.Total
	if e.Step == p.step && (p.over || !over && time.Since(p.drawn) < logEach) {
		return
	}
	p.step, p.drawn, p.over = e.Step, time.Now(), over
	text := label(e)
	if e.Total > 0 {
		text += " " + amount(e)
	}
	fmt.Fprintln(p.Out, text)
}

// +checklocks:p.mu
func (p *Progress) drawLocked(e adminclient.Event) {
	over := e.Total > 0 && e.Done >= e.Total
	if e.Step == p.step && !over && time.Since(p.drawn) < redrawEvery {
		p.latest = &e
		return
	}
	p.paintLocked(e)
}

// +checklocks:p.mu
func (p *Progress) paintLocked(e adminclient.Event) {
	if e.Step != p.step && p.open {
		if last := p.latest; last != nil { // the final state of a step
			p.latest = nil
			p.paintLocked(*last)
		}
		fmt.Fprintln(p.Out)
	}
	p.step, p.drawn, p.open, p.latest = e.Step, time.Now(), true, nil
	text := label(e)
	if e.Total > 0 {
		text = Bar(e.Done, e.Total) + " " + amount(e) + "  " + text
	} else if e.Bytes && e.Done > 0 {
		text = Size(e.Done) + "  " + text
	}
	if width, _, err := term.GetSize(int(p.TTY.Fd())); err == nil && width > 0 {
		if runes := []rune(text); len(runes) > width-1 {
			text = string(runes[:width-1])
		}
	}
	fmt.Fprint(p.Out, "\r\x1b[K"+text)
}

// Bar is a bar of progress. The total must be positive.
func Bar(done, total int64) string {
	filled := int(min(done, total) * barWidth / total)
	return "[" + strings.Repeat("#", filled) + strings.Repeat(".", barWidth-filled) + "]"
}

// End moves the cursor to a new line. It may be repeated.
func (p *Progress) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.latest != nil {
		p.paintLocked(*p.latest)
	}
	if p.open {
		fmt.Fprintln(p.Out)
		p.open = false
	}
}

func label(e adminclient.Event) string {
	switch {
	case e.Message == "":
		return Plain(e.Step)
	case e.Step == "":
		return Plain(e.Message)
	default:
		return Plain(e.Step + ": " + e.Message)
	}
}

func amount(e adminclient.Event) string {
	percent := e.Done * 100 / e.Total
	if !e.Bytes {
		return fmt.Sprintf("%3d%%", percent)
	}
	return fmt.Sprintf("%3d%% of %s", percent, Size(e.Total))
}

// CountingReader reports how much of a stream was read.
type CountingReader struct {
	io.Reader
	Step        string
	done, Total int64 // bytes
	Report      func(adminclient.Event)
}

// Read implements io.Reader and reports the progress.
func (c *CountingReader) Read(b []byte) (int, error) {
	n, err := c.Reader.Read(b)
	c.done += int64(n)
	if n > 0 {
		c.Report(adminclient.Event{Step: c.Step, Done: c.done, Total: c.Total, Bytes: true})
	}
	return n, err
}
