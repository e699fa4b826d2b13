package app

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// Field prints a name and its value, if there is one, which may be text of guests and tenants.
func (a *App) Field(width int, name, value string) {
	if value != "" {
		fmt.Fprintf(a.Stdout, "%-*s %s\n", width, name, terminal.Plain(value))
	}
}

// Coloured reports whether a stream may have colours.
func (a *App) Coloured(w io.Writer) bool {
	no, set := a.LookupEnv("NO_COLOR")
	dumb, _ := a.LookupEnv("TERM")
	return terminal.IsTerminal(w) && (!set || no == "") && dumb != "dumb"
}

// StateColours returns a colour function for the states in one column, or nil.
func (a *App) StateColours(column int) func(int, string) string {
	if !a.Coloured(a.Stdout) {
		return nil
	}
	return func(i int, cell string) string {
		if i != column {
			return cell
		}
		switch strings.ToLower(cell) {
		case "running", "ready", "ok", "true":
			return terminal.Paint(terminal.Green, cell)
		case "paused", "warning", "starting":
			return terminal.Paint(terminal.Yellow, cell)
		case "failed", "dead", "false":
			return terminal.Paint(terminal.Red, cell)
		}
		return cell
	}
}

// patienceOfPeople is the delay before a progress message.
const patienceOfPeople = time.Second

// NotifyIfSlow shows a progress message if a call takes long. Call done at the end.
func (a *App) NotifyIfSlow(what string) (done func()) {
	start := time.Now()
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(patienceOfPeople)
		defer tick.Stop()
		for wait := 1; ; wait++ {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			if wait == 1 || wait%10 == 0 {
				fmt.Fprintf(a.Stderr, "%s, for %s\n", what, terminal.Age(time.Since(start)))
			}
		}
	}()
	return func() { close(stop); <-ended }
}

// PrintJSON prints a value as indented JSON.
func (a *App) PrintJSON(v any) error {
	enc := json.NewEncoder(a.Stdout)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// Result prints what a command made or found: as JSON, or its text.
func (a *App) Result(v any, text string) error {
	if a.JSON {
		return a.PrintJSON(v)
	}
	_, err := fmt.Fprintln(a.Stdout, text)
	return err
}

// PrintChecks prints the results of checks. It ends the program with an error if one has failed.
func (a *App) PrintChecks(checks []adminclient.Check) error {
	failed := 0
	for _, c := range checks {
		if c.State == adminclient.CheckFailed {
			failed++
		}
	}
	if a.JSON {
		if err := a.PrintJSON(checks); err != nil {
			return err
		}
	} else {
		tab := terminal.NewTable("CHECK", "STATE", "DETAIL")
		tab.Colour = a.StateColours(1)
		for _, c := range checks {
			detail := c.Detail
			if c.Remedy != "" {
				detail += "; " + c.Remedy
			}
			tab.Add(c.Name, c.State, detail)
		}
		tab.Write(a.Stdout)
	}
	if failed > 0 {
		fmt.Fprintf(a.Stderr, "barchan: %d of %d checks failed\n", failed, len(checks))
		return ExitCode(CodeError)
	}
	return nil
}
