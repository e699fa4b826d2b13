package terminal

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/term"
)

// Table prints rows in aligned columns.
type Table struct {
	rows [][]string
	// Colour colours a whole cell; nil: no colours.
	Colour func(column int, cell string) string
}

// NewTable returns a table with a header.
func NewTable(header ...string) *Table { return &Table{rows: [][]string{header}} }

// Add adds a row, and keeps its cells. They may have text of guests and tenants.
func (t *Table) Add(cells ...string) {
	for i, cell := range cells {
		cells[i] = Plain(cell)
	}
	t.rows = append(t.rows, cells)
}

// Write prints the table, many rows at once.
func (t *Table) Write(to io.Writer) {
	w := bufio.NewWriterSize(to, 64<<10)
	defer func() { _ = w.Flush() }()
	widths := make([]int, len(t.rows[0]))
	for _, row := range t.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var line []byte
	for n, row := range t.rows {
		line = line[:0]
		for i, cell := range row {
			gap := widths[i] - utf8.RuneCountInString(cell) + 3
			if t.Colour != nil && n > 0 {
				cell = t.Colour(i, cell)
			}
			line = append(line, cell...)
			if i < len(row)-1 {
				line = append(line, strings.Repeat(" ", gap)...)
			}
		}
		_, _ = w.Write(append(bytes.TrimRight(line, " "), '\n'))
	}
}

// IsTerminal reports whether a stream is a terminal.
func IsTerminal(stream any) bool {
	f := FileOf(stream)
	return f != nil && term.IsTerminal(int(f.Fd()))
}

// Height returns the rows of a terminal, and 0 for what is none.
func Height(stream any) int {
	f := FileOf(stream)
	if f == nil {
		return 0
	}
	_, height, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0
	}
	return height
}

// Terminal colours.
const (
	Red    = "31"
	Green  = "32"
	Yellow = "33"
)

// Paint colours a text.
func Paint(colour, text string) string { return "\x1b[" + colour + "m" + text + "\x1b[0m" }

// Age formats a duration in one unit, rounded down.
func Age(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return strconv.Itoa(int(d.Seconds())) + "s"
	case d < 2*time.Hour:
		return strconv.Itoa(int(d.Minutes())) + "m"
	case d < 48*time.Hour:
		return strconv.Itoa(int(d.Hours())) + "h"
	default:
		return strconv.Itoa(int(d.Hours())/24) + "d"
	}
}

// Since returns the time since t.
func Since(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return Age(time.Since(t))
}

// Until returns the time until t.
func Until(t time.Time) string {
	if t.IsZero() || time.Until(t) > 100*365*24*time.Hour {
		return "-"
	}
	return Age(time.Until(t))
}

// Size formats a number of bytes in a binary unit.
func Size(n int64) string {
	if n < 1024 {
		return strconv.FormatInt(n, 10) + " B"
	}
	value, unit := float64(n)/1024, "KiB"
	for _, next := range []string{"MiB", "GiB", "TiB"} {
		if value < 1024 {
			break
		}
		value, unit = value/1024, next
	}
	return strconv.FormatFloat(value, 'f', 1, 64) + " " + unit
}

// Pairs formats a map in the order of its keys.
func Pairs(m map[string]string) string {
	out := make([]string, 0, len(m))
	for k, v := range m {
		out = append(out, k+"="+v)
	}
	slices.Sort(out)
	return strings.Join(out, ",")
}

// Maximum length of names from guests and tenants, and of a line of an error, in characters.
const (
	maxPlain     = 512
	MaxErrorLine = 8192
)

// Plain returns text of a guest or a tenant safe for terminals: on one line, of bounded length, and
// without control or bidi characters. These are escaped as in Go.
func Plain(s string) string { return Escaped(s, maxPlain) }

// Escaped is Plain with another maximum length, in characters.
func Escaped(s string, most int) string {
	if len(s) <= most && !strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) {
		return s // nearly all are
	}
	var b strings.Builder
	shown := 0
	for i, r := range s {
		if shown == most {
			return b.String() + "…"
		}
		shown++
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(s[i:], string(utf8.RuneError)):
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default: // QuoteRune escapes unprintable characters: controls, C1 and bidi too
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

// Dash returns s, or a dash for an empty string.
func Dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
