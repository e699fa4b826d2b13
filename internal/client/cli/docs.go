package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/config"
)

// Root returns the tree of all commands, to describe them. It cannot run them.
func Root() *cobra.Command { return root(&app.App{}) }

// WriteDocs writes the reference of all commands and settings as Markdown.
func WriteDocs(w io.Writer) {
	root := Root()
	fmt.Fprint(w, "# The command line\n\nWritten by internal/client/cli/generate.sh; do not edit.\n\n")
	fmt.Fprint(w, root.Long+"\n\n")
	fmt.Fprint(w, "Results go to standard output, messages to standard error. Exit codes: 0 success, 1 error, 2 usage error; `run` and\n"+
		"`exec` return the command's, 127 if it does not exist and 126 if it cannot be executed. A signal gives 128 and its number:\n"+
		"130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, 141 after a write to a closed pipe.\n\n"+
		"SANDBOX, SNAPSHOT, TEMPLATE, POOL and KEY stand for an ID or a name, as `ls` shows them; an ID wins over a name. The ID of a\n"+
		"sandbox can be shortened to a unique beginning.\n\n"+
		"A flag wins over a `BARCHAN_*` variable, and that over the variable of E2B's clients: `E2B_API_URL`, or else `E2B_DOMAIN` for\n"+
		"the server `https://api.$E2B_DOMAIN`; `E2B_API_KEY`, or else `E2B_ACCESS_TOKEN`, for the key; `E2B_SANDBOX_URL` for the\n"+
		"gateway. The last three count only if one of the first two is set. Without any of them, the server and the key of the data\n"+
		"directory are used.\n\n")
	writeFlags(w, "Flags of every command", root.PersistentFlags(), nil)
	settings := writeSettings(w)
	root.PersistentFlags().VisitAll(func(f *pflag.Flag) { settings[f.Name] = true })
	for _, c := range root.Commands() {
		writeCommand(w, c, settings)
	}
}

// writeSettings writes the settings once for all commands that have them, and returns the names of
// their flags.
func writeSettings(w io.Writer) map[string]bool {
	defaults := config.Default()
	fmt.Fprint(w, "## Settings\n\n`up`, `down`, `doctor` and `config` take each setting as a flag. A flag wins over the environment variable, that over the\n"+
		"key in the YAML file, and that over the default. `barchan config` prints them all with where each came from.\n\n"+
		"| Key | Flag | Variable | Default | |\n|---|---|---|---|---|\n")
	flags := map[string]bool{}
	for _, s := range defaults.Settings() {
		flags[s.Flag()] = true
		value := s.Text()
		if value != "" {
			value = "`" + value + "`"
		}
		fmt.Fprintf(w, "| `%s` | `--%s` | `%s` | %s | %s |\n", s.Key, s.Flag(), s.Env(), value, strings.ReplaceAll(s.Doc, "<", "&lt;"))
	}
	fmt.Fprintln(w)
	return flags
}

func writeCommand(w io.Writer, c *cobra.Command, settings map[string]bool) {
	if !c.IsAvailableCommand() || c.Name() == "help" || c.Name() == "completion" {
		return
	}
	if c.HasSubCommands() {
		if !app.IsNoun(c) {
			writeOne(w, c, settings)
		}
		for _, sub := range c.Commands() {
			writeCommand(w, sub, settings)
		}
		return
	}
	writeOne(w, c, settings)
}

func writeOne(w io.Writer, c *cobra.Command, settings map[string]bool) {
	text := c.Long
	if text == "" {
		text = c.Short + "."
	}
	fmt.Fprintf(w, "## %s\n\n    %s\n\n%s\n\n", c.CommandPath(), c.UseLine(), text)
	if len(c.Aliases) > 0 {
		fmt.Fprintf(w, "Also: `%s`.\n\n", strings.Join(c.Aliases, "`, `"))
	}
	if c.Example != "" {
		fmt.Fprintf(w, "```\n%s\n```\n\n", c.Example)
	}
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.AddFlagSet(c.LocalFlags())
	flags.AddFlagSet(c.InheritedFlags()) // those of a noun; those of every command are in settings
	writeFlags(w, "", flags, settings)
}

func writeFlags(w io.Writer, title string, fs *pflag.FlagSet, without map[string]bool) {
	some := false
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" || without[f.Name] {
			return
		}
		if !some && title != "" {
			fmt.Fprintf(w, "%s:\n\n", title)
		}
		some = true
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		kind, usage := pflag.UnquoteUsage(f)
		if kind != "" {
			name += " " + kind
		}
		switch f.DefValue {
		case "", "false", "0", "0s", "[]":
		default:
			usage += " (default " + f.DefValue + ")"
		}
		fmt.Fprintf(w, "- `%s`: %s\n", name, usage)
	})
	if some {
		fmt.Fprintln(w)
	}
}
