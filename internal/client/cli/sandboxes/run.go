// Package sandboxes has the commands on sandboxes: run, exec, ls, show, logs, fork, pause, resume and kill.
package sandboxes

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// Bounds of calls that continue after Ctrl-C.
const (
	createWithin = 2 * time.Minute
	killWithin   = 30 * time.Second
	// maxPause is the longest pause between two tries of a create; the first is retryAfter.
	maxPause = 4 * time.Second
)

// runOptions are the flags of run.
type runOptions struct {
	processOptions
	parallelOptions

	template, from, image, memory, cpu     string
	timeout                                time.Duration
	keep, filesOnly, allowSecrets, private bool
	metadata, allow, volumes               []string
}

func (o *runOptions) flags(cmd *cobra.Command) {
	o.processOptions.flags(cmd)
	o.parallelOptions.flags(cmd)
	f := cmd.Flags()
	f.StringVar(&o.template, "template", "", "template of the sandbox (default the setting defaultTemplate)")
	f.StringVar(&o.image, "image", "", "image in the place of the template's; this, --memory and --cpu need the Kubernetes API")
	f.StringVar(&o.memory, "memory", "", "limit of memory in the place of the template's, such as 512Mi")
	f.StringVar(&o.cpu, "cpu", "", "limit of CPUs in the place of the template's, such as 2 or 500m")
	f.StringVar(&o.from, "from", "", "snapshot to start from instead, by its ID, or its name for the newest of it")
	f.BoolVar(&o.filesOnly, "files-only", false, "with --from: leave out its memory")
	f.BoolVar(&o.allowSecrets, "allow-secrets", false, "with --from: although it holds variables that its sandbox was created with")
	f.DurationVar(&o.timeout, "timeout", time.Hour, "longest life of the sandbox")
	f.BoolVar(&o.keep, "keep", false, "leave the sandbox running, and print its ID")
	f.BoolVar(&o.private, "private", false, "require the traffic token for the sandbox's ports")
	f.StringArrayVar(&o.allow, "allow", nil, "let it reach only this address, CIDR, host or *.example.com; may be given again")
	f.StringArrayVar(&o.volumes, "volume", nil, "VOLUME:PATH to mount; may be given again")
	f.StringArrayVar(&o.metadata, "metadata", nil, "NAME=VALUE to keep with the sandbox")
}

// RunCommand returns `barchan run`.
func RunCommand(a *app.App) *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run [flags] -- COMMAND [ARG...]",
		Short: "Run a command in a new sandbox",
		Long: "Create a sandbox, run a command in it, and end the sandbox when the command ends, or on Ctrl-C.\n" +
			"Output, errors and the exit code are the command's. With --keep and no command, print the ID of a sandbox that stays.\n" +
			"With --parallel, the command runs once for each line of standard input, which takes the place of {} in it. An output is\n" +
			"printed when its command ends, and the exit code is 1 unless all succeeded. --json prints a line for each input: with\n" +
			"exitCode if the command ended, with error if it did not run to its end.",
		Example: "  barchan run -- uname -a\n  echo 'print(6*7)' | barchan run -- python3\n  barchan run -it -- bash\n  id=$(barchan run --keep)\n" +
			"  barchan run --memory 2Gi --allow pypi.org --allow files.pythonhosted.org -- pip download six\n" +
			"  barchan run --from base:mh8x2k1qabcd -- ps\n" +
			"  seq 500 | barchan run --parallel 20 -- python3 -c 'print({}**2)'",
		Args: func(cmd *cobra.Command, args []string) error {
			if o.keep && len(args) == 0 {
				return o.checkUnused(cmd)
			}
			return app.AtLeast("COMMAND")(cmd, args)
		},
	}
	o.flags(cmd)
	a.JSONFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := o.parallelOptions.check(cmd, a, &o, args); err != nil {
			return err
		}
		v, err := parseVariant(o.image, o.memory, o.cpu)
		if err != nil {
			return app.Usage(cmd, err)
		}
		n, err := sandboxToRun(a, cmd, &o, v)
		if err != nil {
			return err
		}
		if err := o.processOptions.check(cmd, a); err != nil {
			return err
		}
		if o.parallel > 0 {
			return a.WithServer(cmd.Context(), func(t *app.Server) error {
				return runEach(cmd.Context(), a, t, n, v, args, o.processOptions, o.parallelOptions)
			})
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			return snapshotGone(&o, runInNew(cmd.Context(), a, t, n, v, args, o.processOptions, o.keep))
		})
	}
	return cmd
}

