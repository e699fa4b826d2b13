package app

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// Exit codes. run and exec give the remote command's instead.
const (
	CodeOK    = 0
	CodeError = 1
	CodeUsage = 2
)

// ExitCode ends the program with a code and without a message.
type ExitCode int

// Error is never shown.
func (e ExitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// UsageError is a usage error; the command's usage line is shown with it.
type UsageError struct {
	Cmd *cobra.Command
	err error
}

// Usage returns an error that is shown with the usage line of the command.
func Usage(cmd *cobra.Command, err error) error { return &UsageError{cmd, err} }

// Error describes the usage error.
func (e *UsageError) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *UsageError) Unwrap() error { return e.err }

// Message returns the text of an error for users: its public text if it has one. A bare kind at its
// end is removed, because it adds nothing. Text of guests is escaped, except for line ends, which
// joined errors have.
func Message(err error) string {
	text, ok := errs.PublicMessage(err)
	if !ok {
		text = err.Error()
	}
	if kind := errs.Kind(err); kind != nil {
		text = strings.TrimSuffix(text, ": "+kind.Error())
	}
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = terminal.Escaped(lines[i], terminal.MaxErrorLine)
	}
	return strings.Join(lines, "\n")
}

// Noun runs a command that only has verbs.
func Noun(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return UnknownCommand(cmd, args[0])
	}
	return Usage(cmd, errors.New("a command is missing; one of "+strings.Join(verbs(cmd), ", ")))
}

// NounMark marks a command that does nothing without a verb.
func NounMark() map[string]string { return map[string]string{"noun": ""} }

// IsNoun reports whether a command does nothing without a verb.
func IsNoun(cmd *cobra.Command) bool {
	_, is := cmd.Annotations["noun"]
	return is
}

// UseLine is the usage of a command in one line.
func UseLine(cmd *cobra.Command) string {
	if IsNoun(cmd) {
		return cmd.CommandPath() + " COMMAND [flags]"
	}
	return cmd.UseLine()
}

func verbs(cmd *cobra.Command) []string {
	var out []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			out = append(out, c.Name())
		}
	}
	return out
}

// NounCommand groups verbs.
func NounCommand(name, short string, verbs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: name, Short: short, RunE: Noun, Args: cobra.ArbitraryArgs, Annotations: NounMark()}
	cmd.AddCommand(verbs...)
	return cmd
}

// exactly requires one argument for each of the names, except for those in brackets, which come last.
func exactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names) && !strings.HasPrefix(names[len(args)], "["):
			return missing(cmd, names[len(args)])
		case len(args) > len(names):
			return Usage(cmd, fmt.Errorf("%q is one argument too many", args[len(names)]))
		}
		return notEmpty(cmd, names, args)
	}
}

// AtLeast requires one argument for each of the names, or more.
func AtLeast(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < len(names) {
			return missing(cmd, names[len(args)])
		}
		return notEmpty(cmd, names, args)
	}
}

// notEmpty refuses empty arguments, which unset variables of a shell are: no object has that name, and some commands would take them for all.
func notEmpty(cmd *cobra.Command, names, args []string) error {
	for i, arg := range args {
		if last := len(names) - 1; arg == "" && (i <= last || strings.HasSuffix(names[last], "...")) {
			return Usage(cmd, fmt.Errorf("%s is empty", word(names[min(i, last)])))
		}
	}
	return nil
}

// CheckArguments adds to all commands that have no check a check by the words of their usage lines.
func CheckArguments(cmd *cobra.Command) {
	if words := Placeholders(cmd.Use); cmd.Args == nil {
		cmd.Args = exactly(words...)
		if len(words) > 0 && strings.HasSuffix(words[len(words)-1], "...") {
			cmd.Args = AtLeast(words...)
		}
	}
	for _, sub := range cmd.Commands() {
		CheckArguments(sub)
	}
}

// Placeholders returns the arguments of a usage line, up to a flag or a command in the sandbox.
func Placeholders(use string) []string {
	before, _, _ := strings.Cut(use, " -")
	return slices.DeleteFunc(strings.Fields(before)[1:], func(w string) bool { return w == "[flags]" })
}

// missing is the error for an argument of a usage line.
func missing(cmd *cobra.Command, name string) error {
	return Usage(cmd, fmt.Errorf("%s is missing", word(name)))
}

// word is an argument of a usage line without what is around it.
func word(name string) string {
	name, _, _ = strings.Cut(strings.TrimSuffix(strings.Trim(name, "[]"), "..."), "|")
	return name
}

// AtLeastSecond refuses a flag of less than a second: the API counts in seconds.
func AtLeastSecond(cmd *cobra.Command, flag string, d time.Duration) error {
	if d >= time.Second {
		return nil
	}
	return Usage(cmd, fmt.Errorf("--%s: %s is too short, want at least 1s", flag, d))
}

// JSONFlag adds --json, and returns the command.
func (a *App) JSONFlag(cmd *cobra.Command) *cobra.Command {
	cmd.Flags().BoolVar(&a.JSON, "json", false, "print JSON")
	return cmd
}

// RegistryFlags adds the flags of a command that uses a registry.
func RegistryFlags(cmd *cobra.Command, access *portable.Access) {
	cmd.Flags().BoolVar(&access.PlainHTTP, "plain-http", false, "the registry has no TLS")
	cmd.Flags().StringVar(&access.CAFile, "ca-file", "", "PEM `file` with the authority of the registry's certificate, beside the system's")
}
