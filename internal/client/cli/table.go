package cli

import (
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

// table prints rows in aligned columns.
type table struct {
	rows [][]string
	// colour colours a whole cell; nil: no colours.
	colour func(column int, cell string) string
}

func newTable(header ...string) *table { return &table{rows: [][]string{header}} }

// add adds a row. Cells may have text of guests and tenants.
func (t *table) add(cells ...string) {
	row := make([]string, len(cells))
	for i, cell := range cells {
		row[i] = plain(cell)
	}
	t.rows = append(t.rows, row)
}

func (t *table) write(w io.Writer) {
	widths := make([]int, len(t.rows[0]))
	for _, row := range t.rows {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for n, row := range t.rows {
		var line strings.Builder
		for i, cell := range row {
			gap := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+3)
			if t.colour != nil && n > 0 {
				cell = t.colour(i, cell)
			}
			line.WriteString(cell)
			if i < len(row)-1 {
				line.WriteString(gap)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
	}
}

// field prints a name and its value, if there is one, which may be text of guests and tenants.
func (a *app) field(width int, name, value string) {
	if value != "" {
		fmt.Fprintf(a.stdout, "%-*s %s\n", width, name, plain(value))
	}
}

// isTerminal reports whether a stream is a terminal.
func isTerminal(stream any) bool {
	f := fileOf(stream)
	return f != nil && term.IsTerminal(int(f.Fd()))
}

// coloured reports whether a stream may have colours.
func (a *app) coloured(w io.Writer) bool {
	no, set := a.lookupEnv("NO_COLOR")
	dumb, _ := a.lookupEnv("TERM")
	return isTerminal(w) && (!set || no == "") && dumb != "dumb"
}

// Terminal colours.
const (
	red    = "31"
	green  = "32"
	yellow = "33"
)

func paint(colour, text string) string { return "\x1b[" + colour + "m" + text + "\x1b[0m" }

// stateColours returns a colour function for the states in one column, or nil.
func (a *app) stateColours(column int) func(int, string) string {
	if !a.coloured(a.stdout) {
		return nil
	}
	return func(i int, cell string) string {
		if i != column {
			return cell
		}
		switch strings.ToLower(cell) {
		case "running", "ready", "ok", "true":
			return paint(green, cell)
		case "paused", "warning", "starting":
			return paint(yellow, cell)
		case "failed", "dead", "false":
			return paint(red, cell)
		}
		return cell
	}
}

// age formats a duration in at most two units.
func age(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d.Hours())/24)
	}
}

func since(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return age(time.Since(t))
}

// left returns the time until t.
func left(t time.Time) string {
	if t.IsZero() || time.Until(t) > 100*365*24*time.Hour {
		return "-"
	}
	return age(time.Until(t))
}

// size formats a number of bytes in a binary unit.
func size(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/1024, "KiB"
	for _, next := range []string{"MiB", "GiB", "TiB"} {
		if value < 1024 {
			break
		}
		value, unit = value/1024, next
	}
	return fmt.Sprintf("%.1f %s", value, unit)
}

// pairs formats a map in the order of its keys.
func pairs(m map[string]string) string {
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
	maxErrorLine = 8192
)

// plain returns text of a guest or a tenant safe for terminals: on one line, of bounded length, and
// without control or bidi characters. These are escaped as in Go.
func plain(s string) string { return escaped(s, maxPlain) }

func escaped(s string, most int) string {
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

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
