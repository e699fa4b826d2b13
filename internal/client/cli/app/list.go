package app

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// The formats of lists; empty is a table.
const (
	formatJSON = "json"
	formatName = "name"
	FormatWide = "wide"
	formatID   = "id" // set by -q
)

// Formats returns the values of -o.
func Formats() []string { return []string{formatJSON, formatName, FormatWide} }

// ListFlags adds the flags of every list; the last one given applies.
func (a *App) ListFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.FuncP("output", "o", "output `format`: json, name (names only) or wide (more columns)", func(text string) error {
		if a.Format = text; !slices.Contains(Formats(), text) {
			return errors.New("want json, name or wide")
		}
		return nil
	})
	choose := func(format string) func(string) error {
		return func(text string) error {
			on, err := strconv.ParseBool(text) // as in --json=false
			if on {
				a.Format = format
			}
			return err
		}
	}
	f.BoolFunc("json", "print JSON, as -o json", choose(formatJSON))
	f.BoolFuncP("quiet", "q", "print IDs only", choose(formatID))
}

// Columns describes how the items of a list are printed.
type Columns[T any] struct {
	// Header names the columns. One of them is ID or NAME, else the first serves as both.
	Header []string
	// Wide is how many of the last columns require -o wide.
	Wide int
	Row  func(*T) []string
	// None is the message for an empty list; empty: the header.
	None string
}

// at returns the index of the first existing one of the named columns, else 0.
func (c *Columns[T]) at(names ...string) int {
	for _, name := range names {
		if i := slices.Index(c.Header, name); i >= 0 {
			return i
		}
	}
	return 0
}

// shown is how many columns a format has.
func (c *Columns[T]) shown(format string) int {
	if format == FormatWide {
		return len(c.Header)
	}
	return len(c.Header) - c.Wide
}

// PrintList prints items in the format of the flags.
func PrintList[T any](a *App, c Columns[T], items []T) error {
	only := -1
	switch a.Format {
	case formatJSON:
		return a.PrintJSON(items)
	case formatID:
		only = c.at("ID", "NAME")
	case formatName:
		only = c.at("NAME", "ID")
	case FormatWide: // a table, as without a format
	}
	if only >= 0 {
		out := bufio.NewWriter(a.Stdout) // keeps its first error
		for i := range items {
			_, _ = fmt.Fprintln(out, c.Row(&items[i])[only])
		}
		return out.Flush()
	}
	if len(items) == 0 && c.None != "" {
		fmt.Fprintln(a.Stderr, c.None)
		return nil
	}
	shown := c.shown(a.Format)
	tab := terminal.NewTable(c.Header[:shown]...)
	if state := slices.IndexFunc(c.Header, func(name string) bool { return name == "STATE" || name == "PHASE" }); state >= 0 {
		tab.Colour = a.StateColours(state)
	}
	for i := range items {
		tab.Add(c.Row(&items[i])[:shown]...)
	}
	tab.Write(a.Stdout)
	return nil
}

// StreamList returns a function that prints items one by one in the format of the flags: JSON as a line each, and columns of at least these
// widths below a header.
func StreamList[T any](a *App, c Columns[T], widths ...int) func(*T) error {
	line := func(cells []string) error {
		var text strings.Builder
		for i, cell := range cells[:c.shown(a.Format)] {
			fmt.Fprintf(&text, "%-*s   ", widths[i], terminal.Plain(cell))
		}
		_, err := fmt.Fprintln(a.Stdout, strings.TrimRight(text.String(), " "))
		return err
	}
	headed := false
	return func(item *T) error {
		switch a.Format {
		case formatJSON:
			return json.NewEncoder(a.Stdout).Encode(item)
		case formatID, formatName:
			return PrintList(a, c, []T{*item})
		}
		if !headed {
			headed = true
			if err := line(c.Header); err != nil {
				return err
			}
		}
		return line(c.Row(item))
	}
}

// Lister describes how the objects of a noun are listed.
type Lister[T any] struct {
	Columns[T]
	Short, Long string
	// Find lists the objects of a namespace; empty means all.
	Find func(ctx context.Context, k *Kube, namespace string) ([]T, error)
}

// ListCommand lists objects of the Kubernetes API.
func ListCommand[T any](a *App, l Lister[T]) *cobra.Command {
	var s Scope
	cmd := &cobra.Command{Use: "ls", Aliases: []string{"list"}, Short: l.Short, Long: l.Long}
	s.Flags(cmd, true)
	a.ListFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return ListObjects(cmd.Context(), a, l, s.List()) }
	return cmd
}

// ListObjects prints the objects of a namespace; empty means all.
func ListObjects[T any](ctx context.Context, a *App, l Lister[T], namespace string) error {
	k, err := a.Kube(ctx)
	if err != nil {
		return err
	}
	items, err := l.Find(ctx, k, namespace)
	if err != nil {
		return err
	}
	return PrintList(a, l.Columns, items)
}

// AllOf returns a function that lists all objects of a kind.
func AllOf[T any](r schema.GroupVersionResource) func(context.Context, *Kube, string) ([]T, error) {
	return func(ctx context.Context, k *Kube, namespace string) ([]T, error) {
		return List[T](ctx, k, r, namespace)
	}
}