// snapshotGone names the snapshot that --from lacks: the API has the word template for it.
func snapshotGone(o *runOptions, err error) error {
	if o.from != "" && errors.Is(err, errs.ErrNotFound) && strings.Contains(err.Error(), "'"+o.from+"'") {
		return app.NoSnapshot(o.from)
	}
	return err
}

// sandboxToRun returns the sandbox of run's flags.
func sandboxToRun(a *app.App, cmd *cobra.Command, o *runOptions, v variant) (n client.CreateOptions, err error) {
	template := o.template
	for _, name := range []string{"template", "from", "image"} {
		if f := cmd.Flags().Lookup(name); f.Changed && f.Value.String() == "" { // a variable that is not set
			return n, app.Usage(cmd, fmt.Errorf("--%s: is empty", name))
		}
	}
	switch {
	case o.from == "" && (o.filesOnly || o.allowSecrets):
		return n, app.Usage(cmd, errors.New("--files-only and --allow-secrets need --from"))
	case o.from != "" && o.template != "":
		return n, app.Usage(cmd, errors.New("want either --template or --from"))
	case o.from != "" && !v.none():
		return n, app.Usage(cmd, errors.New("--image, --memory and --cpu: a snapshot has its own"))
	case o.from != "":
		template = o.from
	}
	if n, err = newSandbox(cmd, a, template, o.timeout, o.metadata); err != nil {
		return n, err
	}
	if n.VolumeMounts, err = volumeMounts(o.volumes); err != nil {
		return n, app.Usage(cmd, err)
	}
	n.AllowSecrets = o.allowSecrets
	n.QueueTimeout = o.queueTimeout(cmd)
	if o.filesOnly {
		n.Memory = new(false)
	}
	n.Network = o.network()
	return n, nil
}

func (o *runOptions) network() *client.Network {
	if !o.private && len(o.allow) == 0 {
		return nil
	}
	n := &client.Network{AllowOut: o.allow}
	if o.private {
		n.AllowPublicTraffic = new(false)
	}
	if len(o.allow) > 0 {
		n.DenyOut = []string{"0.0.0.0/0"}
	}
	return n
}

func volumeMounts(list []string) (mounts []client.VolumeMount, err error) {
	for _, text := range list {
		name, at, ok := strings.Cut(text, ":")
		if !ok || name == "" || at == "" {
			return nil, fmt.Errorf("--volume: %q is not VOLUME:PATH", text)
		}
		mounts = append(mounts, client.VolumeMount{Name: name, Path: at})
	}
	return mounts, nil
}

func newSandbox(cmd *cobra.Command, a *app.App, template string, timeout time.Duration, metadata []string) (client.CreateOptions, error) {
	n := client.CreateOptions{TemplateID: template, Timeout: timeout}
	err := app.AtLeastSecond(cmd, "timeout", timeout)
	if err != nil {
		return n, err
	}
	if n.Metadata, err = keyValues("--metadata", metadata); err != nil {
		return n, app.Usage(cmd, err)
	}
	if n.TemplateID == "" {
		cfg, err := a.Config()
		if err != nil {
			return n, err
		}
		n.TemplateID = cfg.DefaultTemplate
	}
	return n, nil
}

func keyValues(flag string, list []string) (map[string]string, error) {
	out := map[string]string{}
	for _, item := range list {
		name, value, ok := strings.Cut(item, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("%s: %q is not NAME=VALUE: %w", flag, item, errs.ErrInvalid)
		}
		out[name] = value
	}
	return out, nil
}

