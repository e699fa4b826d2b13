// Package cli is the command line: a file per noun. It starts a server through a function in Deps;
// everything else it does as a client of the REST API, the Kubernetes API, a sandbox's agent, and the
// admin socket. It has no rules about sandboxes.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

// Deps has the functions that a client cannot implement.
type Deps struct {
	// Version of this program; empty: of the build's information.
	Version string
	// RunServer runs the server: it returns once ctx is done, or after a failure.
	RunServer func(ctx context.Context, cfg config.Config, log io.Writer) error
	// RemoveAll removes what servers left of a data directory that no server
	// uses: sandboxes, network, cgroups, the directory itself. Repeating it is harmless.
	RemoveAll func(ctx context.Context, cfg config.Config, progress func(adminclient.Event)) error
	// Doctor checks whether this machine can run a server. None runs yet.
	Doctor func(ctx context.Context, cfg config.Config) []adminclient.Check
	// Audit finds leaked resources on a machine without a running server. It may return both.
	Audit func(ctx context.Context, cfg config.Config) ([]adminclient.Finding, error)
}

// Exit codes. run and exec give the remote command's instead.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

// exitCode ends the program with a code and without a message.
type exitCode int

// Error is never shown.
func (e exitCode) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

// usageError is a usage error; the command's usage line is shown with it.
type usageError struct {
	cmd *cobra.Command
	err error
}

// Error describes the usage error.
func (e *usageError) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *usageError) Unwrap() error { return e.err }

// Run runs one command and returns the exit code. Results go to stdout, messages to stderr. When ctx
// ends the command cleans up and returns.
func Run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, deps Deps) int {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a := &app{
		stdin: stdin, deps: deps, lookupEnv: os.LookupEnv,
		stdout: &output{Writer: stdout, stream: "standard output", failed: cancel},
		stderr: &output{Writer: stderr, stream: "standard error", failed: func(error) {}}, // the result does not depend on messages
	}
	root := a.root() //nolint:contextcheck // commands take theirs from cobra
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(a.stdout)
	root.SetErr(a.stderr)
	return a.report(ctx, root.ExecuteContext(ctx))
}

// report prints an error and returns the exit code.
func (a *app) report(ctx context.Context, err error) int {
	cause := context.Cause(ctx)
	if lost, ok := errors.AsType[*outputError](errors.Join(cause, err)); ok {
		if errors.Is(lost, syscall.EPIPE) {
			return 128 + int(syscall.SIGPIPE) // as other programs end at a closed pipe
		}
		err = lost
	}
	if err == nil {
		return exitOK
	}
	if code, ok := errors.AsType[exitCode](err); ok {
		return int(code)
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		if sig, ok := errors.AsType[interrupted](cause); ok {
			return 128 + int(sig.Signal)
		}
		return exitInterrupted
	}
	fmt.Fprintln(a.stderr, "barchan: "+message(err))
	if start, ok := errors.AsType[*startError](err); ok {
		return start.code
	}
	usage, ok := errors.AsType[*usageError](err)
	switch {
	case ok:
		fmt.Fprintf(a.stderr, "usage: %s\nSee `%s --help`.\n", usage.cmd.UseLine(), usage.cmd.CommandPath())
		return exitUsage
	case strings.HasPrefix(err.Error(), "unknown command"): // cobra has no type for it
		fmt.Fprintln(a.stderr, "See `barchan --help`.")
		return exitUsage
	}
	return exitError
}

// message returns the text of an error for users: its public text if it has one. A bare kind at its
// end is removed, because it adds nothing. Text of guests is escaped, except for line ends, which
// joined errors have.
func message(err error) string {
	text, ok := errs.PublicMessage(err)
	if !ok {
		text = err.Error()
	}
	if kind := errs.Kind(err); kind != nil {
		text = strings.TrimSuffix(text, ": "+kind.Error())
	}
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = escaped(lines[i], maxErrorLine)
	}
	return strings.Join(lines, "\n")
}

// app is one run of the program.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	deps           Deps
	lookupEnv      func(string) (string, bool)

	configFile, apiURL, apiKey, kubeconfig string
	json                                   bool
	format                                 format // of lists
	rootFlags                              *config.Flags
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "barchan",
		Short:         "Sandboxes for AI agents on one machine",
		Long:          "Barchan runs untrusted code in isolated sandboxes.\n\nStart a server with `barchan up`, and a first program with `barchan run -- uname -a`.",
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          noun,
		Args:          cobra.ArbitraryArgs,
		Version:       a.version().text(),

		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.chooseNamespace(cmd.Context(), cmd) },
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	p := root.PersistentFlags()
	p.StringVar(&a.configFile, "config", "", "YAML file of settings (default $BARCHAN_CONFIG, then "+config.DefaultFile+")")
	p.StringVar(&a.apiURL, "api-url", "", "REST API (default $BARCHAN_API_URL, $E2B_API_URL, the data directory's server)")
	p.StringVar(&a.apiKey, "api-key", "", "key of the REST API (default $BARCHAN_API_KEY, $E2B_API_KEY, the data directory's)")
	p.StringVar(&a.kubeconfig, "kubeconfig", "", "kubeconfig (default $BARCHAN_KUBECONFIG, then the data directory's)")
	a.rootFlags = config.AddFlags(p, func(key string) bool { return key == "dataDir" })
	root.AddCommand(
		a.upCommand(), a.downCommand(), a.statusCommand(), a.envCommand(),
		a.runCommand(), a.execCommand(), a.lsCommand(), a.showCommand(), a.logsCommand(), a.cpCommand(),
		a.killCommand(), a.pauseCommand(), a.resumeCommand(), a.snapshotCommand(), a.forkCommand(), a.portCommand(), a.portsCommand(),
		a.keyCommand(), a.applyCommand(), a.templateCommand(), a.poolCommand(), a.checkpointCommand(), a.imageCommand(),
		a.netCommand(), a.peersCommand(), a.doctorCommand(), a.configCommand(), a.versionCommand(),
	)
	a.complete(root)
	return root
}

// noun runs a command that only has verbs.
func noun(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return unknownCommand(cmd, args[0])
	}
	return &usageError{cmd, errors.New("a command is missing; one of " + strings.Join(verbs(cmd), ", "))}
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

// nounCommand groups verbs.
func nounCommand(name, short string, verbs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: name, Short: short, RunE: noun, Args: cobra.ArbitraryArgs}
	cmd.AddCommand(verbs...)
	return cmd
}

// exactly requires one argument for each of the names.
func exactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return &usageError{cmd, fmt.Errorf("%s is missing", names[len(args)])}
		case len(args) > len(names):
			return &usageError{cmd, fmt.Errorf("%q is one argument too many", args[len(names)])}
		}
		return nil
	}
}

// atLeast requires one argument for each of the names, or more.
func atLeast(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < len(names) {
			return &usageError{cmd, fmt.Errorf("%s is missing", names[len(args)])}
		}
		return nil
	}
}

func (a *app) jsonFlag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&a.json, "json", false, "print JSON")
}
