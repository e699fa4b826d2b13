// Package cli is the command line. It assembles the commands, which the packages below it have: a package per family, a file per noun. They start a
// server through a function in app.Deps; everything else they do as clients of the REST API, the Kubernetes API, a sandbox's agent, and the admin
// socket. The command line has no rules about sandboxes.
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

	"github.com/barchan-dev/barchan/internal/client/cli/admin"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/artifact"
	"github.com/barchan-dev/barchan/internal/client/cli/build"
	"github.com/barchan-dev/barchan/internal/client/cli/cluster"
	"github.com/barchan-dev/barchan/internal/client/cli/events"
	"github.com/barchan-dev/barchan/internal/client/cli/files"
	"github.com/barchan-dev/barchan/internal/client/cli/mcp"
	"github.com/barchan-dev/barchan/internal/client/cli/ports"
	"github.com/barchan-dev/barchan/internal/client/cli/resources"
	"github.com/barchan-dev/barchan/internal/client/cli/sandboxes"
	"github.com/barchan-dev/barchan/internal/client/cli/ssh"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/config"
)

// Run runs one command and returns the exit code. Results go to stdout, messages to stderr. When ctx
// ends the command cleans up and returns.
func Run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, deps app.Deps) int {
	if ssh.AskPass(args, os.LookupEnv, stdout) {
		return app.CodeOK
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a := &app.App{
		Stdin: stdin, Deps: deps, LookupEnv: os.LookupEnv,
		Stdout: &terminal.Output{Writer: stdout, Stream: "standard output", Failed: cancel},
		Stderr: &terminal.Output{Writer: stderr, Stream: "standard error", Failed: func(error) {}}, // the result does not depend on messages
	}
	root := root(a) //nolint:contextcheck // commands take theirs from cobra
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	return report(ctx, a, root.ExecuteContext(ctx))
}

// report prints an error and returns the exit code.
func report(ctx context.Context, a *app.App, err error) int {
	cause := context.Cause(ctx)
	if lost, ok := errors.AsType[*terminal.OutputError](errors.Join(cause, err)); ok {
		if errors.Is(lost, syscall.EPIPE) {
			return 128 + int(syscall.SIGPIPE) // as other programs end at a closed pipe
		}
		err = lost
	}
	if err == nil {
		return app.CodeOK
	}
	if code, ok := errors.AsType[app.ExitCode](err); ok {
		return int(code)
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		if sig, ok := errors.AsType[terminal.Interrupted](cause); ok {
			return 128 + int(sig.Signal)
		}
		return terminal.CodeInterrupted
	}
	fmt.Fprintln(a.Stderr, "barchan: "+app.Message(err))
	if start, ok := errors.AsType[*app.StartError](err); ok {
		return start.Code
	}
	usage, ok := errors.AsType[*app.UsageError](err)
	switch {
	case ok:
		fmt.Fprintf(a.Stderr, "usage: %s\nSee `%s --help`.\n", app.UseLine(usage.Cmd), usage.Cmd.CommandPath())
		return app.CodeUsage
	case strings.HasPrefix(err.Error(), "unknown command"): // cobra has no type for it
		fmt.Fprintln(a.Stderr, "See `barchan --help`.")
		return app.CodeUsage
	}
	return app.CodeError
}

func root(a *app.App) *cobra.Command {
	root := &cobra.Command{
		Use:           "barchan",
		Short:         "Sandboxes for AI agents on one machine",
		Long:          "Barchan runs untrusted code in isolated sandboxes.\n\nStart a server with `barchan up`, and a first program with `barchan run -- uname -a`.",
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          app.Noun,
		Args:          cobra.ArbitraryArgs,
		Annotations:   app.NounMark(),
		Version:       a.Version().Text(),

		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.ChooseNamespace(cmd.Context(), cmd) },
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(app.FlagError)
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	p := root.PersistentFlags()
	p.StringVar(&a.ConfigFile, "config", "", "YAML file of settings (default $BARCHAN_CONFIG, then "+config.DefaultFile+")")
	p.StringVar(&a.APIURL, "api-url", "", "REST API (default $BARCHAN_API_URL, $E2B_API_URL, the data directory's server)")
	p.StringVar(&a.APIKey, "api-key", "", "key of the REST API (default $BARCHAN_API_KEY, $E2B_API_KEY, the data directory's)")
	p.StringVar(&a.Kubeconfig, "kubeconfig", "", "kubeconfig (default $BARCHAN_KUBECONFIG, then the data directory's)")
	a.RootFlags = config.AddFlags(p, func(key string) bool { return key == "dataDir" })
	root.AddCommand(
		admin.UpCommand(a), admin.DownCommand(a), admin.StatusCommand(a), admin.EnvCommand(a), admin.UICommand(a),
		sandboxes.RunCommand(a), sandboxes.ExecCommand(a), sandboxes.LsCommand(a), sandboxes.TopCommand(a), sandboxes.ShowCommand(a), sandboxes.LogsCommand(a), files.CpCommand(a),
		sandboxes.KillCommand(a), sandboxes.PauseCommand(a), sandboxes.ResumeCommand(a), artifact.SnapshotCommand(a), sandboxes.ForkCommand(a), ports.PortCommand(a), ports.ListCommand(a),
		ssh.Command(a), ssh.ConfigCommand(a), ssh.KeyCommand(a), ssh.ProxyCommand(a),
		build.Command(a), resources.KeyCommand(a), resources.QuotaCommand(a), resources.ApplyCommand(a), resources.TemplateCommand(a), resources.PoolCommand(a), artifact.CheckpointCommand(a), artifact.ImageCommand(a), artifact.VolumeCommand(a), events.Command(a), events.WebhookCommand(a), mcp.Command(a),
		admin.NetCommand(a), admin.PeersCommand(a), admin.DoctorCommand(a), admin.AuditCommand(a), admin.SecretsCommand(a), admin.ConfigCommand(a), admin.BenchCommand(a), cluster.Command(a), admin.DocsCommand(a), versionCommand(a),
	)
	root.InitDefaultHelpCmd()
	if help, _, err := root.Find([]string{"help"}); err == nil {
		help.Args = func(_ *cobra.Command, args []string) error {
			if about, rest, err := root.Find(args); err == nil && len(rest) > 0 {
				return app.UnknownCommand(about, rest[0])
			}
			return nil
		}
	}
	root.InitDefaultCompletionCmd()
	if completion, _, err := root.Find([]string{"completion"}); err == nil {
		completion.RunE, completion.Args, completion.Annotations = app.Noun, cobra.ArbitraryArgs, app.NounMark()
	}
	app.CheckArguments(root)
	completer{a}.complete(root)
	return root
}

func versionCommand(a *app.App) *cobra.Command {
	return a.JSONFlag(&cobra.Command{
		Use:   "version",
		Short: "Print the version",
		RunE:  func(*cobra.Command, []string) error { return a.Result(a.Version(), a.Version().Text()) },
	})
}