func runInNew(ctx context.Context, a *app.App, t *app.Server, n client.CreateOptions, v variant, argv []string, o processOptions, keep bool) (err error) {
	// A cancelled create could leave an unknown sandbox; one that waits for the quota has none yet in most cases.
	create := context.WithoutCancel(ctx)
	if n.QueueTimeout > 0 {
		create = ctx
	}
	create, cancel := context.WithTimeout(create, createWithin+n.QueueTimeout)
	defer cancel()
	made := time.Now()
	var s *client.Sandbox
	if v.none() {
		s, err = createOnce(create, t, n)
	} else {
		s, err = createVariant(create, a, t, n, v)
	}
	if err != nil {
		return err
	}
	switch {
	case keep && len(argv) == 0:
		fmt.Fprintln(a.Stdout, s.SandboxID)
		return nil
	case keep:
		fmt.Fprintf(a.Stderr, "sandbox %s\n", s.SandboxID)
	default:
		defer func() { err = errors.Join(err, killQuietly(ctx, a, t, s.SandboxID)) }()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	on := &app.Sandbox{Server: t, ID: s.SandboxID, EndAt: made.Add(n.Timeout)}
	if on.Client, err = t.Agent(s.SandboxID, s.AgentToken, o.user); err != nil {
		return err
	}
	return runProcess(ctx, a, on, argv, o)
}

// killQuietly deletes a sandbox even after Ctrl-C; one that is gone is success.
func killQuietly(ctx context.Context, a *app.App, t *app.Server, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killWithin)
	defer cancel()
	if err := t.REST.Kill(ctx, id); err != nil && !errors.Is(err, errs.ErrNotFound) {
		fmt.Fprintf(a.Stderr, "barchan: sandbox %s could not be killed; do it with `barchan kill %s`\n", id, id)
		return err
	}
	return nil
}

// ExecCommand returns `barchan exec`.
func ExecCommand(a *app.App) *cobra.Command {
	var o processOptions
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: "Run a command in a running sandbox. Output, errors and the exit code are the command's; 127 is a command that is not\n" +
			"there, 126 one that cannot be executed. Ctrl-C, and a closed pipe at the output, end the command. With --detach it goes\n" +
			"on without output, and its process ID is printed.",
		Example: "  barchan exec i3k -- ls -l\n  barchan exec -it i3k -- bash\n  barchan exec -d i3k -- python3 -m http.server\n  barchan exec -u 1000:1000 i3k -- id",
		Args:    app.AtLeast("SANDBOX", "COMMAND"),
	}
	o.flags(cmd)
	cmd.Flags().BoolVarP(&o.detach, "detach", "d", false, "return once the command has started, and print its process ID")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		argv := args[1:]
		if argv[0] == "--" {
			argv = argv[1:]
		}
		if len(argv) == 0 {
			return app.Usage(cmd, errors.New("COMMAND is missing"))
		}
		if err := o.check(cmd, a); err != nil {
			return err
		}
		return a.WithServer(cmd.Context(), func(t *app.Server) error {
			on, err := t.Running(cmd.Context(), args[0], o.user)
			if err != nil {
				return err
			}
			return runProcess(cmd.Context(), a, on, argv, o)
		})
	}
	return cmd
}

// createOnce creates a sandbox. If the connection was lost before the response, it asks again, also while the server restarts: a server
// returns the sandbox that it has created for the key, which would be left over otherwise.
func createOnce(ctx context.Context, t *app.Server, n client.CreateOptions) (*client.Sandbox, error) {
	n.IdempotencyKey = rand.Text()
	lost := false
	for pause := retryAfter; ; pause *= 2 {
		s, err := t.REST.Create(ctx, n)
		lost = lost || responseLost(err)
		if !lost || !errors.Is(err, errs.ErrUnavailable) || pause > maxPause {
			return s, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// responseLost reports whether a server may have acted on a request whose response did not come.
func responseLost(err error) bool {
	if _, answered := errors.AsType[*client.Error](err); answered || !errors.Is(err, errs.ErrUnavailable) {
		return false
	}
	op, network := errors.AsType[*net.OpError](err)
	return !network || op.Op != "dial"
}
