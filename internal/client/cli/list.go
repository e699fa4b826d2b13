package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// format is the output format of a list; empty is a table.
type format string

const (
	formatJSON format = "json"
	formatName format = "name"
	formatWide format = "wide"
	formatID   format = "id" // set by -q
)

// Set parses the value of -o.
func (f *format) Set(text string) error {
	if !slices.Contains(formats(), text) {
		return errors.New("want json, name or wide")
	}
	*f = format(text)
	return nil
}

// String returns the value.
func (f *format) String() string { return string(*f) }

// Type is the value's name in help.
func (f *format) Type() string { return "format" }

func formats() []string { return []string{string(formatJSON), string(formatName), string(formatWide)} }

// formatSwitch is a flag without a value that chooses a format.
type formatSwitch struct {
	into *format
	to   format
}

// Set parses true or false, as in --json=false.
func (s formatSwitch) Set(text string) error {
	on, err := strconv.ParseBool(text)
	if on {
		*s.into = s.to
	}
	return err
}

// String returns the default for help.
func (s formatSwitch) String() string { return "false" }

// Type hides the value in help.
func (s formatSwitch) Type() string { return "bool" }

// listFlags adds the flags of every list; the last one given applies.
func (a *app) listFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.VarP(&a.format, "output", "o", "output `format`: json, name (names only) or wide (more columns)")
	f.VarPF(formatSwitch{&a.format, formatJSON}, "json", "", "print JSON, as -o json").NoOptDefVal = "true"
	f.VarPF(formatSwitch{&a.format, formatID}, "quiet", "q", "print IDs only").NoOptDefVal = "true"
}

// columns describes how the items of a list are printed.
type columns[T any] struct {
	// header names the columns. One of them is ID or NAME, else the first serves as both.
	header []string
	// wide is how many of the last columns require -o wide.
	wide int
	row  func(*T) []string
	// none is the message for an empty list; empty: the header.
	none string
}

// at returns the index of the first existing one of the named columns, else 0.
func (c *columns[T]) at(names ...string) int {
	for _, name := range names {
		if i := slices.Index(c.header, name); i >= 0 {
			return i
		}
	}
	return 0
}

// printList prints items in the format of the flags.
func printList[T any](a *app, c columns[T], items []T) error {
	only := -1
	switch a.format {
	case formatJSON:
		return a.printJSON(items)
	case formatID:
		only = c.at("ID", "NAME")
	case formatName:
		only = c.at("NAME", "ID")
	case formatWide: // a table, as without a format
	}
	if only >= 0 {
		for i := range items {
			if _, err := fmt.Fprintln(a.stdout, c.row(&items[i])[only]); err != nil {
				return err
			}
		}
		return nil
	}
	if len(items) == 0 && c.none != "" {
		fmt.Fprintln(a.stderr, c.none)
		return nil
	}
	shown := len(c.header)
	if a.format != formatWide {
		shown -= c.wide
	}
	tab := newTable(c.header[:shown]...)
	if state := slices.IndexFunc(c.header, func(name string) bool { return name == "STATE" || name == "PHASE" }); state >= 0 {
		tab.colour = a.stateColours(state)
	}
	for i := range items {
		tab.add(c.row(&items[i])[:shown]...)
	}
	tab.write(a.stdout)
	return nil
}

// lister describes how the objects of a noun are listed.
type lister[T any] struct {
	columns[T]
	short, long string
	// find lists the objects of a namespace; empty means all.
	find func(ctx context.Context, k *kube, namespace string) ([]T, error)
}

// lsCommand lists objects of the Kubernetes API.
func lsCommand[T any](a *app, l lister[T]) *cobra.Command {
	var s scope
	cmd := &cobra.Command{Use: "ls", Aliases: []string{"list"}, Short: l.short, Long: l.long, Args: exactly()}
	s.flags(cmd, true)
	a.listFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return listObjects(cmd.Context(), a, l, s.list()) }
	return cmd
}

// listObjects prints the objects of a namespace; empty means all.
func listObjects[T any](ctx context.Context, a *app, l lister[T], namespace string) error {
	k, err := a.kube(ctx)
	if err != nil {
		return err
	}
	items, err := l.find(ctx, k, namespace)
	if err != nil {
		return err
	}
	return printList(a, l.columns, items)
}

// allOf returns a function that lists all objects of a kind.
func allOf[T any](r schema.GroupVersionResource) func(context.Context, *kube, string) ([]T, error) {
	return func(ctx context.Context, k *kube, namespace string) ([]T, error) {
		return listAs[T](ctx, k, r, namespace)
	}
}
