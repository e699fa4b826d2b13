package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// otherWords are what other programs call a command of ours.
func otherWords() map[string][]string {
	return map[string][]string{
		"run": {"create", "new"}, "exec": {"shell", "ssh", "attach", "connect"}, "ls": {"sandbox", "sandboxes", "get"},
		"kill": {"delete", "remove", "destroy"}, "show": {"inspect", "describe", "info"}, "snapshot": {"commit", "save"}, "logs": {"log"},
		"cp": {"copy", "upload", "download"}, "up": {"serve", "server"},
	}
}

// unknownCommand says what people may have meant.
func unknownCommand(cmd *cobra.Command, name string) error {
	for _, c := range cmd.Commands() {
		if cmd.Parent() == nil {
			c.SuggestFor = otherWords()[c.Name()]
		}
	}
	return &usageError{cmd, fmt.Errorf("unknown command %q for %q%s", name, cmd.CommandPath(), meant(cmd, name, cmd.CommandPath()+" "))}
}

// flagError adds to an unknown flag what people may have meant.
func flagError(cmd *cobra.Command, err error) error {
	unknown, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok || unknown.GetSpecifiedShortnames() != "" {
		return &usageError{cmd, err}
	}
	flags := &cobra.Command{} // cobra compares the names of commands
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			flags.AddCommand(&cobra.Command{Use: f.Name, Run: func(*cobra.Command, []string) {}})
		}
	})
	return &usageError{cmd, fmt.Errorf("%w%s", err, meant(flags, unknown.GetSpecifiedName(), "--"))}
}

// meant is a question that names the commands of parent most like name, or nothing.
func meant(parent *cobra.Command, name, lead string) string {
	// Two letters may differ, or one of a short word: else all words of two letters were alike.
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
