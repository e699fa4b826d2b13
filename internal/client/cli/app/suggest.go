package app

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// otherWords are other programs' names of barchan's commands.
func otherWords() map[string][]string {
	return map[string][]string{
		"run": {"create", "new"}, "exec": {"shell", "ssh", "attach", "connect"}, "ls": {"sandbox", "sandboxes", "get"},
		"kill": {"delete", "remove", "destroy"}, "show": {"inspect", "describe", "info"}, "snapshot": {"commit", "save"}, "logs": {"log"},
		"cp": {"copy", "upload", "download"}, "up": {"serve", "server"},
	}
}

// UnknownCommand is the error for a word that is no command; it suggests similar ones.
func UnknownCommand(cmd *cobra.Command, name string) error {
	for _, c := range cmd.Commands() {
		if cmd.Parent() == nil {
			c.SuggestFor = otherWords()[c.Name()]
		}
	}
	return Usage(cmd, fmt.Errorf("unknown command %q for %q%s", name, cmd.CommandPath(), Meant(cmd, name, cmd.CommandPath()+" ")))
}

// FlagError adds similar flags to the error of an unknown one, and says what the value of a known one should be.
func FlagError(cmd *cobra.Command, err error) error {
	if invalid, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		if want := wanted(invalid.GetFlag().Value.Type()); want != "" {
			err = fmt.Errorf("--%s: %q is not %s", invalid.GetFlag().Name, invalid.GetValue(), want)
		}
		return Usage(cmd, err)
	}
	unknown, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok || unknown.GetSpecifiedShortnames() != "" {
		return Usage(cmd, err)
	}
	flags := &cobra.Command{} // cobra compares the names of commands
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			flags.AddCommand(&cobra.Command{Use: f.Name, Run: func(*cobra.Command, []string) {}})
		}
	})
	return Usage(cmd, fmt.Errorf("%w%s", err, Meant(flags, unknown.GetSpecifiedName(), "--")))
}

// wanted describes the values of a flag's type; empty: its own error does.
func wanted(flagType string) string {
	switch flagType {
	case "duration":
		return "a duration such as 30s, 10m or 1h30m"
	case "uint16":
		return "a whole number from 0 to 65535"
	case "int":
		return "a whole number"
	}
	return ""
}

// Meant is a question that names the commands of parent most similar to name, or empty.
func Meant(parent *cobra.Command, name, lead string) string {
	// Two letters may differ, or one of a short word: else all two-letter words would match.
	parent.SuggestionsMinimumDistance = max(1, min(2, len(name)/2))
	found := parent.SuggestionsFor(name)
	if len(found) == 0 {
		return ""
	}
	for i := range found {
		found[i] = "`" + lead + found[i] + "`"
	}
	return "; did you mean " + strings.Join(found, " or ") + "?"
}
